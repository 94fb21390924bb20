//! Streams on the simulated CUDA driver: tensors are taken while others are on
//! their way, and every test also fails if the driver finds a violation.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "these are tests, helpers included")]

mod model;
mod sim;

use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::TensorRegion;
use fst::device::cuda::Cuda;
use fst::device::{self, Scratch};
use fst::dtype::Dtype;
use fst::error::{Error, Kind, Result};
use fst::load::stream::{Order, Stream};
use fst::load::transfer::Transfer;
use fst::options::{Options, ReaderChoice};
use fst::plan::Destination;
use fst::staging::pool;
use model::Model;
use sim::Sim;
use sim::abi::Fault;
use sim::gpu::Gpu;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

/// Little room and small chunks, so that tensors land one after the other.
const TIGHT: Options = Options {
    reader: ReaderChoice::Auto,
    chunk_bytes: 4 << 10,
    staging_bytes: 16 << 10,
    threads: 3,
    queue_depth: 8,
    drop_cache: false,
};

const ORDERS: [Order; 2] = [Order::Submitted, Order::Ready];

/// The simulator with work as late as it can be, then with several random delays; one at a time.
fn schedules() -> impl Iterator<Item = Sim> {
    (0..6).map(|seed| if seed == 0 { Sim::start_lazy(0) } else { Sim::start(seed) })
}

/// Ends a test: with all that the process keeps between loads given back, nothing may be left.
fn finish(sim: Sim) {
    device::release();
    pool::release();
    sim.finish().assert_clean();
}

/// Tensors that need several chunks, that share one, and an empty one.
fn model() -> Model {
    let shapes: [(Dtype, &[u64]); 8] = [
        (Dtype::F32, &[50, 70]),
        (Dtype::BF16, &[3]),
        (Dtype::U8, &[0, 5]),
        (Dtype::I64, &[3]),
        (Dtype::F16, &[11_000]),
        (Dtype::Bool, &[17]),
        (Dtype::F64, &[40, 40]),
        (Dtype::U8, &[5000]),
    ];
    Model::sharded(&shapes, 2)
}

/// A caller of streams, as C++ is one: a checkpoint, and a block of device memory for each tensor.
struct Caller<'a> {
    gpu: &'a Gpu<'a>,
    checkpoint: Checkpoint,
    wanted: Arc<[TensorRegion]>,
    blocks: Vec<u64>,
    /// All fillings share it.
    scratch: Scratch,
}

/// Enough for chunks as small as these.
const SCRATCH_BYTES: u32 = 64 << 10;

impl<'a> Caller<'a> {
    /// The allocator has handed out blocks whose last use is still queued.
    fn new(gpu: &'a Gpu<'a>, model: &Model) -> Caller<'a> {
        let checkpoint = Checkpoint::open(&model.paths).unwrap();
        let wanted: Arc<[TensorRegion]> =
            checkpoint.entries().map(|(file, entry)| TensorRegion::whole(file, entry)).collect::<Result<_>>().unwrap();
        let blocks = wanted.iter().map(|wanted| gpu.allocate(bytes_of(wanted).max(1))).collect();
        let scratch =
            Scratch { address: gpu.allocate(usize::try_from(SCRATCH_BYTES).unwrap()), bytes: SCRATCH_BYTES.into() };
        let caller = Caller { gpu, checkpoint, wanted, blocks, scratch };
        caller.use_blocks(0..caller.blocks.len());
        caller
    }

    fn open(&self, order: Order) -> Result<Stream<Cuda>> {
        let cuda = Cuda::open(self.gpu.ordinal, u64::try_from(self.gpu.stream).unwrap())?;
        Stream::open(&self.checkpoint, Arc::clone(&self.wanted), Arc::new(cuda), TIGHT, order)
    }

    fn destinations(&self, tensors: Range<usize>) -> Vec<Destination> {
        let all = |wanted: usize| {
            let (end, address) = (self.wanted[wanted].bytes(), self.blocks[wanted]);
            Destination { tensor: wanted, begin: 0, end, address, cast: None }
        };
        tensors.map(all).collect()
    }

    fn submit(&self, stream: &Stream<Cuda>, tensors: Range<usize>) -> Result<()> {
        let batch = stream.planner().prepare(&self.destinations(tensors.clone()))?;
        assert!(batch.scratch_bytes() <= usize::try_from(SCRATCH_BYTES).unwrap());
        let tensors: Vec<usize> = tensors.collect();
        // SAFETY: the blocks are the gpu's, and are used again only once the tensor was taken or the stream is gone.
        unsafe { stream.submit(&tensors, batch, self.scratch) }
    }

    /// What the caller's kernels on its current stream find in a block of which they are the next users.
    fn read(&self, tensor: usize) -> Vec<u8> {
        match bytes_of(&self.wanted[tensor]) {
            0 => Vec::new(),
            bytes => self.gpu.read(self.blocks[tensor], bytes),
        }
    }

    /// Queues work of the blocks' next owner.
    fn use_blocks(&self, tensors: Range<usize>) {
        for tensor in tensors {
            self.gpu.queue_fill(self.blocks[tensor], bytes_of(&self.wanted[tensor]).max(1));
        }
    }
}

