//! The simulated CUDA driver tested by itself: a correct program pleases it,
//! and one mistake of each kind that it looks for is found, whatever the delays.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "these are tests, helpers included")]

mod sim;

use memmap2::MmapMut;
use sim::abi::{Fault, Kind, MEMORY_TYPE_DEVICE, MEMORY_TYPE_HOST, Memcpy2D, POISON, REGISTER_PORTABLE, Status};
use sim::gpu::Gpu;
use sim::{Cuda, Sim};
use std::os::unix::fs::FileExt;

/// What the simulator takes for the image of the kernels: the beginning of a fatbin.
const IMAGE: [u8; 4] = [0x50, 0xED, 0x55, 0xBA];

/// Bytes of the blocks in these tests.
const BLOCK: usize = 1000;

/// Pinned host memory, as a program with one slot would hold it.
struct Slot {
    cuda: Cuda,
    memory: MmapMut,
    is_registered: bool,
}

impl Slot {
    fn new(cuda: Cuda) -> Slot {
        let mut slot = Slot::pageable(cuda);
        cuda.register(&slot.memory, REGISTER_PORTABLE).unwrap();
        slot.is_registered = true;
        slot
    }

    fn pageable(cuda: Cuda) -> Slot {
        let mut memory = MmapMut::map_anon(4 * BLOCK).unwrap();
        memory.iter_mut().zip((0..=250).cycle()).for_each(|(byte, value)| *byte = value);
        Slot { cuda, memory, is_registered: false }
    }

    /// Copies device memory to the beginning of the slot.
    fn fetch(&mut self, source: u64, bytes: usize, stream: usize) -> Result<(), Status> {
        self.cuda.copy_to_host(self.memory.as_mut_ptr().expose_provenance(), source, bytes, stream)
    }

    fn unregister(&mut self) -> Result<(), Status> {
        self.is_registered = false;
        self.cuda.unregister(self.memory.as_ptr().addr())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.is_registered {
            // Refused when the context is lost, but done.
            let _ = self.unregister();
        }
    }
}

/// A strided copy out of the beginning of `source`.
fn strided(
    source: &[u8],
    source_pitch: usize,
    target: u64,
    target_pitch: usize,
    width: usize,
    rows: usize,
) -> Memcpy2D {
    Memcpy2D {
        src_memory_type: MEMORY_TYPE_HOST,
        src_host: source.as_ptr().expose_provenance(),
        src_pitch: source_pitch,
        dst_memory_type: MEMORY_TYPE_DEVICE,
        dst_device: target,
        dst_pitch: target_pitch,
        width_bytes: width,
        height: rows,
        ..Memcpy2D::default()
    }
}

/// Makes `later` wait for what is on `earlier` now.
fn order(cuda: &Cuda, earlier: usize, later: usize) {
    let event = cuda.create_event().unwrap();
    cuda.record_event(event, earlier).unwrap();
    cuda.wait_event(later, event).unwrap();
    cuda.destroy_event(event).unwrap();
}

/// Runs a test and asserts that just these violations are found: with work that
/// runs as late as it can, and with several random delays.
fn assert_found(kinds: &[Kind], test: impl Fn(&Sim)) {
    let starts = [Sim::start_lazy as fn(u64) -> Sim].into_iter().chain([Sim::start as fn(u64) -> Sim; 10]);
    for (seed, start) in (0..).zip(starts) {
        let sim = start(seed);
        test(&sim);
        let report = sim.finish();
        assert_eq!(report.kinds(), kinds, "seed {seed}: {:#?}", report.violations);
    }
}

/// As [`assert_found`], for a mistake that does harm only if work runs late.
fn assert_found_when_late(kinds: &[Kind], test: impl Fn(&Sim)) {
    let sim = Sim::start_lazy(0);
    test(&sim);
    let report = sim.finish();
    assert_eq!(report.kinds(), kinds, "{:#?}", report.violations);
}

