//! Loads to the simulated GPU in windows: tensors are allocated while others are in flight. Every test also fails if the
//! driver reports a violation.

use crate::gpu_load::{Load, bytes_of, mixed_model};
use crate::load_failures::LOAD_FAULTS;
use crate::model::Model;
use crate::sigint;
use crate::sim::gpu::Gpu;
use crate::sim::{Sim, TIGHT, schedules, with_fault_at_every_call};
use fst::device::Scratch;
use fst::device::cuda::Cuda;
use fst::error::{Kind, Result};
use fst::load::background::BackgroundTransfer;
use fst::options::Options;
use fst::staging::{Request, pool};
use std::cell::Cell;
use std::fs::File;
use std::ops::Range;

const WINDOWS: [Range<usize>; 4] = [0..2, 2..5, 5..7, 7..8];

/// Options with one slot.
const ONE_SLOT: Options = Options { staging_bytes: TIGHT.chunk_bytes, ..TIGHT };

/// Caller of transfers in windows, as C++ is.
struct Caller<'a> {
    load: Load<'a>,
    /// Scratch memory, which windows share until one needs more.
    scratch: Cell<Scratch>,
}

impl<'a> Caller<'a> {
    fn new(gpu: &'a Gpu<'a>, model: &Model) -> Caller<'a> {
        Caller { load: Load::all(gpu, model), scratch: Cell::default() }
    }

    fn open(&self, options: Options) -> Result<BackgroundTransfer<Cuda>> {
        Ok(BackgroundTransfer::new(self.load.open(options)?, &self.load.checkpoint))
    }

    /// Allocates the tensors of a window and submits them.
    fn submit(&self, transfer: &mut BackgroundTransfer<Cuda>, window: Range<usize>) -> Result<()> {
        let gpu = self.load.gpu;
        for tensor in window.clone().filter(|&tensor| self.load.regions[tensor].bytes() > 0) {
            // The last use of a block may still be queued.
            gpu.queue_fill(self.load.blocks[tensor], bytes_of(&self.load.regions[tensor]));
        }
        let batch = transfer.planner().prepare(&self.load.destinations()[window])?;
        let bytes = u64::try_from(batch.scratch_bytes()).unwrap();
        if self.scratch.get().bytes < bytes {
            let address = gpu.allocate(batch.scratch_bytes());
            gpu.queue_fill(address, batch.scratch_bytes());
            self.scratch.set(Scratch { address, bytes });
        }
        // SAFETY: the blocks are used again only after the transfer has finished or was dropped.
        unsafe { transfer.submit(batch, self.scratch.get()) }
    }

    /// Runs a load. The next user gets the memory when it has ended.
    fn run(&self, options: Options) -> Result<()> {
        let mut transfer = self.open(options)?;
        let submitted = WINDOWS.into_iter().try_for_each(|window| self.submit(&mut transfer, window));
        let result = submitted.and_then(|()| transfer.finish());
        let Scratch { address, bytes } = self.scratch.get();
        if bytes > 0 {
            self.load.gpu.queue_fill(address, usize::try_from(bytes).unwrap());
        }
        result.inspect_err(|_| self.load.use_blocks())
    }
}

#[test]
fn windows_are_exact() {
    let model = mixed_model();
    for sim in schedules() {
        let gpu = Gpu::new(&sim, 0);
        for options in [TIGHT, ONE_SLOT] {
            let caller = Caller::new(&gpu, &model);
            caller.run(options).unwrap();
            caller.load.assert_holds(&model);
        }
    }
}

