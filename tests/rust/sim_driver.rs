//! Tests of the simulated CUDA driver: it accepts correct programs, and reports
//! each kind of violation, independent of the delays.

use crate::sim::abi::{
    CaptureMode, Fault, Kind, MEMORY_TYPE_DEVICE, MEMORY_TYPE_HOST, Memcpy2D, POISON, REGISTER_PORTABLE, Status,
};
use crate::sim::gpu::Gpu;
use crate::sim::random::Random;
use crate::sim::region::Region;
use crate::sim::{Cuda, FATBIN, Sim, assert_reported};
use memmap2::MmapMut;
use std::os::unix::fs::FileExt;

/// Size of the device blocks, in bytes.
const BLOCK: usize = 1000;

/// Staging slot in pinned host memory.
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

    /// Copies device memory to the start of the slot.
    fn copy_from_device(&mut self, source: u64, bytes: usize, stream: usize) -> Result<(), Status> {
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
            // A lost context returns an error, but the memory is unregistered.
            let _ = self.unregister();
        }
    }
}

/// Describes a strided copy from the start of `source`.
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

/// Makes `later` wait for all work on `earlier`.
fn order(cuda: &Cuda, earlier: usize, later: usize) {
    let event = cuda.create_event().unwrap();
    cuda.record_event(event, earlier).unwrap();
    cuda.wait_event(later, event).unwrap();
    cuda.destroy_event(event).unwrap();
}

/// Program on one GPU with a pinned slot and a block of device memory. Its end waits for the work of the stream of `gpu`.
struct Program<'a> {
    sim: &'a Sim,
    cuda: Cuda,
    slot: Slot,
    block: u64,
    gpu: Gpu<'a>,
}