/// What fst does for one tensor, without a mistake.
#[test]
fn a_correct_upload_is_clean_and_exact() {
    assert_found(&[], |sim| {
        let cuda = &sim.cuda;
        let gpu = Gpu::new(sim, 0);
        let slot = Slot::new(sim.cuda);
        let block = gpu.allocate(BLOCK);
        gpu.queue_fill(block, BLOCK);

        let copies = cuda.create_stream().unwrap();
        order(cuda, gpu.stream, copies);
        cuda.copy(block, &slot.memory[..100], copies).unwrap();
        // Rows of 10 bytes, 30 apart in the slot, go to columns 5 to 14 of rows of 20 bytes.
        cuda.copy_2d(&strided(&slot.memory, 30, block + 205, 20, 10, 4), copies).unwrap();
        let done = cuda.create_event().unwrap();
        cuda.record_event(done, copies).unwrap();
        cuda.wait_event(gpu.stream, done).unwrap();

        let mut expected = vec![0x11; BLOCK];
        expected[..100].copy_from_slice(&slot.memory[..100]);
        for row in 0..4 {
            expected[205 + 20 * row..][..10].copy_from_slice(&slot.memory[30 * row..][..10]);
        }
        assert_eq!(gpu.read(block, BLOCK), expected);

        cuda.synchronize_event(done).unwrap();
        cuda.destroy_event(done).unwrap();
        cuda.destroy_stream(copies).unwrap();
        let counters = sim.counters();
        assert_eq!((counters.copies, counters.copied_bytes, counters.syncs), (2, 140, 2));
        assert_eq!((counters.live_registrations, counters.registered_bytes), (1, 4 * BLOCK as u64));
    });
}

/// One program per kind, each with that mistake and no other.
fn plant(kind: Kind, sim: &Sim) {
    let cuda = &sim.cuda;
    let gpu = Gpu::new(sim, 0);
    let mut slot = Slot::new(sim.cuda);
    let block = gpu.allocate(BLOCK);
    match kind {
        Kind::SourceChanged => {
            cuda.copy(block, &slot.memory[..10], gpu.stream).unwrap();
            slot.memory[3] = 99;
        }
        Kind::TargetChanged => {
            slot.fetch(block, BLOCK, gpu.stream).unwrap();
            slot.memory[3] = 99;
        }
        Kind::Unpinned => {
            let pageable = [1; 10];
            cuda.copy(block, &pageable, gpu.stream).unwrap();
            gpu.synchronize();
        }
        Kind::HostReleased => {
            cuda.copy(block, &slot.memory[..10], gpu.stream).unwrap();
            slot.unregister().unwrap();
        }
        Kind::OutOfBounds => {
            let result = cuda.copy(block + 1, &slot.memory[..BLOCK], gpu.stream);
            assert_eq!(result, Err(Status::InvalidValue));
        }
        Kind::MissingWait => {
            gpu.queue_fill(block, BLOCK);
            let copies = cuda.create_stream().unwrap();
            cuda.copy(block, &slot.memory[..10], copies).unwrap();
            cuda.synchronize_stream(copies).unwrap();
            cuda.destroy_stream(copies).unwrap();
        }
        Kind::Leak => {
            cuda.create_event().unwrap();
        }
        Kind::WrongContext => {
            let _other = Gpu::new(sim, 1);
            let result = cuda.copy(block, &slot.memory[..10], gpu.stream);
            assert_eq!(result, Err(Status::InvalidContext));
        }
        Kind::WrongDevice => {
            let other = Gpu::new(sim, 1);
            cuda.copy(block, &slot.memory[..10], other.stream).unwrap();
        }
        Kind::WorkLost => {
            let copies = cuda.create_stream().unwrap();
            sim.launch_write(copies, block, BLOCK, 1).unwrap();
            cuda.destroy_stream(copies).unwrap();
        }
        Kind::FreedInUse => {
            let other = cuda.allocate(BLOCK).unwrap();
            cuda.copy(other, &slot.memory[..10], gpu.stream).unwrap();
            cuda.free(other).unwrap();
        }
        Kind::DoubleFree => {
            let other = cuda.allocate(BLOCK).unwrap();
            cuda.free(other).unwrap();
            assert_eq!(cuda.free(other), Err(Status::InvalidValue));
        }
        Kind::UseAfterFree => {
            let copies = cuda.create_stream().unwrap();
            cuda.destroy_stream(copies).unwrap();
            assert_eq!(cuda.copy(block, &slot.memory[..10], copies), Err(Status::InvalidHandle));
        }
        Kind::BadLaunch => {
            let module = cuda.load_module(&IMAGE).unwrap();
            let kernel = cuda.function(module, c"fst_scatter").unwrap();
            let result = cuda.launch(kernel, [0, 256], gpu.stream, &[&block.to_le_bytes(), &[0; 4], &[0; 4]]);
            assert_eq!(result, Err(Status::InvalidValue));
        }
    }
    gpu.synchronize();
    cuda.set_current(gpu.context).unwrap();
}

