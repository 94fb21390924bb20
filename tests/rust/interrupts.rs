//! Ctrl-C during each wait for a GPU that is busy with work of the program. Nothing may use memory after its owner, which
//! the simulated driver checks when the work runs at last.

use crate::gds;
use crate::gpu_load::{Load, mixed_model};
use crate::model::Model;
use crate::sigint;
use crate::sim::abi::Fault;
use crate::sim::gpu::Gpu;
use crate::sim::{Sim, TIGHT};
use fst::device::Scratch;
use fst::device::cuda::{self, Cuda};
use fst::dtype::Dtype;
use fst::error::{Kind, Result};
use fst::format::layout::{Layout, Tensor};
use fst::load::background::BackgroundTransfer;
use fst::load::stream::{Order, Stream};
use fst::options::Options;
use fst::os::sigint::Watch;
use fst::save::atomic_file::OutputFile;
use fst::save::file_kernel::Linux;
use fst::save::{DeviceStream, Extent, Save};
use fst::staging::pool;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Slots for all chunks of the model, so that only the end of a load waits.
const ROOMY: Options = Options { chunk_bytes: 64 << 10, staging_bytes: 4 << 20, ..TIGHT };

fn cuda(gpu: &Gpu<'_>) -> Cuda {
    Cuda::open(gpu.ordinal, gpu.stream as u64).unwrap()
}

/// Loads of one chunk, each of which leaves a slot with a copy, until one waits for the oldest.
fn load_many(gpu: &Gpu<'_>, model: &Model) -> Result<()> {
    (0..40).try_for_each(|_| Load::all(gpu, model).run(ROOMY))
}

fn load_one(model: &Model, gpu: &Gpu<'_>, options: Options) -> Result<()> {
    Load::all(gpu, model).run(options)
}

/// Loads through a stream, from which the caller takes the tensors on its current stream `current`.
fn stream(load: &Load<'_>, current: usize) -> Result<()> {
    let device = Arc::new(cuda(load.gpu));
    let stream = Stream::open(&load.checkpoint, Arc::clone(&load.regions), device, ROOMY, Order::Submitted).unwrap();
    let batch = stream.planner().prepare(&load.destinations()).unwrap();
    let bytes = batch.scratch_bytes().max(1);
    let scratch = Scratch { address: load.gpu.allocate(bytes), bytes: bytes as u64 };
    // SAFETY: only the stream uses the block.
    unsafe { stream.set_scratch(scratch) };
    let tensors: Vec<usize> = (0..load.regions.len()).collect();
    // SAFETY: the blocks are used again only after the stream has ended.
    unsafe { stream.submit(&tensors, batch) }.unwrap();
    stream.set_stream(current as u64)?;
    for _ in &tensors {
        stream.take()?;
    }
    stream.finish()
}

/// Takes the tensors of a load on another stream than they were submitted on.
fn stream_of_two(gpu: &Gpu<'_>, sim: &Sim) -> Result<()> {
    let load = Load::all(gpu, &mixed_model());
    let [other, event] = gpu.with_context(|| [sim.cuda.create_stream().unwrap(), sim.cuda.create_event().unwrap()]);
    let result = stream(&load, other);
    // PyTorch lets the first stream use the memory again once the other one has completed its work.
    gpu.with_context(|| sim.cuda.record_event(event, other)).unwrap();
    gpu.with_context(|| sim.cuda.wait_event(gpu.stream, event)).unwrap();
    load.use_blocks();
    gpu.with_context(|| sim.cuda.destroy_event(event)).unwrap();
    gpu.with_context(|| sim.cuda.destroy_stream(other)).unwrap();
    result
}

/// Loads with copies in flight before one that the driver rejects.
fn rejected_copy(gpu: &Gpu<'_>, sim: &Sim) -> Result<()> {
    sim.inject(Fault::CopyEnqueue, 3);
    load_one(&mixed_model(), gpu, ROOMY)
}

fn background(load: &Load<'_>) -> Result<()> {
    let mut transfer = BackgroundTransfer::new(load.open(ROOMY)?, &load.checkpoint);
    let batch = transfer.planner().prepare(&load.destinations())?;
    let bytes = batch.scratch_bytes().max(1);
    let scratch = Scratch { address: load.gpu.allocate(bytes), bytes: bytes as u64 };
    // SAFETY: the blocks are used again only after the transfer has ended.
    unsafe { transfer.submit(batch, scratch) }?;
    transfer.finish()
}

