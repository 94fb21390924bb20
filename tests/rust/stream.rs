//! Streams on the simulated CUDA driver: tensors are taken while others are in flight. Every test also fails if the
//! driver reports a violation.

use crate::gpu_load::{Load, bytes_of, mixed_model};
use crate::load_failures::LOAD_FAULTS;
use crate::model::Model;
use crate::sim::gpu::Gpu;
use crate::sim::{TIGHT, schedules, with_fault_at_every_call};
use fst::device::Scratch;
use fst::device::cuda::Cuda;
use fst::dtype::Dtype;
use fst::error::{Kind, Result};
use fst::load::stream::{Order, Stream};
use fst::options::Options;
use std::cell::Cell;
use std::fs::File;
use std::ops::{Deref, Range};
use std::sync::Arc;

const ORDERS: [Order; 2] = [Order::Submitted, Order::Ready];

/// Caller of streams, as C++ is.
struct Caller<'a> {
    load: Load<'a>,
    /// Scratch memory, which batches share until one needs more.
    scratch: Cell<Scratch>,
}

impl<'a> Deref for Caller<'a> {
    type Target = Load<'a>;

    fn deref(&self) -> &Load<'a> {
        &self.load
    }
}

impl<'a> Caller<'a> {
    fn new(gpu: &'a Gpu<'a>, model: &Model) -> Caller<'a> {
        Caller { load: Load::all(gpu, model), scratch: Cell::default() }
    }

    fn open(&self, order: Order) -> Result<Stream<Cuda>> {
        let cuda = Cuda::open(self.gpu.ordinal, u64::try_from(self.gpu.stream).unwrap())?;
        Stream::open(&self.checkpoint, Arc::clone(&self.regions), Arc::new(cuda), TIGHT, order)
    }

    fn submit(&self, stream: &Stream<Cuda>, tensors: Range<usize>) -> Result<()> {
        let batch = stream.planner().prepare(&self.destinations()[tensors.clone()])?;
        let bytes = u64::try_from(batch.scratch_bytes()).unwrap();
        if self.scratch.get().bytes < bytes {
            let address = self.gpu.allocate(batch.scratch_bytes());
            // The last use of the block is still queued.
            self.gpu.queue_fill(address, batch.scratch_bytes());
            self.scratch.set(Scratch { address, bytes });
            // SAFETY: only the stream uses the block.
            unsafe { stream.set_scratch(self.scratch.get()) };
        }
        let tensors: Vec<usize> = tensors.collect();
        // SAFETY: the blocks are used again only after the tensor was taken or the stream was dropped.
        unsafe { stream.submit(&tensors, batch) }
    }

    /// Returns the address and the length of a tensor's block, or `None` for an empty tensor.
    fn block(&self, tensor: usize) -> Option<(u64, usize)> {
        Some((self.blocks[tensor], bytes_of(&self.regions[tensor]))).filter(|&(_, bytes)| bytes > 0)
    }

    /// Returns the bytes that a kernel on the caller's current stream finds in a block.
    fn read(&self, tensor: usize) -> Vec<u8> {
        self.block(tensor).map_or(Vec::new(), |(address, bytes)| self.gpu.read(address, bytes))
    }
}

#[test]
fn a_taken_tensor_is_ready_for_work_queued_next() {
    let model = mixed_model();
    for order in ORDERS {
        for sim in schedules() {
            let gpu = Gpu::new(&sim, 0);
            let caller = Caller::new(&gpu, &model);
            let stream = caller.open(order).unwrap();
            caller.submit(&stream, 0..3).unwrap();
            let mut taken = Vec::new();
            // Each batch is submitted while tensors of earlier ones are in flight.
            for more in [3..4, 4..7, 7..8, 0..0] {
                for _ in 0..2 {
                    let tensor = stream.take().unwrap();
                    assert!(caller.read(tensor) == model.tensors[tensor].bytes, "{tensor}");
                    // The user frees the tensor, and its block has a new user while other tensors are in flight.
                    if let Some((address, bytes)) = caller.block(tensor) {
                        gpu.queue_fill(address, bytes);
                    }
                    taken.push(tensor);
                }
                caller.submit(&stream, more).unwrap();
            }
            stream.finish().unwrap();
            if order == Order::Ready {
                taken.sort_unstable();
            }
            assert!(taken.iter().copied().eq(0..8), "{taken:?}");
        }
    }
}

/// Batches of large and small chunks share a block, which grows once: kernels of one batch may run late.
#[test]
fn batches_that_need_different_scratch_memory_do_not_overwrite_each_other() {
    let sizes: Vec<[u64; 1]> = (0..144).map(|tensor| [10 + 40 * (tensor / 24 % 3)]).collect();
    let shapes: Vec<(Dtype, &[u64])> = sizes.iter().map(|size| (Dtype::F32, &size[..])).collect();
    let model = Model::new(&shapes);
    for order in ORDERS {
        for sim in schedules() {
            let gpu = Gpu::new(&sim, 0);
            let caller = Caller::new(&gpu, &model);
            let stream = caller.open(order).unwrap();
            for batch in 0..6 {
                caller.submit(&stream, batch * 24..batch * 24 + 24).unwrap();
            }
            for _ in 0..shapes.len() {
                stream.take().unwrap();
            }
            stream.finish().unwrap();
            caller.assert_holds(&model);
        }
    }
}