#[test]
fn a_mistake_of_each_kind_is_found() {
    for &kind in Kind::ALL {
        match kind {
            Kind::SourceChanged | Kind::TargetChanged => assert_found_when_late(&[kind], |sim| plant(kind, sim)),
            // The block's owner gives it back while the lost work is pending.
            Kind::WorkLost => assert_found(&[Kind::FreedInUse, kind], |sim| plant(kind, sim)),
            _ => assert_found(&[kind], |sim| plant(kind, sim)),
        }
    }
}

#[test]
fn work_runs_later_and_in_the_order_of_events() {
    assert_found_when_late(&[], |sim| {
        let gpu = Gpu::new(sim, 0);
        let (first, second) = (gpu.stream, sim.cuda.create_stream().unwrap());
        let block = gpu.allocate(BLOCK);
        sim.launch_write(first, block, BLOCK, 1).unwrap();
        order(&sim.cuda, first, second);
        sim.launch_write(second, block, BLOCK, 2).unwrap();
        let done = sim.cuda.create_event().unwrap();
        assert_eq!(sim.cuda.query_event(done), Ok(()), "an event that was never recorded is done");
        sim.cuda.record_event(done, second).unwrap();
        assert_eq!(sim.cuda.query_event(done), Err(Status::NotReady));
        // Every question lets one piece of work run, so asking often enough is waiting.
        while sim.cuda.query_event(done).is_err() {}
        assert_eq!(sim.read(block, BLOCK).unwrap(), [2; BLOCK]);
        sim.cuda.destroy_event(done).unwrap();
        sim.cuda.destroy_stream(second).unwrap();
    });
}

#[test]
fn a_copy_to_the_host_is_there_once_it_was_waited_for_and_not_before() {
    let sim = Sim::start_lazy(0);
    let gpu = Gpu::new(&sim, 0);
    let block = gpu.allocate(BLOCK);
    gpu.queue_fill(block, BLOCK);
    let mut slot = Slot::new(sim.cuda);
    slot.fetch(block, BLOCK, gpu.stream).unwrap();
    assert!(slot.memory[..BLOCK].iter().all(|&byte| byte == POISON));
    gpu.synchronize();
    assert!(slot.memory[..BLOCK].iter().all(|&byte| byte == 0x11));
    assert_eq!(usize::from(slot.memory[BLOCK]), BLOCK % 251);
    drop((slot, gpu));
    sim.finish().assert_clean();
}

#[test]
fn a_copy_to_the_host_comes_behind_what_it_copies() {
    assert_found(&[Kind::MissingWait], |sim| {
        let gpu = Gpu::new(sim, 0);
        let side = sim.cuda.create_stream().unwrap();
        let block = gpu.allocate(BLOCK);
        gpu.queue_fill(block, BLOCK);
        let mut slot = Slot::new(sim.cuda);
        slot.fetch(block, BLOCK, side).unwrap();
        sim.cuda.synchronize_stream(side).unwrap();
        gpu.synchronize();
        sim.cuda.destroy_stream(side).unwrap();
    });
    assert_found(&[Kind::HostReleased], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        let mut slot = Slot::new(sim.cuda);
        slot.fetch(block, BLOCK, gpu.stream).unwrap();
        slot.unregister().unwrap();
    });
    assert_found(&[Kind::Unpinned], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        let mut slot = Slot::pageable(sim.cuda);
        slot.fetch(block, BLOCK, gpu.stream).unwrap();
        gpu.synchronize();
    });
}

#[test]
fn the_default_stream_is_a_stream_of_the_current_context() {
    assert_found(&[Kind::MissingWait], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        sim.launch_write(0, block, BLOCK, 1).unwrap();
        sim.launch_write(1, block, BLOCK, 2).unwrap();
        sim.launch_write(gpu.stream, block, BLOCK, 3).unwrap();
        gpu.synchronize();
        sim.cuda.synchronize_stream(0).unwrap();
    });
}