fn bytes_of(wanted: &TensorRegion) -> usize {
    usize::try_from(wanted.bytes()).unwrap()
}

#[test]
fn tensors_are_ready_for_whatever_is_queued_next() {
    let model = model();
    for order in ORDERS {
        for sim in schedules() {
            let gpu = Gpu::new(&sim, 0);
            let caller = Caller::new(&gpu, &model);
            let stream = caller.open(order).unwrap();
            caller.submit(&stream, 0..3).unwrap();
            let mut taken = Vec::new();
            // Each is submitted while some before it are on their way still.
            for more in [3..4, 4..7, 7..8, 0..0] {
                for _ in 0..2 {
                    let tensor = stream.take().unwrap();
                    assert!(caller.read(tensor) == model.tensors[tensor].bytes, "{tensor}");
                    // The user frees it, and its block has a new owner while others are on their way.
                    caller.use_blocks(tensor..tensor + 1);
                    taken.push(tensor);
                }
                caller.submit(&stream, more).unwrap();
            }
            stream.finish().unwrap();
            if order == Order::Ready {
                taken.sort_unstable();
            }
            assert!(taken.iter().copied().eq(0..8), "{taken:?}");
            drop(gpu);
            finish(sim);
        }
    }
}

#[test]
fn the_stream_that_is_current_may_change() {
    let model = model();
    for sim in schedules() {
        let gpu = Gpu::new(&sim, 0);
        let caller = Caller::new(&gpu, &model);
        let others = [(); 2].map(|()| sim.cuda.create_stream().unwrap());
        let stream = caller.open(Order::Submitted).unwrap();
        caller.submit(&stream, 0..8).unwrap();
        for (&current, tensor) in others.iter().cycle().zip(0..8) {
            stream.set_stream(u64::try_from(current).unwrap()).unwrap();
            assert_eq!(stream.take(), Ok(tensor));
            let bytes = bytes_of(&caller.wanted[tensor]);
            if bytes > 0 {
                // Nobody waits on the host.
                sim.launch_read(current, caller.blocks[tensor], bytes).unwrap();
            }
        }
        stream.finish().unwrap();
        for other in others {
            sim.cuda.synchronize_stream(other).unwrap();
            sim.cuda.destroy_stream(other).unwrap();
        }
        for (tensor, of) in model.tensors.iter().enumerate() {
            assert!(caller.read(tensor) == of.bytes, "{tensor}");
        }
        drop(gpu);
        finish(sim);
    }
}

