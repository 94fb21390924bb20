//! Loads to the simulated GPU that fail.

use crate::gpu_load::{Load, mixed_model};
use crate::sim::abi::Fault;
use crate::sim::gpu::Gpu;
use crate::sim::{Sim, TIGHT, schedules};
use fst::device::cuda::kernels::IMAGE;
use fst::error::{Kind, Result};
use fst::profile;
use std::fs::File;

/// Runs loads with a fault at the first such call, at the second, and so on until no call is left to fail.
///
/// Returns the error of each load that fails. Loads that succeed must be exact, and all must be clean.
pub fn with_fault_at_every_call(
    start: impl Fn(u64) -> Sim,
    fault: Fault,
    run: impl Fn(&Load<'_>) -> Result<()>,
) -> Vec<Result<()>> {
    let model = mixed_model();
    let mut results = Vec::new();
    for at in 1.. {
        let sim = start(at);
        let gpu = Gpu::new(&sim, 0);
        let load = Load::all(&gpu, &model);
        sim.inject(fault, at);
        let result = run(&load);
        let is_over = sim.counters().faults == 0;
        if result.is_ok() {
            load.assert_holds(&model);
        }
        if is_over {
            result.unwrap();
            break;
        }
        results.push(result);
    }
    results
}

#[test]
fn out_of_memory_at_any_call_is_a_clean_error() {
    for start in [Sim::start, Sim::start_lazy] {
        let results = with_fault_at_every_call(start, Fault::OutOfMemory, |load| load.run(TIGHT));
        // At least a context, a stream, and events that order the copies with the caller.
        assert!(results.len() >= 4, "{results:?}");
        let failed: Vec<Kind> = results.iter().filter_map(|result| result.as_ref().err()).map(|e| e.kind()).collect();
        assert!(failed.iter().all(|kind| *kind == Kind::OutOfMemory), "{results:?}");
        // Staging memory that cannot be pinned is not an error.
        assert!(failed.len() < results.len(), "{results:?}");
    }
}

#[test]
fn a_copy_or_launch_that_fails_during_the_load_is_a_clean_error() {
    // A build without nvcc launches no kernel.
    let launches = usize::from(IMAGE.is_some());
    let faults = [
        (Fault::CopyEnqueue, 10),
        (Fault::CopyAsync, 10),
        (Fault::LaunchEnqueue, launches),
        (Fault::LaunchAsync, launches),
    ];
    for (fault, least) in faults {
        for start in [Sim::start, Sim::start_lazy] {
            let results = with_fault_at_every_call(start, fault, |load| load.run(TIGHT));
            assert!(results.len() >= least, "{results:?}");
            let is_device_error = |result: &Result<()>| result.as_ref().is_err_and(|e| e.kind() == Kind::Device);
            assert!(results.iter().all(is_device_error), "{fault:?}: {results:?}");
        }
    }
}

#[test]
fn a_truncated_file_is_a_clean_error() {
    let whole = mixed_model();
    let length = std::fs::metadata(&whole.paths[0]).unwrap().len();
    for sim in schedules() {
        let model = mixed_model();
        let gpu = Gpu::new(&sim, 0);
        let load = Load::all(&gpu, &model);
        File::options().write(true).open(&model.paths[0]).unwrap().set_len(length - 5000).unwrap();
        let error = load.run(TIGHT).unwrap_err();
        assert_eq!(error.kind(), Kind::Io, "{error}");
    }
}

#[test]
fn a_profile_of_a_failed_load_leaves_no_resource() {
    let run = |load: &Load<'_>| {
        let profile = profile::start();
        let result = load.run(TIGHT);
        profile::stop(profile).and(result)
    };
    for fault in [Fault::OutOfMemory, Fault::CopyEnqueue, Fault::CopyAsync] {
        let results = with_fault_at_every_call(Sim::start, fault, run);
        assert!(results.iter().any(Result::is_err), "{fault:?}");
    }
}