#[test]
fn fresh_memory_is_poison_and_out_of_the_hosts_reach() {
    let sim = Sim::start(0);
    let gpu = Gpu::new(&sim, 1);
    let (first, second) = (gpu.allocate(BLOCK), gpu.allocate(BLOCK));
    assert_eq!(sim.read(first, BLOCK).unwrap(), [POISON; BLOCK]);
    sim.write(first, b"abc").unwrap();
    assert_eq!(sim.read(first, 4).unwrap(), [b'a', b'b', b'c', POISON]);
    // What the kernel cannot read for us, we cannot read either.
    let own_memory = std::fs::File::open("/proc/self/mem").unwrap();
    for address in [first, second, second + BLOCK as u64] {
        assert!(own_memory.read_at(&mut [0], address).is_err());
    }
    drop(gpu);
    sim.finish().assert_clean();
}

#[test]
fn a_source_must_stay_mapped_and_registered_until_its_copy_was_waited_for() {
    // Unmapped before it is unregistered.
    assert_found(&[Kind::HostReleased], |sim| {
        let _gpu = Gpu::new(sim, 0);
        let slot = MmapMut::map_anon(BLOCK).unwrap();
        sim.cuda.register(&slot, 0).unwrap();
        let start = slot.as_ptr().addr();
        drop(slot);
        sim.cuda.unregister(start).unwrap();
    });
    // Pageable, and unmapped while the copy is pending.
    assert_found_when_late(&[Kind::HostReleased], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        sim.inject(Fault::RefusePinning, 0);
        let slot = Slot::pageable(sim.cuda);
        assert_eq!(sim.cuda.register(&slot.memory, 0), Err(Status::NotSupported));
        sim.cuda.copy(block, &slot.memory[..BLOCK], gpu.stream).unwrap();
        drop(slot);
        gpu.synchronize();
    });
}

#[test]
fn pinned_memory_is_pinned_as_a_whole_and_where_it_was_asked_for() {
    assert_found(&[Kind::Unpinned, Kind::Unpinned], |sim| {
        let slot = Slot::pageable(sim.cuda);
        let (gpu, other) = (Gpu::new(sim, 0), Gpu::new(sim, 1));
        let block = other.allocate(BLOCK);
        sim.cuda.register(&slot.memory[..BLOCK], REGISTER_PORTABLE).unwrap();
        sim.cuda.set_current(gpu.context).unwrap();
        sim.cuda.register(&slot.memory[BLOCK..2 * BLOCK], 0).unwrap();
        assert_eq!(sim.cuda.register(&slot.memory[10..20], 0), Err(Status::HostMemoryAlreadyRegistered));

        sim.cuda.set_current(other.context).unwrap();
        sim.cuda.copy(block, &slot.memory[..BLOCK], other.stream).unwrap();
        // Half of it belongs to one registration and half to another.
        sim.cuda.copy(block, &slot.memory[BLOCK / 2..][..BLOCK], other.stream).unwrap();
        // Pinned, but for the other context only.
        sim.cuda.copy(block, &slot.memory[BLOCK..][..BLOCK], other.stream).unwrap();
        other.synchronize();
        let start = slot.memory.as_ptr().addr();
        sim.cuda.unregister(start).unwrap();
        sim.cuda.unregister(start + BLOCK).unwrap();
    });
}

#[test]
fn every_row_of_a_strided_copy_must_lie_inside_the_allocation() {
    let copy = |rows: usize, target_pitch: usize, offset: u64| {
        move |sim: &Sim| {
            let gpu = Gpu::new(sim, 0);
            let slot = Slot::new(sim.cuda);
            let block = gpu.allocate(BLOCK);
            let copy = strided(&slot.memory, 20, block + offset, target_pitch, 10, rows);
            let result = sim.cuda.copy_2d(&copy, gpu.stream);
            gpu.synchronize();
            assert_eq!(result.is_err(), offset + target_pitch as u64 * (rows as u64 - 1) + 10 > BLOCK as u64);
        }
    };
    assert_found(&[], copy(10, 110, 0));
    assert_found(&[Kind::OutOfBounds], copy(10, 110, 1));
    assert_found(&[Kind::OutOfBounds], copy(11, 110, 0));
    assert_found(&[], copy(100, 10, 0));
}