/// As loads do whose casts are PyTorch's. Window 3..4 is one chunk, which goes to the caller's stream.
#[test]
fn a_batch_of_the_caller_runs_after_those_of_the_thread() {
    let model = mixed_model();
    for window in [3..4, 4..8] {
        for sim in schedules() {
            let gpu = Gpu::new(&sim, 0);
            let mut caller = Caller::new(&gpu, &model);
            let (block, bytes) = (gpu.allocate(22_000), &model.tensors[window.start].bytes);
            caller.load.blocks[0] = block;
            caller.load.blocks[window.start] = block;
            let mut transfer = caller.open(TIGHT).unwrap();
            for window in [0..1, 1..3] {
                caller.submit(&mut transfer, window).unwrap();
            }
            let batch = transfer.planner().prepare(&caller.load.destinations()[window.clone()]).unwrap();
            let scratch = Scratch {
                address: gpu.allocate(batch.scratch_bytes().max(1)),
                bytes: u64::try_from(batch.scratch_bytes()).unwrap(),
            };
            // SAFETY: the blocks are used again only after the transfer has finished.
            unsafe { transfer.fill(&batch, scratch) }.unwrap();
            assert!(gpu.read(block, bytes.len()) == *bytes);
            // The thread starts again.
            caller.submit(&mut transfer, 0..1).unwrap();
            transfer.finish().unwrap();
            assert!(gpu.read(block, model.tensors[0].bytes.len()) == model.tensors[0].bytes);
        }
    }
}

#[test]
fn a_fault_at_any_call_is_a_clean_error() {
    let model = mixed_model();
    for (fault, least) in LOAD_FAULTS {
        with_fault_at_every_call(fault, least, |sim, begin| {
            let gpu = Gpu::new(sim, 0);
            let caller = Caller::new(&gpu, &model);
            begin();
            caller.run(TIGHT)?;
            caller.load.assert_holds(&model);
            Ok(())
        });
    }
}

#[test]
fn an_error_of_the_thread_is_that_of_the_load() {
    for sim in schedules() {
        let model = mixed_model();
        let gpu = Gpu::new(&sim, 0);
        let caller = Caller::new(&gpu, &model);
        let first = File::options().write(true).open(&model.paths[0]).unwrap();
        first.set_len(first.metadata().unwrap().len() - 100).unwrap();
        let error = caller.run(TIGHT).unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        assert!(error.to_string().contains(r#"shard-0.safetensors: tensor "tensor."#), "{error}");
    }
}

#[test]
fn destinations_may_be_freed_after_the_transfer_is_dropped() {
    let model = mixed_model();
    for count in 0..WINDOWS.len() {
        for sim in schedules() {
            let gpu = Gpu::new(&sim, 0);
            let caller = Caller::new(&gpu, &model);
            let mut transfer = caller.open(TIGHT).unwrap();
            for window in WINDOWS.into_iter().take(count) {
                caller.submit(&mut transfer, window).unwrap();
            }
            drop(transfer);
            caller.load.use_blocks();
        }
    }
}

/// Submits all windows of a load whose thread waits for a slot, and ends it.
fn end_while_the_thread_waits(end: impl Fn(BackgroundTransfer<Cuda>)) {
    let model = mixed_model();
    let sim = Sim::start(0);
    let before = sigint::handler();
    sigint::handle_with(sigint::counting());
    let gpu = Gpu::new(&sim, 0);
    let caller = Caller::new(&gpu, &model);
    let request = Request { bytes: ONE_SLOT.chunk_bytes, node: None, staging_bytes: ONE_SLOT.staging_bytes };
    let slot = pool::take(&request, &|| Ok(())).unwrap();
    assert!(slot.is_some());
    let mut transfer = caller.open(ONE_SLOT).unwrap();
    for window in WINDOWS {
        caller.submit(&mut transfer, window).unwrap();
    }
    end(transfer);
    caller.load.use_blocks();
    drop(slot);
    assert_eq!(sim.counters().copies, 0);
    sigint::handle_with(before);
}

#[test]
fn dropping_a_transfer_ends_the_thread() {
    end_while_the_thread_waits(drop);
}

#[test]
fn an_interrupt_ends_the_thread() {
    end_while_the_thread_waits(|transfer| {
        sigint::interrupt();
        assert_eq!(transfer.finish().unwrap_err().kind(), Kind::Interrupted);
    });
}