#[test]
fn the_current_stream_may_change() {
    let model = mixed_model();
    for sim in schedules() {
        let gpu = Gpu::new(&sim, 0);
        let caller = Caller::new(&gpu, &model);
        let others = [(); 2].map(|()| gpu.with_context(|| sim.cuda.create_stream()).unwrap());
        let stream = caller.open(Order::Submitted).unwrap();
        caller.submit(&stream, 0..8).unwrap();
        for (&current, tensor) in others.iter().cycle().zip(0..8) {
            stream.set_stream(u64::try_from(current).unwrap()).unwrap();
            assert_eq!(stream.take(), Ok(tensor));
            if let Some((address, bytes)) = caller.block(tensor) {
                // The host does not wait.
                sim.launch_read(current, address, bytes).unwrap();
            }
        }
        stream.finish().unwrap();
        for other in others {
            gpu.with_context(|| sim.cuda.synchronize_stream(other)).unwrap();
            gpu.with_context(|| sim.cuda.destroy_stream(other)).unwrap();
        }
        caller.assert_holds(&model);
    }
}

#[test]
fn untaken_tensors_may_be_freed_after_the_stream_is_dropped() {
    let model = mixed_model();
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
            caller.use_blocks();
        }
    }
}

#[test]
fn only_submitted_tensors_can_be_taken() {
    let model = mixed_model();
    for (order, sim) in ORDERS.into_iter().zip(schedules()) {
        let gpu = Gpu::new(&sim, 0);
        let caller = Caller::new(&gpu, &model);
        let stream = caller.open(order).unwrap();
        assert_eq!(stream.take().unwrap_err().kind(), Kind::Internal);
        caller.submit(&stream, 1..2).unwrap();
        assert_eq!(stream.take(), Ok(1));
        assert_eq!(stream.take().unwrap_err().kind(), Kind::Internal);
        stream.finish().unwrap();
    }
}

#[test]
fn an_idle_stream_holds_no_staging_memory() {
    let model = mixed_model();
    let one_slot = Options { staging_bytes: TIGHT.chunk_bytes, ..TIGHT };
    for sim in schedules().take(3) {
        let gpu = Gpu::new(&sim, 0);
        let caller = Caller::new(&gpu, &model);
        let idle = caller.open(Order::Submitted).unwrap();
        caller.submit(&idle, 0..1).unwrap();
        assert_eq!(idle.take(), Ok(0));
        // Another load completes, although all staging memory is what the stream has used.
        let other = Load::all(&gpu, &model);
        other.run(one_slot.clone()).unwrap();
        other.assert_holds(&model);
        caller.submit(&idle, 1..8).unwrap();
        (1..8).for_each(|tensor| assert_eq!(idle.take(), Ok(tensor)));
        caller.assert_holds(&model);
        idle.finish().unwrap();
    }
}

/// Loads all tensors through one stream in three batches.
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

#[test]
fn a_fault_at_any_call_is_a_clean_error() {
    let model = mixed_model();
    for (fault, least) in LOAD_FAULTS {
        with_fault_at_every_call(fault, least, |sim, begin| {
            let gpu = Gpu::new(sim, 0);
            let caller = Caller::new(&gpu, &model);
            begin();
            let result = run(&caller);
            if result.is_ok() {
                caller.assert_holds(&model);
            }
            // The stream was dropped.
            caller.use_blocks();
            result
        });
    }
}

#[test]
fn a_truncated_file_gives_its_tensors_and_then_the_error() {
    for sim in schedules() {
        let model = mixed_model();
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
        caller.use_blocks();
    }
}

#[test]
fn the_callers_stream_waits_once_for_the_tensors_of_a_chunk() {
    let model = Model::new(&vec![(Dtype::F32, &[10][..]); 1000]);
    for (order, sim) in ORDERS.into_iter().zip(schedules()) {
        let gpu = Gpu::new(&sim, 0);
        let caller = Caller::new(&gpu, &model);
        let stream = caller.open(order).unwrap();
        let chunks = stream.planner().prepare(&caller.destinations()).unwrap().chunks().len() as u64;
        assert!((10..=250).contains(&chunks), "{chunks}");
        let before = sim.counters();
        caller.submit(&stream, 0..1000).unwrap();
        let current = u64::try_from(gpu.stream).unwrap();
        for _ in 0..1000 {
            // C++ names the current stream before each tensor.
            stream.set_stream(current).unwrap();
            stream.take().unwrap();
        }
        stream.finish().unwrap();
        let after = sim.counters();
        // Each of the two copy streams waits once for the caller, and the caller for both after each chunk.
        assert!(after.waits - before.waits <= 2 + 2 * chunks, "{after:?}");
        // The caller's work, each chunk for its slot, both copy streams when tensors are ready, and both at the end.
        assert!(after.records - before.records <= 3 + 3 * chunks, "{after:?}");
        assert!(after.syncs - before.syncs <= 2, "{after:?}");
        caller.assert_holds(&model);
    }
}
