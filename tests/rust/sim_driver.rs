//! Tests of the simulated CUDA driver: it accepts correct programs, and reports
//! each kind of violation, independent of the delays.

use crate::sim::abi::{
    CaptureMode, Counters, Fault, Kind, MEMORY_TYPE_DEVICE, MEMORY_TYPE_HOST, Memcpy2D, POISON, REGISTER_PORTABLE,
    Status,
};
use crate::sim::gpu::Gpu;
use crate::sim::{Cuda, FATBIN, Sim, assert_reported};
use memmap2::MmapMut;
use std::os::unix::fs::FileExt;

/// Size of the device blocks, in bytes.
pub const BLOCK: usize = 1000;

/// Staging slot in pinned host memory.
pub struct Slot {
    cuda: Cuda,
    pub memory: MmapMut,
    is_registered: bool,
}

impl Slot {
    pub fn new(cuda: Cuda) -> Slot {
        let mut slot = Slot::pageable(cuda);
        cuda.register(&slot.memory, REGISTER_PORTABLE).unwrap();
        slot.is_registered = true;
        slot
    }

    pub fn pageable(cuda: Cuda) -> Slot {
        let mut memory = MmapMut::map_anon(4 * BLOCK).unwrap();
        memory.iter_mut().zip((0..=250).cycle()).for_each(|(byte, value)| *byte = value);
        Slot { cuda, memory, is_registered: false }
    }

    /// Copies device memory to the start of the slot.
    fn copy_from_device(&mut self, source: u64, bytes: usize, stream: usize) -> Result<(), Status> {
        self.cuda.copy_to_host(self.memory.as_mut_ptr().expose_provenance(), source, bytes, stream)
    }

    pub fn unregister(&mut self) -> Result<(), Status> {
        self.is_registered = false;
        self.cuda.unregister(self.memory.as_ptr().addr())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.is_registered {
            // A lost context returns an error, but the memory is unregistered.
            let _ = self.unregister();
        }
    }
}

