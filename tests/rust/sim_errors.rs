//! Errors that the simulated CUDA driver returns.

use crate::sim::abi::{Fault, Memcpy2D, Status};
use crate::sim::gpu::Gpu;
use crate::sim::random::Random;
use crate::sim::region::Region;
use crate::sim::{Sim, assert_reported};
use crate::sim_driver::{BLOCK, Program, Slot, strided};

#[test]
fn invalid_calls_are_rejected_like_cuda() {
    let sim = Sim::start(0);
    let p = Program::new(&sim);
    let good = strided(&p.slot.memory, 20, p.block, 10, 10, 3);
    for bad in [
        Memcpy2D { width_bytes: 11, ..good },
        Memcpy2D { dst_x_bytes: 1, ..good },
        Memcpy2D { src_pitch: 1 << 31, ..good },
        Memcpy2D { dst_pitch: 0, ..good },
    ] {
        assert_eq!(sim.cuda.copy_2d(&bad, p.gpu.stream), Err(Status::InvalidValue));
    }
    assert_eq!(sim.cuda.copy_2d(&Memcpy2D { height: 0, ..good }, p.gpu.stream), Ok(()));
    assert_eq!(sim.cuda.copy(p.block, &[], p.gpu.stream), Ok(()));
    assert_eq!(sim.cuda.device_count(), Ok(3));
    assert_eq!((sim.cuda.device(2), sim.cuda.device(3)), (Ok(2), Err(Status::InvalidDevice)));
    assert_eq!(sim.cuda.set_current(1234), Err(Status::InvalidContext));
    let (name, text) = sim.cuda.describe(Status::OutOfMemory as u32).unwrap();
    assert_eq!((&*name, &*text), ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"));
    assert_eq!(sim.cuda.describe(12345), Err(Status::InvalidValue));
    assert_eq!(sim.counters().copies, 0);
}

#[test]
fn injected_out_of_memory_fails_one_call() {
    let sim = Sim::start(0);
    let _gpu = Gpu::new(&sim, 0);
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
}

#[test]
fn copies_fail_when_queued_or_when_run_and_then_lose_the_context() {
    assert_reported(&[], |sim| {
        let (healthy, p) = (Gpu::new(sim, 1), Program::new(sim));
        let copy = || p.copy(p.gpu.stream);

        sim.inject(Fault::CopyEnqueue, 2);
        assert_eq!([copy(), copy(), copy()], [Ok(()), Err(Status::Unknown), Ok(())]);
        p.gpu.synchronize();

        sim.inject(Fault::CopyAsync, 1);
        assert_eq!(copy(), Ok(()));
        for _ in 0..2 {
            assert_eq!(sim.cuda.synchronize_stream(p.gpu.stream), Err(Status::IllegalAddress));
        }
        assert_eq!(copy(), Err(Status::IllegalAddress));
        assert_eq!(sim.cuda.create_event(), Err(Status::IllegalAddress));
        healthy.synchronize();
        assert_eq!(sim.counters().faults, 2);
        drop(p);
        // A newly retained context works again.
        Gpu::new(sim, 0).synchronize();
    });
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