#[test]
fn calls_that_the_real_driver_refuses_are_refused() {
    let sim = Sim::start(0);
    let gpu = Gpu::new(&sim, 0);
    let slot = Slot::new(sim.cuda);
    let block = gpu.allocate(BLOCK);
    let good = strided(&slot.memory, 20, block, 10, 10, 3);
    for bad in [
        Memcpy2D { width_bytes: 11, ..good },
        Memcpy2D { dst_x_bytes: 1, ..good },
        Memcpy2D { src_pitch: 1 << 31, ..good },
        Memcpy2D { dst_pitch: 0, ..good },
    ] {
        assert_eq!(sim.cuda.copy_2d(&bad, gpu.stream), Err(Status::InvalidValue));
    }
    assert_eq!(sim.cuda.copy_2d(&Memcpy2D { height: 0, ..good }, gpu.stream), Ok(()));
    assert_eq!(sim.cuda.copy(block, &[], gpu.stream), Ok(()));
    assert_eq!(sim.cuda.device_count(), Ok(2));
    assert_eq!((sim.cuda.device(1), sim.cuda.device(2)), (Ok(1), Err(Status::InvalidDevice)));
    assert_eq!(sim.cuda.set_current(1234), Err(Status::InvalidContext));
    let (name, meaning) = sim.cuda.describe(Status::OutOfMemory as u32).unwrap();
    assert_eq!((&*name, &*meaning), ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"));
    assert_eq!(sim.cuda.describe(12345), Err(Status::InvalidValue));
    assert_eq!(sim.counters().copies, 0);
    drop((slot, gpu));
    sim.finish().assert_clean();
}

#[test]
fn memory_must_not_be_used_by_two_streams_at_once() {
    // The caller's kernel reads what nobody told it to wait for.
    assert_found(&[Kind::MissingWait], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        let copies = sim.cuda.create_stream().unwrap();
        sim.launch_write(copies, block, BLOCK, 1).unwrap();
        sim.launch_read(gpu.stream, block, BLOCK).unwrap();
        sim.cuda.synchronize_stream(copies).unwrap();
        sim.cuda.destroy_stream(copies).unwrap();
    });
    // A wait for an earlier point of the stream is not enough.
    assert_found(&[Kind::MissingWait], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        let copies = sim.cuda.create_stream().unwrap();
        sim.launch_write(copies, block, 1, 1).unwrap();
        order(&sim.cuda, copies, gpu.stream);
        sim.launch_write(copies, block + 1, 1, 1).unwrap();
        sim.launch_read(gpu.stream, block, 1).unwrap();
        sim.launch_read(gpu.stream, block, 2).unwrap();
        sim.cuda.synchronize_stream(copies).unwrap();
        sim.cuda.destroy_stream(copies).unwrap();
    });
    // The host reads before it has waited for the writer.
    assert_found(&[Kind::MissingWait], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        gpu.queue_fill(block, BLOCK);
        sim.read(block, 1).unwrap();
        gpu.synchronize();
        sim.read(block, 1).unwrap();
    });
    // Two may read, and two may write columns that lie between each other's.
    assert_found(&[], |sim| {
        let gpu = Gpu::new(sim, 0);
        let slot = Slot::new(sim.cuda);
        let (block, columns) = (gpu.allocate(BLOCK), gpu.allocate(BLOCK));
        let other = sim.cuda.create_stream().unwrap();
        for (stream, offset) in [(gpu.stream, 0), (other, 10)] {
            sim.launch_read(stream, block, BLOCK).unwrap();
            sim.cuda.copy_2d(&strided(&slot.memory, 10, columns + offset, 20, 10, 50), stream).unwrap();
        }
        sim.cuda.synchronize_stream(other).unwrap();
        sim.cuda.destroy_stream(other).unwrap();
        gpu.synchronize();
    });
}

#[test]
fn a_wait_may_pass_through_another_stream_or_the_host() {
    assert_found(&[], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        let [a, b, c] = [(); 3].map(|()| sim.cuda.create_stream().unwrap());
        sim.launch_write(a, block, BLOCK, 1).unwrap();
        order(&sim.cuda, a, b);
        order(&sim.cuda, b, c);
        sim.launch_write(c, block, BLOCK, 2).unwrap();
        std::thread::scope(|scope| scope.spawn(|| sim.cuda.synchronize_stream(c).unwrap()).join().unwrap());
        assert_eq!(gpu.read(block, BLOCK), [2; BLOCK]);
        for stream in [a, b, c] {
            sim.cuda.destroy_stream(stream).unwrap();
        }
    });
}