/// Describes a strided copy from the start of `source`.
pub fn strided(
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

/// Makes `later` wait for all work on `earlier`.
fn order(cuda: &Cuda, earlier: usize, later: usize) {
    let event = cuda.create_event().unwrap();
    cuda.record_event(event, earlier).unwrap();
    cuda.wait_event(later, event).unwrap();
    cuda.destroy_event(event).unwrap();
}

/// Like [`assert_reported`], for a violation that only late work reveals.
fn assert_reported_when_late(kinds: &[Kind], test: impl Fn(&Sim)) {
    let sim = Sim::start_lazy(0);
    test(&sim);
    let report = sim.finish();
    assert_eq!(report.kinds(), kinds, "{:#?}", report.violations);
}

/// Uploads one tensor like fst.
#[test]
fn correct_upload_is_clean_and_exact() {
    assert_reported(&[], |sim| {
        let cuda = &sim.cuda;
        let gpu = Gpu::new(sim, 0);
        let slot = Slot::new(sim.cuda);
        let block = gpu.allocate(BLOCK);
        gpu.queue_fill(block, BLOCK);

        let copies = cuda.create_stream().unwrap();
        order(cuda, gpu.stream, copies);
        cuda.copy(block, &slot.memory[..100], copies).unwrap();
        // Copies rows of 10 bytes, 30 bytes apart in the slot, to columns 5 to 14 of rows of 20 bytes.
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

/// Runs a program with exactly one violation of this kind.
fn violate(kind: Kind, sim: &Sim) {
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
            slot.copy_from_device(block, BLOCK, gpu.stream).unwrap();
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
        Kind::CaptureInvalidated => {
            cuda.begin_capture(gpu.stream, CaptureMode::Global).unwrap();
            assert_eq!(cuda.create_event(), Err(Status::StreamCaptureUnsupported));
            assert_eq!(cuda.end_capture(gpu.stream), Err(Status::StreamCaptureInvalidated));
        }
        Kind::BadLaunch => {
            let module = cuda.load_module(&FATBIN).unwrap();
            let kernel = cuda.function(module, c"fst_scatter").unwrap();
            let result = cuda.launch(kernel, [0, 256], gpu.stream, &[&block.to_le_bytes(), &[0; 4], &[0; 4]]);
            assert_eq!(result, Err(Status::InvalidValue));
        }
    }
    gpu.synchronize();
    cuda.set_current(gpu.context).unwrap();
}

#[test]
fn each_kind_of_violation_is_reported() {
    for &kind in Kind::ALL {
        match kind {
            Kind::SourceChanged | Kind::TargetChanged => assert_reported_when_late(&[kind], |sim| violate(kind, sim)),
            // The owner frees the block while the lost work is pending.
            Kind::WorkLost => assert_reported(&[Kind::FreedInUse, kind], |sim| violate(kind, sim)),
            _ => assert_reported(&[kind], |sim| violate(kind, sim)),
        }
    }
}

#[test]
fn work_runs_asynchronously_in_the_order_of_events() {
    assert_reported_when_late(&[], |sim| {
        let gpu = Gpu::new(sim, 0);
        let (first, second) = (gpu.stream, sim.cuda.create_stream().unwrap());
        let block = gpu.allocate(BLOCK);
        sim.launch_write(first, block, BLOCK, 1).unwrap();
        order(&sim.cuda, first, second);
        sim.launch_write(second, block, BLOCK, 2).unwrap();
        let done = sim.cuda.create_event().unwrap();
        assert_eq!(sim.cuda.query_event(done), Ok(()), "an event without a record is done");
        sim.cuda.record_event(done, second).unwrap();
        assert_eq!(sim.cuda.query_event(done), Err(Status::NotReady));
        // Each query lets one item of work run, so repeated queries make progress.
        while sim.cuda.query_event(done).is_err() {}
        assert_eq!(sim.read(block, BLOCK).unwrap(), [2; BLOCK]);
        sim.cuda.destroy_event(done).unwrap();
        sim.cuda.destroy_stream(second).unwrap();
    });
}

#[test]
fn copy_to_the_host_completes_at_the_wait() {
    let sim = Sim::start_lazy(0);
    let gpu = Gpu::new(&sim, 0);
    let block = gpu.allocate(BLOCK);
    gpu.queue_fill(block, BLOCK);
    let mut slot = Slot::new(sim.cuda);
    slot.copy_from_device(block, BLOCK, gpu.stream).unwrap();
    assert!(slot.memory[..BLOCK].iter().all(|&byte| byte == POISON));
    gpu.synchronize();
    assert!(slot.memory[..BLOCK].iter().all(|&byte| byte == 0x11));
    assert_eq!(usize::from(slot.memory[BLOCK]), BLOCK % 251);
}

#[test]
fn invalid_copies_to_the_host_are_reported() {
    assert_reported(&[Kind::MissingWait], |sim| {
        let gpu = Gpu::new(sim, 0);
        let side = sim.cuda.create_stream().unwrap();
        let block = gpu.allocate(BLOCK);
        gpu.queue_fill(block, BLOCK);
        let mut slot = Slot::new(sim.cuda);
        slot.copy_from_device(block, BLOCK, side).unwrap();
        sim.cuda.synchronize_stream(side).unwrap();
        gpu.synchronize();
        sim.cuda.destroy_stream(side).unwrap();
    });
    assert_reported(&[Kind::HostReleased], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        let mut slot = Slot::new(sim.cuda);
        slot.copy_from_device(block, BLOCK, gpu.stream).unwrap();
        slot.unregister().unwrap();
    });
    assert_reported(&[Kind::Unpinned], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        let mut slot = Slot::pageable(sim.cuda);
        slot.copy_from_device(block, BLOCK, gpu.stream).unwrap();
        gpu.synchronize();
    });
}

#[test]
fn default_stream_belongs_to_the_current_context() {
    assert_reported(&[Kind::MissingWait], |sim| {
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
fn new_device_memory_is_poisoned_and_inaccessible_to_the_host() {
    let sim = Sim::start(0);
    let gpu = Gpu::new(&sim, 1);
    let (first, second) = (gpu.allocate(BLOCK), gpu.allocate(BLOCK));
    assert_eq!(sim.read(first, BLOCK).unwrap(), [POISON; BLOCK]);
    sim.write(first, b"abc").unwrap();
    assert_eq!(sim.read(first, 4).unwrap(), [b'a', b'b', b'c', POISON]);
    // A read through the operating system fails like a read by the process.
    let own_memory = std::fs::File::open("/proc/self/mem").unwrap();
    for address in [first, second, second + BLOCK as u64] {
        assert!(own_memory.read_at(&mut [0], address).is_err());
    }
}

#[test]
fn sources_released_before_the_wait_are_reported() {
    // The memory is unmapped before it is unregistered.
    assert_reported(&[Kind::HostReleased], |sim| {
        let _gpu = Gpu::new(sim, 0);
        let slot = MmapMut::map_anon(BLOCK).unwrap();
        sim.cuda.register(&slot, 0).unwrap();
        let start = slot.as_ptr().addr();
        drop(slot);
        sim.cuda.unregister(start).unwrap();
    });
    // Pageable memory is unmapped while the copy is pending.
    assert_reported_when_late(&[Kind::HostReleased], |sim| {
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
fn copies_from_partly_pinned_memory_or_another_context_are_reported() {
    assert_reported(&[Kind::Unpinned, Kind::Unpinned], |sim| {
        let slot = Slot::pageable(sim.cuda);
        let (gpu, other) = (Gpu::new(sim, 0), Gpu::new(sim, 1));
        let block = other.allocate(BLOCK);
        sim.cuda.register(&slot.memory[..BLOCK], REGISTER_PORTABLE).unwrap();
        sim.cuda.set_current(gpu.context).unwrap();
        sim.cuda.register(&slot.memory[BLOCK..2 * BLOCK], 0).unwrap();
        assert_eq!(sim.cuda.register(&slot.memory[10..20], 0), Err(Status::HostMemoryAlreadyRegistered));

        sim.cuda.set_current(other.context).unwrap();
        sim.cuda.copy(block, &slot.memory[..BLOCK], other.stream).unwrap();
        // The source spans two registrations.
        sim.cuda.copy(block, &slot.memory[BLOCK / 2..][..BLOCK], other.stream).unwrap();
        // The source is pinned for the other context only.
        sim.cuda.copy(block, &slot.memory[BLOCK..][..BLOCK], other.stream).unwrap();
        other.synchronize();
        let start = slot.memory.as_ptr().addr();
        sim.cuda.unregister(start).unwrap();
        sim.cuda.unregister(start + BLOCK).unwrap();
    });
}

#[test]
fn strided_copies_outside_of_the_allocation_are_reported() {
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
    assert_reported(&[], copy(10, 110, 0));
    assert_reported(&[Kind::OutOfBounds], copy(10, 110, 1));
    assert_reported(&[Kind::OutOfBounds], copy(11, 110, 0));
    assert_reported(&[], copy(100, 10, 0));
}

#[test]
fn unordered_accesses_of_two_streams_are_reported() {
    // The caller's kernel does not wait for the write.
    assert_reported(&[Kind::MissingWait], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        let copies = sim.cuda.create_stream().unwrap();
        sim.launch_write(copies, block, BLOCK, 1).unwrap();
        sim.launch_read(gpu.stream, block, BLOCK).unwrap();
        sim.cuda.synchronize_stream(copies).unwrap();
        sim.cuda.destroy_stream(copies).unwrap();
    });
    // The caller's kernel waits for an earlier point of the stream.
    assert_reported(&[Kind::MissingWait], |sim| {
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
    // The host reads before it waits for the write.
    assert_reported(&[Kind::MissingWait], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        gpu.queue_fill(block, BLOCK);
        sim.read(block, 1).unwrap();
        gpu.synchronize();
        sim.read(block, 1).unwrap();
    });
    // Concurrent reads are allowed, and concurrent writes to interleaved columns.
    assert_reported(&[], |sim| {
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
fn waits_are_transitive_across_streams_and_the_host() {
    assert_reported(&[], |sim| {
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
fn live_objects_are_reported_as_leaks() {
    let kinds = [Kind::Leak; 4];
    assert_reported(&kinds, |sim| {
        let context = sim.cuda.retain_context(1).unwrap();
        sim.cuda.set_current(context).unwrap();
        sim.cuda.create_stream().unwrap();
        sim.cuda.create_event().unwrap();
        let slot = Slot::new(sim.cuda);
        let counters = sim.counters();
        assert_eq!((counters.live_contexts, counters.live_streams, counters.live_events), (1, 1, 1));
        // The slot stays mapped and registered.
        std::mem::forget(slot);
    });
}

#[test]
fn work_without_a_live_current_context_is_reported() {
    assert_reported(&[Kind::WrongContext, Kind::WrongContext], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        let (stream, event) = (gpu.stream, sim.cuda.create_event().unwrap());
        let result = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                assert_eq!(sim.cuda.record_event(event, stream), Err(Status::InvalidContext));
                sim.launch_write(stream, block, BLOCK, 1)
            });
            thread.join().unwrap()
        });
        assert_eq!(result, Err(Status::InvalidContext));
        sim.cuda.destroy_event(event).unwrap();
    });
    assert_reported(&[Kind::UseAfterFree], |sim| {
        let context = sim.cuda.retain_context(0).unwrap();
        sim.cuda.release_context(0).unwrap();
        assert_eq!(sim.cuda.set_current(context), Err(Status::InvalidContext));
    });
}

#[test]
fn uses_of_destroyed_handles_are_reported() {
    let kinds = [Kind::UseAfterFree, Kind::UseAfterFree, Kind::UseAfterFree, Kind::DoubleFree, Kind::DoubleFree];
    assert_reported(&kinds, |sim| {
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
fn events_can_be_destroyed_before_the_program_waits_for_their_work() {
    let record_and_destroy = |sim: &Sim, stream: usize| {
        let event = sim.cuda.create_event().unwrap();
        sim.cuda.record_event(event, stream).unwrap();
        sim.cuda.destroy_event(event).unwrap();
    };
    assert_reported(&[], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        gpu.queue_fill(block, BLOCK);
        record_and_destroy(sim, gpu.stream);
        gpu.synchronize();
    });
    // The program also destroys the stream, so it cannot wait for the work.
    assert_reported(&[Kind::WorkLost, Kind::WorkLost], |sim| {
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
fn dlopen_of_libcuda_finds_the_simulator() {
    let sim = Sim::start(0);
    // SAFETY: the library is already loaded, so no initializer runs.
    let found = unsafe { libloading::Library::new("libcuda.so") }.unwrap();
    // SAFETY: the type matches the function.
    let counters = unsafe { found.get::<extern "C" fn() -> Counters>("sim_counters") }.unwrap();
    assert_eq!(counters(), sim.counters());
}

#[test]
fn times_bus_ids_and_capture_states_are_returned() {
    assert_reported(&[], |sim| {
        let gpu = Gpu::new(sim, 0);
        let block = gpu.allocate(BLOCK);
        let [start, end] = [(); 2].map(|()| sim.cuda.create_timing_event().unwrap());
        let untimed = sim.cuda.create_event().unwrap();
        assert_eq!(sim.cuda.elapsed_time(start, end), Err(Status::InvalidHandle), "the event has no record");
        for event in [start, untimed] {
            sim.cuda.record_event(event, gpu.stream).unwrap();
        }
        gpu.queue_fill(block, BLOCK);
        sim.cuda.record_event(end, gpu.stream).unwrap();
        gpu.synchronize();
        assert!(sim.cuda.elapsed_time(start, end).unwrap() > 0.0);
        assert_eq!(sim.cuda.elapsed_time(end, start), Ok(0.0), "a negative time is 0");
        assert_eq!(sim.cuda.elapsed_time(start, untimed), Err(Status::InvalidHandle));
        [start, end, untimed].into_iter().for_each(|event| sim.cuda.destroy_event(event).unwrap());

        assert_eq!([0, 1].map(|device| sim.cuda.bus_id(device).unwrap()), ["0000:51:00.0", "0000:52:00.0"]);
        assert_eq!(sim.cuda.bus_id(3), Err(Status::InvalidDevice));

        assert_eq!(sim.cuda.is_capturing(gpu.stream), Ok(0));
        sim.cuda.begin_capture(gpu.stream, CaptureMode::Global).unwrap();
        assert_eq!((sim.cuda.is_capturing(gpu.stream), sim.cuda.is_capturing(0)), (Ok(1), Ok(0)));
        sim.cuda.end_capture(gpu.stream).unwrap();
        assert_eq!(sim.cuda.is_capturing(gpu.stream), Ok(0));
    });
}

/// Queries an event during a capture, on the thread that captures or on another one, in a mode of that thread.
fn query_during_capture(sim: &Sim, capture: CaptureMode, is_own_thread: bool, mode: CaptureMode) -> bool {
    let gpu = Gpu::new(sim, 0);
    let event = sim.cuda.create_event().unwrap();
    sim.cuda.begin_capture(gpu.stream, capture).unwrap();
    let query = || {
        let before = sim.cuda.exchange_capture_mode(mode);
        let result = sim.cuda.query_event(event);
        assert_eq!(sim.cuda.exchange_capture_mode(before), mode);
        result
    };
    let result = if is_own_thread { query() } else { std::thread::scope(|scope| scope.spawn(query).join()).unwrap() };
    let (is_active, ended) = (sim.cuda.is_capturing(gpu.stream), sim.cuda.end_capture(gpu.stream));
    sim.cuda.destroy_event(event).unwrap();
    match result {
        Ok(()) => assert_eq!((is_active, ended), (Ok(1), Ok(()))),
        Err(error) => assert_eq!(
            (error, is_active, ended),
            (Status::StreamCaptureUnsupported, Ok(2), Err(Status::StreamCaptureInvalidated))
        ),
    }
    result.is_ok()
}

/// The rule of `cuThreadExchangeStreamCaptureMode`.
#[test]
fn the_modes_of_a_capture_and_of_a_thread_decide_whether_a_query_is_legal() {
    use CaptureMode::{Global, Relaxed, ThreadLocal};
    for (capture, legal_on_own_thread, legal_on_others) in [
        (Global, &[Relaxed][..], &[ThreadLocal, Relaxed][..]),
        (ThreadLocal, &[Relaxed], &[Global, ThreadLocal, Relaxed]),
        (Relaxed, &[Global, ThreadLocal, Relaxed], &[Global, ThreadLocal, Relaxed]),
    ] {
        for mode in [Global, ThreadLocal, Relaxed] {
            for (is_own_thread, legal) in [(true, legal_on_own_thread), (false, legal_on_others)] {
                let is_legal = legal.contains(&mode);
                let expected = if is_legal { &[][..] } else { &[Kind::CaptureInvalidated] };
                let sim = Sim::start(0);
                assert_eq!(query_during_capture(&sim, capture, is_own_thread, mode), is_legal);
                assert_eq!(sim.finish().kinds(), expected, "{capture:?} {mode:?} {is_own_thread}");
            }
        }
    }
}

#[test]
fn times_are_available_after_the_work() {
    assert_reported_when_late(&[], |sim| {
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