#[test]
fn a_tensor_is_taken_before_those_behind_it_are_read() {
    let model = model();
    for order in ORDERS {
        for sim in schedules() {
            let gpu = Gpu::new(&sim, 0);
            let caller = Caller::new(&gpu, &model);
            let stream = caller.open(order).unwrap();
            caller.submit(&stream, 0..1).unwrap();
            // No other has been submitted, so no other byte can have been read.
            assert_eq!(stream.take(), Ok(0));
            caller.submit(&stream, 1..4).unwrap();
            assert!(caller.read(0) == model.tensors[0].bytes);
            assert!((1..4).contains(&stream.take().unwrap()));
            drop(stream);
            caller.use_blocks(0..8);
            drop(gpu);
            finish(sim);
        }
    }
}

#[test]
fn what_was_not_taken_may_be_freed_when_the_stream_is_gone() {
    let model = model();
    for take_count in 0..8 {
        for sim in schedules() {
            let gpu = Gpu::new(&sim, 0);
            let caller = Caller::new(&gpu, &model);
            let stream = caller.open(Order::Ready).unwrap();
            for tensors in [0..2, 2..5, 5..8] {
                caller.submit(&stream, tensors).unwrap();
            }
            for _ in 0..take_count {
                stream.take().unwrap();
            }
            drop(stream);
            caller.use_blocks(0..8);
            drop(gpu);
            finish(sim);
        }
    }
}

#[test]
fn there_is_nothing_to_take_but_what_was_submitted() {
    let model = model();
    let sim = Sim::start(0);
    let gpu = Gpu::new(&sim, 0);
    let caller = Caller::new(&gpu, &model);
    let stream = caller.open(Order::Submitted).unwrap();
    assert_eq!(stream.take().unwrap_err().kind(), Kind::Internal);
    caller.submit(&stream, 1..2).unwrap();
    assert_eq!(stream.take(), Ok(1));
    assert_eq!(stream.take().unwrap_err().kind(), Kind::Internal);
    stream.finish().unwrap();
    drop(gpu);
    finish(sim);
}

#[test]
fn an_idle_stream_holds_no_staging() {
    let model = model();
    let one_slot = Options { staging_bytes: TIGHT.chunk_bytes, ..TIGHT };
    for sim in schedules().take(3) {
        let gpu = Gpu::new(&sim, 0);
        let caller = Caller::new(&gpu, &model);
        let idle = caller.open(Order::Submitted).unwrap();
        caller.submit(&idle, 0..1).unwrap();
        assert_eq!(idle.take(), Ok(0));
        // Another load, for which there is no memory beside what the stream has used, comes to its end.
        let other = Caller::new(&gpu, &model);
        let cuda = Arc::new(Cuda::open(0, u64::try_from(gpu.stream).unwrap()).unwrap());
        let mut transfer =
            Transfer::open(&other.checkpoint, Arc::clone(&other.wanted), cuda, one_slot.clone()).unwrap();
        let batch = transfer.planner().prepare(&other.destinations(0..8)).unwrap();
        // SAFETY: the blocks are the gpu's.
        unsafe { transfer.fill(&batch, other.scratch) }.unwrap();
        transfer.finish().unwrap();
        caller.submit(&idle, 1..8).unwrap();
        (1..8).for_each(|tensor| assert_eq!(idle.take(), Ok(tensor)));
        for (tensor, of) in model.tensors.iter().enumerate() {
            assert!(caller.read(tensor) == of.bytes && other.read(tensor) == of.bytes, "{tensor}");
        }
        idle.finish().unwrap();
        drop(gpu);
        finish(sim);
    }
}