impl<'a> Program<'a> {
    fn new(sim: &'a Sim) -> Program<'a> {
        let gpu = Gpu::new(sim, 0);
        Program { sim, cuda: sim.cuda, slot: Slot::new(sim.cuda), block: gpu.allocate(BLOCK), gpu }
    }

    /// Copies ten bytes of the slot to the block.
    fn copy(&self, stream: usize) -> Result<(), Status> {
        self.cuda.copy(self.block, &self.slot.memory[..10], stream)
    }

    /// Copies rows of ten bytes to the block from a byte on, `pitch` bytes apart.
    fn copy_rows(&self, begin: u64, pitch: usize, rows: usize) -> Result<(), Status> {
        self.cuda.copy_2d(&strided(&self.slot.memory, 20, self.block + begin, pitch, 10, rows), self.gpu.stream)
    }

    /// Copies the block to the slot.
    fn copy_back(&mut self, stream: usize) -> Result<(), Status> {
        self.slot.copy_from_device(self.block, BLOCK, stream)
    }

    /// Queues a kernel that writes to the block.
    fn write(&self, stream: usize, value: u8) -> Result<(), Status> {
        self.sim.launch_write(stream, self.block, BLOCK, value)
    }

    fn end(&self, stream: usize) {
        self.cuda.synchronize_stream(stream).unwrap();
        self.cuda.destroy_stream(stream).unwrap();
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // A lost context returns an error.
        let _ = self.cuda.set_current(self.gpu.context);
        let _ = self.cuda.synchronize_stream(self.gpu.stream);
    }
}

/// Program with a name, and the violations that the simulator reports.
type Case = (&'static str, &'static [Kind], fn(&mut Program<'_>));

const CASES: &[Case] = &[
    ("copy from pageable memory", &[Kind::Unpinned], |p| {
        p.cuda.copy(p.block, &[1; 10], p.gpu.stream).unwrap();
        p.gpu.synchronize();
    }),
    ("copies from memory that is pinned in part, or for another context", &[Kind::Unpinned; 2], |p| {
        let slot = Slot::pageable(p.cuda);
        let other = Gpu::new(p.sim, 1);
        let block = other.allocate(BLOCK);
        p.cuda.register(&slot.memory[..BLOCK], REGISTER_PORTABLE).unwrap();
        p.cuda.set_current(p.gpu.context).unwrap();
        p.cuda.register(&slot.memory[BLOCK..2 * BLOCK], 0).unwrap();
        assert_eq!(p.cuda.register(&slot.memory[10..20], 0), Err(Status::HostMemoryAlreadyRegistered));

        p.cuda.set_current(other.context).unwrap();
        // The first source is valid. The second spans two registrations. The third is pinned for the other context only.
        for begin in [0, BLOCK / 2, BLOCK] {
            p.cuda.copy(block, &slot.memory[begin..][..BLOCK], other.stream).unwrap();
        }
        other.synchronize();
        let start = slot.memory.as_ptr().addr();
        p.cuda.unregister(start).unwrap();
        p.cuda.unregister(start + BLOCK).unwrap();
    }),
    ("source unregistered before the wait", &[Kind::HostReleased], |p| {
        p.copy(p.gpu.stream).unwrap();
        p.slot.unregister().unwrap();
    }),
    ("target unregistered before the wait", &[Kind::HostReleased], |p| {
        p.copy_back(p.gpu.stream).unwrap();
        p.slot.unregister().unwrap();
    }),
    ("memory unmapped before it is unregistered", &[Kind::HostReleased], |p| {
        let slot = MmapMut::map_anon(BLOCK).unwrap();
        p.cuda.register(&slot, 0).unwrap();
        let start = slot.as_ptr().addr();
        drop(slot);
        p.cuda.unregister(start).unwrap();
    }),
    ("copy beyond the block", &[Kind::OutOfBounds], |p| {
        assert_eq!(p.cuda.copy(p.block + 1, &p.slot.memory[..BLOCK], p.gpu.stream), Err(Status::InvalidValue));
    }),
    ("rows that end beyond the block", &[Kind::OutOfBounds; 2], |p| {
        assert_eq!(p.copy_rows(1, 110, 10), Err(Status::InvalidValue));
        assert_eq!(p.copy_rows(0, 110, 11), Err(Status::InvalidValue));
    }),
    ("copy that does not wait for a write", &[Kind::MissingWait], |p| {
        p.write(p.gpu.stream, 1).unwrap();
        let side = p.cuda.create_stream().unwrap();
        p.copy(side).unwrap();
        p.end(side);
    }),
    ("kernel that waits for an earlier point of a stream", &[Kind::MissingWait], |p| {
        let side = p.cuda.create_stream().unwrap();
        p.sim.launch_write(side, p.block, 1, 1).unwrap();
        order(&p.cuda, side, p.gpu.stream);
        p.sim.launch_write(side, p.block + 1, 1, 1).unwrap();
        p.sim.launch_read(p.gpu.stream, p.block, 1).unwrap();
        p.sim.launch_read(p.gpu.stream, p.block, 2).unwrap();
        p.end(side);
    }),
    ("host that reads before it waits", &[Kind::MissingWait], |p| {
        p.write(p.gpu.stream, 1).unwrap();
        p.sim.read(p.block, 1).unwrap();
        p.gpu.synchronize();
        p.sim.read(p.block, 1).unwrap();
    }),
    ("default stream of the current context, by both handles", &[Kind::MissingWait], |p| {
        for (stream, value) in [(0, 1), (1, 2), (p.gpu.stream, 3)] {
            p.write(stream, value).unwrap();
        }
        p.gpu.synchronize();
        p.cuda.synchronize_stream(0).unwrap();
    }),
    ("objects that are left", &[Kind::Leak; 4], |p| {
        let context = p.cuda.retain_context(1).unwrap();
        p.cuda.set_current(context).unwrap();
        p.cuda.create_stream().unwrap();
        p.cuda.create_event().unwrap();
        let counters = p.sim.counters();
        assert_eq!((counters.live_contexts, counters.live_streams, counters.live_events), (2, 2, 1));
        // The slot stays mapped and registered.
        std::mem::forget(Slot::new(p.cuda));
    }),
    ("stream of a context that is not current", &[Kind::WrongContext], |p| {
        let _other = Gpu::new(p.sim, 1);
        assert_eq!(p.copy(p.gpu.stream), Err(Status::InvalidContext));
    }),
    ("thread without a context", &[Kind::WrongContext; 2], |p| {
        let event = p.cuda.create_event().unwrap();
        let (sim, stream, block) = (p.sim, p.gpu.stream, p.block);
        let work = || [sim.cuda.record_event(event, stream), sim.launch_write(stream, block, BLOCK, 1)];
        let results = std::thread::scope(|scope| scope.spawn(work).join().unwrap());
        assert_eq!(results, [Err(Status::InvalidContext); 2]);
        p.cuda.destroy_event(event).unwrap();
    }),
    ("released context", &[Kind::UseAfterFree], |p| {
        let context = p.cuda.retain_context(1).unwrap();
        p.cuda.release_context(1).unwrap();
        assert_eq!(p.cuda.set_current(context), Err(Status::InvalidContext));
    }),
    ("memory of another device", &[Kind::WrongDevice], |p| {
        let other = Gpu::new(p.sim, 1);
        p.copy(other.stream).unwrap();
    }),
    // The owner frees the block while the lost work is pending.
    ("stream destroyed without a wait", &[Kind::FreedInUse, Kind::WorkLost], |p| {
        let side = p.cuda.create_stream().unwrap();
        p.write(side, 1).unwrap();
        p.cuda.destroy_stream(side).unwrap();
    }),
    ("event and stream destroyed without a wait", &[Kind::WorkLost; 2], |p| {
        let (side, block) = (p.cuda.create_stream().unwrap(), p.cuda.allocate(BLOCK).unwrap());
        p.sim.launch_write(side, block, BLOCK, 1).unwrap();
        order(&p.cuda, side, side);
        p.cuda.destroy_stream(side).unwrap();
    }),
    ("memory freed twice", &[Kind::UseAfterFree, Kind::DoubleFree], |p| {
        let other = p.cuda.allocate(BLOCK).unwrap();
        p.cuda.free(other).unwrap();
        assert_eq!(p.cuda.copy(other, &p.slot.memory[..10], p.gpu.stream), Err(Status::InvalidValue));
        assert_eq!(p.cuda.free(other), Err(Status::InvalidValue));
    }),
    ("slot and context released twice", &[Kind::DoubleFree; 2], |p| {
        p.slot.unregister().unwrap();
        assert_eq!(p.slot.unregister(), Err(Status::HostMemoryNotRegistered));
        assert_eq!(p.cuda.release_context(1), Err(Status::InvalidContext));
    }),
    ("destroyed stream and event", &[Kind::UseAfterFree; 3], |p| {
        let (stream, event) = (p.cuda.create_stream().unwrap(), p.cuda.create_event().unwrap());
        p.cuda.destroy_stream(stream).unwrap();
        p.cuda.destroy_event(event).unwrap();
        assert_eq!(p.copy(stream), Err(Status::InvalidHandle));
        assert_eq!(p.cuda.destroy_event(event), Err(Status::InvalidHandle));
        assert_eq!(p.cuda.wait_event(p.gpu.stream, event), Err(Status::InvalidHandle));
    }),
    ("creation of an event during a capture", &[Kind::CaptureInvalidated], |p| {
        p.cuda.begin_capture(p.gpu.stream, CaptureMode::Global).unwrap();
        assert_eq!(p.cuda.create_event(), Err(Status::StreamCaptureUnsupported));
        assert_eq!(p.cuda.end_capture(p.gpu.stream), Err(Status::StreamCaptureInvalidated));
    }),
    ("launch without blocks", &[Kind::BadLaunch], |p| {
        let module = p.cuda.load_module(&FATBIN).unwrap();
        let kernel = p.cuda.function(module, c"fst_scatter").unwrap();
        let result = p.cuda.launch(kernel, [0, 256], p.gpu.stream, &[&p.block.to_le_bytes(), &[0; 4], &[0; 4]]);
        assert_eq!(result, Err(Status::InvalidValue));
    }),
];

/// Programs whose violations only late work reveals.
const LATE_CASES: &[Case] = &[
    ("source changed before the wait", &[Kind::SourceChanged], |p| {
        p.copy(p.gpu.stream).unwrap();
        p.slot.memory[3] = 99;
    }),
    ("target changed before the wait", &[Kind::TargetChanged], |p| {
        p.copy_back(p.gpu.stream).unwrap();
        p.slot.memory[3] = 99;
    }),
    ("pageable source unmapped before the wait", &[Kind::HostReleased], |p| {
        p.sim.inject(Fault::RefusePinning, 0);
        let slot = Slot::pageable(p.cuda);
        assert_eq!(p.cuda.register(&slot.memory, 0), Err(Status::NotSupported));
        p.cuda.copy(p.block, &slot.memory[..BLOCK], p.gpu.stream).unwrap();
    }),
];

#[test]
fn violations_of_each_kind_are_reported() {
    for (name, kinds, run) in CASES {
        println!("{name}");
        assert_reported(kinds, |sim| run(&mut Program::new(sim)));
    }
    for (name, kinds, run) in LATE_CASES {
        let sim = Sim::start_lazy(0);
        run(&mut Program::new(&sim));
        assert_eq!(sim.finish().kinds(), *kinds, "{name}");
    }
    let reported: Vec<Kind> = [CASES, LATE_CASES].concat().iter().flat_map(|(_, kinds, _)| *kinds).copied().collect();
    assert_eq!(Kind::ALL.iter().find(|kind| !reported.contains(kind)), None);
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
fn overlaps_of_regions_are_those_of_their_bytes() {
    let bytes = |r: &Region| -> Vec<u64> { r.rows().flatten().map(|offset| r.start() + offset as u64).collect() };
    let mut random = Random::new(7);
    let mut region = || {
        let width = 1 + random.below(5);
        let pitch = width + random.below(6);
        Region::new(100 + random.below(24), width, pitch, 1 + random.below(5)).unwrap()
    };
    let mut seen = [false; 2];
    for _ in 0..5000 {
        let (a, b) = (region(), region());
        let of_b = bytes(&b);
        let expected = bytes(&a).iter().any(|byte| of_b.contains(byte));
        assert_eq!(a.overlaps(&b), expected, "{a} and {b}");
        seen[usize::from(expected)] = true;
    }
    assert_eq!(seen, [true, true]);
    for (start, width, pitch, rows) in [(8, 0, 0, 1), (0, 8, 4, 2), (u64::MAX, 2, 2, 1), (0, 1, u64::MAX, 3)] {
        assert_eq!(Region::new(start, width, pitch, rows), None);
    }
}