#[test]
fn everything_that_is_left_over_is_reported() {
    let kinds = [Kind::Leak; 4];
    assert_found(&kinds, |sim| {
        let context = sim.cuda.retain_context(1).unwrap();
        sim.cuda.set_current(context).unwrap();
        sim.cuda.create_stream().unwrap();
        sim.cuda.create_event().unwrap();
        let slot = Slot::new(sim.cuda);
        let counters = sim.counters();
        assert_eq!((counters.live_contexts, counters.live_streams, counters.live_events), (1, 1, 1));
        // It stays mapped and registered.
        std::mem::forget(slot);
    });
}

#[test]
fn work_needs_a_live_context_on_the_thread_that_queues_it() {
    assert_found(&[Kind::WrongContext, Kind::WrongContext], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        let (stream, event) = (gpu.stream, sim.cuda.create_event().unwrap());
        let result = std::thread::scope(|scope| {
            let elsewhere = scope.spawn(|| {
                assert_eq!(sim.cuda.record_event(event, stream), Err(Status::InvalidContext));
                sim.launch_write(stream, block, BLOCK, 1)
            });
            elsewhere.join().unwrap()
        });
        assert_eq!(result, Err(Status::InvalidContext));
        sim.cuda.destroy_event(event).unwrap();
    });
    assert_found(&[Kind::UseAfterFree], |sim| {
        let context = sim.cuda.retain_context(0).unwrap();
        sim.cuda.release_context(0).unwrap();
        assert_eq!(sim.cuda.set_current(context), Err(Status::InvalidContext));
    });
}

#[test]
fn destroyed_handles_are_told_from_living_ones() {
    let kinds = [Kind::UseAfterFree, Kind::UseAfterFree, Kind::UseAfterFree, Kind::DoubleFree, Kind::DoubleFree];
    assert_found(&kinds, |sim| {
        let gpu = Gpu::new(sim, 0);
        let mut slot = Slot::new(sim.cuda);
        let event = sim.cuda.create_event().unwrap();
        sim.cuda.destroy_event(event).unwrap();
        assert_eq!(sim.cuda.destroy_event(event), Err(Status::InvalidHandle));
        assert_eq!(sim.cuda.wait_event(gpu.stream, event), Err(Status::InvalidHandle));
        let freed = sim.cuda.allocate(BLOCK).unwrap();
        sim.cuda.free(freed).unwrap();
        assert_eq!(sim.cuda.copy(freed, &slot.memory[..10], gpu.stream), Err(Status::InvalidValue));
        slot.unregister().unwrap();
        assert_eq!(slot.unregister(), Err(Status::HostMemoryNotRegistered));
        assert_eq!(sim.cuda.release_context(1), Err(Status::InvalidContext));
    });
}

#[test]
fn an_event_may_go_while_its_work_is_pending_if_somebody_waits_for_the_work() {
    let record_and_destroy = |sim: &Sim, stream: usize| {
        let event = sim.cuda.create_event().unwrap();
        sim.cuda.record_event(event, stream).unwrap();
        sim.cuda.destroy_event(event).unwrap();
    };
    assert_found(&[], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        gpu.queue_fill(block, BLOCK);
        record_and_destroy(sim, gpu.stream);
        gpu.synchronize();
    });
    // The stream goes too, and with it the last way to wait.
    assert_found(&[Kind::WorkLost, Kind::WorkLost], |sim| {
        let context = sim.cuda.retain_context(0).unwrap();
        sim.cuda.set_current(context).unwrap();
        let block = sim.cuda.allocate(BLOCK).unwrap();
        let stream = sim.cuda.create_stream().unwrap();
        sim.launch_write(stream, block, BLOCK, 1).unwrap();
        record_and_destroy(sim, stream);
        sim.cuda.destroy_stream(stream).unwrap();
        sim.cuda.release_context(0).unwrap();
    });
}

#[test]
fn a_planned_lack_of_memory_strikes_each_call_once() {
    let sim = Sim::start(0);
    let gpu = Gpu::new(&sim, 0);
    let mut slot = Slot::pageable(sim.cuda);
    for at in 1..=6 {
        sim.inject(Fault::OutOfMemory, at);
        let register = |slot: &mut Slot| {
            sim.cuda.register(&slot.memory, 0)?;
            slot.unregister()
        };
        let results = [
            sim.cuda.retain_context(1).and_then(|_| sim.cuda.release_context(1)),
            sim.cuda.create_stream().and_then(|stream| sim.cuda.destroy_stream(stream)),
            sim.cuda.create_event().and_then(|event| sim.cuda.destroy_event(event)),
            sim.cuda.allocate(BLOCK).and_then(|block| sim.cuda.free(block)),
            register(&mut slot),
        ];
        for (call, result) in (1..).zip(results) {
            assert_eq!(result, if call == at { Err(Status::OutOfMemory) } else { Ok(()) });
        }
    }
    assert_eq!(sim.counters().faults, 5);
    drop(gpu);
    sim.finish().assert_clean();
}