#[test]
fn streams_at_once_do_not_disturb_each_other() {
    let model = model();
    for sim in schedules() {
        std::thread::scope(|scope| {
            for ordinal in [0, 1, 1] {
                let (sim, model) = (&sim, &model);
                scope.spawn(move || {
                    let gpu = Gpu::new(sim, ordinal);
                    let callers = [(); 2].map(|()| Caller::new(&gpu, model));
                    let streams = [0, 1].map(|index: usize| callers[index].open(Order::Submitted).unwrap());
                    for tensor in 0..8 {
                        for (caller, stream) in callers.iter().zip(&streams) {
                            caller.submit(stream, tensor..tensor + 1).unwrap();
                        }
                        for (caller, stream) in callers.iter().zip(&streams) {
                            assert_eq!(stream.take(), Ok(tensor));
                            assert!(caller.read(tensor) == model.tensors[tensor].bytes);
                        }
                    }
                });
            }
        });
        finish(sim);
    }
}

/// Everything through one stream in three fillings.
fn run(caller: &Caller<'_>) -> Result<()> {
    let stream = caller.open(Order::Submitted)?;
    for tensors in [0..3, 3..5, 5..8] {
        caller.submit(&stream, tensors.clone())?;
        for tensor in tensors {
            assert_eq!(stream.take()?, tensor);
        }
    }
    stream.finish()
}

/// Streams with a fault at the first such call, the second, and so on until there is none left to fail, and returns
/// how each ended.
fn with_fault_at_every_call(start: impl Fn(u64) -> Sim, fault: Fault) -> Vec<Error> {
    let model = model();
    let mut errors = Vec::new();
    for at in 1.. {
        let sim = start(at);
        let gpu = Gpu::new(&sim, 0);
        let caller = Caller::new(&gpu, &model);
        sim.inject(fault, at);
        let result = run(&caller);
        let is_over = sim.counters().faults == 0;
        match result {
            Ok(()) => model.tensors.iter().enumerate().for_each(|(tensor, of)| {
                assert!(caller.read(tensor) == of.bytes, "{tensor}");
            }),
            Err(error) => errors.push(error),
        }
        // The stream is gone, however it ended.
        caller.use_blocks(0..8);
        drop(gpu);
        finish(sim);
        if is_over {
            break;
        }
    }
    errors
}

#[test]
fn out_of_memory_at_any_call_is_an_error_and_nothing_more() {
    let errors = with_fault_at_every_call(Sim::start, Fault::OutOfMemory);
    // A context, two streams, and events for the order with the caller at least.
    assert!(errors.len() >= 4, "{errors:?}");
    assert!(errors.iter().all(|error| error.kind() == Kind::OutOfMemory), "{errors:?}");
}

#[test]
fn a_copy_that_fails_in_the_middle_is_an_error_and_nothing_more() {
    for fault in [Fault::CopyEnqueue, Fault::CopyAsync] {
        for start in [Sim::start, Sim::start_lazy] {
            let errors = with_fault_at_every_call(start, fault);
            assert!(errors.len() >= 10, "{errors:?}");
            assert!(errors.iter().all(|error| error.kind() == Kind::Device), "{fault:?}: {errors:?}");
        }
    }
}

#[test]
fn a_file_that_is_cut_in_the_middle_gives_what_is_there_and_then_the_error() {
    for sim in schedules() {
        let model = model();
        let gpu = Gpu::new(&sim, 0);
        let caller = Caller::new(&gpu, &model);
        let stream = caller.open(Order::Submitted).unwrap();
        let second = File::options().write(true).open(&model.paths[1]).unwrap();
        second.set_len(second.metadata().unwrap().len() - 100).unwrap();
        for tensors in [0..4, 4..7, 7..8] {
            caller.submit(&stream, tensors).unwrap();
        }
        (0..7).for_each(|tensor| assert_eq!(stream.take(), Ok(tensor)));
        assert!(caller.read(6) == model.tensors[6].bytes);
        for _ in 0..2 {
            let error = stream.take().unwrap_err();
            assert_eq!(error.kind(), Kind::Io);
            assert!(error.to_string().contains(r#"shard-1.safetensors: tensor "tensor.7": byte "#), "{error}");
        }
        drop(stream);
        caller.use_blocks(0..8);
        drop(gpu);
        finish(sim);
    }
}