fn save(gpu: &Gpu<'_>) -> Result<()> {
    let directory = tempfile::tempdir().unwrap();
    let address = gpu.allocate(1 << 16);
    gpu.queue_fill(address, 1 << 16);
    let layout = Layout::new(&[Tensor::new("a", Dtype::U8, vec![1 << 16])?], &None)?;
    let output = OutputFile::create(&directory.path().join("saved"), Box::new(Linux))?;
    let memory = DeviceStream { memory: Arc::new(cuda(gpu)), stream: gpu.stream as u64 };
    let mut save = Save::begin(layout, output, vec![memory], &ROOMY)?;
    // SAFETY: the GPU owns the memory, and nothing else writes to it before the stream has read it.
    unsafe { save.append(&[Extent { device: 0, address, length: 1 << 16 }], &[]) }
}

/// Releases the memory of slots with copies in flight.
fn release(gpu: &Gpu<'_>, model: &Model) -> Result<()> {
    load_one(model, gpu, ROOMY)?;
    let watch = Watch::begin();
    pool::release(&|| watch.check()).map(drop)
}

/// Needs slots of another size than those that are in flight and take the whole bound.
fn replace_slots(gpu: &Gpu<'_>, model: &Model) -> Result<()> {
    load_one(model, gpu, ROOMY)?;
    load_one(&mixed_model(), gpu, Options { staging_bytes: 64 << 10, ..TIGHT })
}

fn wait_for_event(gpu: &Gpu<'_>, sim: &Sim) -> Result<()> {
    gpu.queue_fill(gpu.allocate(1), 1);
    let event = gpu.with_context(|| {
        let event = sim.cuda.create_event().unwrap();
        sim.cuda.record_event(event, gpu.stream).unwrap();
        event
    });
    let watch = Watch::begin();
    // SAFETY: the event exists.
    let waited = unsafe { cuda::wait_for_event(event, gpu.ordinal, &|| watch.check()) };
    gpu.with_context(|| sim.cuda.destroy_event(event)).unwrap();
    waited
}

#[test]
fn an_interrupt_ends_every_wait_for_a_busy_gpu() {
    type Run = fn(&Gpu<'_>, &Sim) -> Result<()>;
    let one = || Model::new(&[(Dtype::F32, &[300][..])]);
    let waits: [(&str, Run); 12] = [
        ("slots of ended loads", |gpu, _| load_many(gpu, &Model::new(&[(Dtype::F32, &[300][..])]))),
        ("slots of a load", |gpu, _| load_one(&mixed_model(), gpu, TIGHT)),
        ("end of a load", |gpu, _| load_one(&mixed_model(), gpu, ROOMY)),
        ("end of a load in the background", |gpu, _| background(&Load::all(gpu, &mixed_model()))),
        ("end of a load with a rejected copy", rejected_copy),
        ("stream", |gpu, _| stream(&Load::all(gpu, &mixed_model()), gpu.stream)),
        ("stream of two callers", stream_of_two),
        ("end of a stream", |gpu, _| stream(&Load::all(gpu, &Model::new(&[(Dtype::F32, &[300][..])])), gpu.stream)),
        ("save", |gpu, _| save(gpu)),
        ("release", |gpu, _| release(gpu, &Model::new(&[(Dtype::F32, &[300][..])]))),
        ("slots of another size", |gpu, _| replace_slots(gpu, &Model::new(&[(Dtype::F32, &[300][..])]))),
        ("event of the caller", wait_for_event),
    ];
    for (name, run) in waits {
        let sim = Sim::start(0);
        let before = sigint::handler();
        sigint::handle_with(sigint::counting());
        let gpu = Gpu::new(&sim, 0);
        load_one(&one(), &gpu, TIGHT).unwrap();
        let (result, waited) = sim.while_busy(|| {
            let sender = thread::spawn(|| {
                thread::sleep(Duration::from_millis(200));
                sigint::interrupt();
                Instant::now()
            });
            let result = run(&gpu, &sim);
            let ended = Instant::now();
            (result, ended.saturating_duration_since(sender.join().unwrap()))
        });
        sigint::handle_with(before);
        assert_eq!(result.map_err(|error| error.kind()), Err(Kind::Interrupted), "{name}");
        assert!(waited < Duration::from_millis(500), "{name}: {waited:?}");
        // The next load finds slots once the GPU has time.
        load_one(&one(), &gpu, TIGHT).unwrap();
    }
}

#[test]
fn an_interrupt_ends_the_wait_of_gpudirect_storage() {
    let sim = Sim::start(0);
    let _cufile = gds::start(&sim);
    let before = sigint::handler();
    sigint::handle_with(sigint::counting());
    let gpu = Gpu::new(&sim, 0);
    let load = Load::all(&gpu, &mixed_model());
    gpu.queue_fill(load.blocks[0], 1);
    let result = sim.while_busy(|| {
        let sender = thread::spawn(|| {
            thread::sleep(Duration::from_millis(200));
            sigint::interrupt();
        });
        let result = load.run(gds::DIRECT);
        sender.join().unwrap();
        result
    });
    sigint::handle_with(before);
    assert_eq!(result.map_err(|error| error.kind()), Err(Kind::Interrupted));
}