#[test]
fn a_copy_fails_at_once_or_later_and_then_its_context_is_lost() {
    assert_found(&[], |sim| {
        let (healthy, gpu) = (Gpu::new(sim, 1), Gpu::new(sim, 0));
        let slot = Slot::new(sim.cuda);
        let block = gpu.allocate(BLOCK);
        let copy = || sim.cuda.copy(block, &slot.memory[..10], gpu.stream);

        sim.inject(Fault::CopyEnqueue, 2);
        assert_eq!([copy(), copy(), copy()], [Ok(()), Err(Status::Unknown), Ok(())]);
        gpu.synchronize();

        sim.inject(Fault::CopyAsync, 1);
        assert_eq!(copy(), Ok(()));
        for _ in 0..2 {
            assert_eq!(sim.cuda.synchronize_stream(gpu.stream), Err(Status::IllegalAddress));
        }
        assert_eq!(copy(), Err(Status::IllegalAddress));
        assert_eq!(sim.cuda.create_event(), Err(Status::IllegalAddress));
        healthy.synchronize();
        assert_eq!(sim.counters().faults, 2);
        drop((slot, gpu));
        // A context that is retained anew works again.
        let gpu = Gpu::new(sim, 0);
        gpu.synchronize();
    });
}

#[test]
fn a_search_for_libcuda_finds_the_simulator() {
    let sim = Sim::start(0);
    // SAFETY: the library is open already, so nothing runs.
    let found = unsafe { libloading::Library::new("libcuda.so") }.unwrap();
    // SAFETY: that is the function's type.
    let counters = unsafe { found.get::<extern "C" fn() -> sim::abi::Counters>("sim_counters") }.unwrap();
    assert_eq!(counters(), sim.counters());
    sim.finish().assert_clean();
}

#[test]
fn times_and_places_can_be_asked_for() {
    assert_found(&[], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        let [start, end] = [(); 2].map(|()| sim.cuda.create_timing_event().unwrap());
        let untimed = sim.cuda.create_event().unwrap();
        assert_eq!(sim.cuda.elapsed_time(start, end), Err(Status::InvalidHandle), "never recorded");
        for event in [start, untimed] {
            sim.cuda.record_event(event, gpu.stream).unwrap();
        }
        gpu.queue_fill(block, BLOCK);
        sim.cuda.record_event(end, gpu.stream).unwrap();
        gpu.synchronize();
        assert!(sim.cuda.elapsed_time(start, end).unwrap() > 0.0);
        assert_eq!(sim.cuda.elapsed_time(end, start), Ok(0.0), "it does not run backwards here");
        assert_eq!(sim.cuda.elapsed_time(start, untimed), Err(Status::InvalidHandle));
        [start, end, untimed].into_iter().for_each(|event| sim.cuda.destroy_event(event).unwrap());

        assert_eq!([0, 1].map(|device| sim.cuda.bus_id(device).unwrap()), ["0000:51:00.0", "0000:52:00.0"]);
        assert_eq!(sim.cuda.bus_id(2), Err(Status::InvalidDevice));

        assert_eq!(sim.cuda.is_capturing(gpu.stream), Ok(0));
        sim.capture(gpu.stream, true).unwrap();
        assert_eq!((sim.cuda.is_capturing(gpu.stream), sim.cuda.is_capturing(0)), (Ok(1), Ok(0)));
    });
}

#[test]
fn a_time_is_there_when_the_work_is_done() {
    assert_found_when_late(&[], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        let event = sim.cuda.create_timing_event().unwrap();
        gpu.queue_fill(block, BLOCK);
        sim.cuda.record_event(event, gpu.stream).unwrap();
        assert_eq!(sim.cuda.elapsed_time(event, event), Err(Status::NotReady));
        gpu.synchronize();
        assert_eq!(sim.cuda.elapsed_time(event, event), Ok(0.0));
        sim.cuda.destroy_event(event).unwrap();
    });
}
