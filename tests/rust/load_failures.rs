//! Loads to the simulated GPU that fail.

use crate::gpu_load::{Load, mixed_model};
use crate::model::Model;
use crate::sim::abi::Fault;
use crate::sim::gpu::Gpu;
use crate::sim::{Sim, TIGHT, with_fault_at_every_call};
use fst::device::cuda::kernels::IMAGE;
use fst::error::Result;
use fst::options::Options;
use fst::profile;

/// Faults of a load without kernels, and how many calls may fail at least: those for a context, a stream, and events that
/// order the copies with the caller.
pub const LOAD_FAULTS: [(Fault, u64); 3] = [(Fault::OutOfMemory, 4), (Fault::CopyEnqueue, 10), (Fault::CopyAsync, 10)];

/// Loads a model. A load that succeeds must be exact.
pub fn attempt(sim: &Sim, begin: &dyn Fn(), model: &Model, options: Options) -> Result<()> {
    let gpu = Gpu::new(sim, 0);
    let load = Load::all(&gpu, model);
    begin();
    load.run(options)?;
    load.assert_holds(model);
    Ok(())
}

#[test]
fn a_fault_at_any_call_is_a_clean_error() {
    let model = mixed_model();
    // A build without nvcc launches no kernel.
    let launches = u64::from(IMAGE.is_some());
    let kernel_faults = [(Fault::LaunchEnqueue, launches), (Fault::LaunchAsync, launches)];
    for (fault, least) in LOAD_FAULTS.into_iter().chain(kernel_faults) {
        let results = with_fault_at_every_call(fault, least, |sim, begin| attempt(sim, begin, &model, TIGHT));
        // Staging memory that cannot be pinned is not an error.
        assert_eq!(results.iter().any(Result::is_ok), fault == Fault::OutOfMemory, "{results:?}");
    }
}

#[test]
fn a_profile_of_a_failed_load_leaves_no_resource() {
    let model = mixed_model();
    for fault in [Fault::OutOfMemory, Fault::CopyEnqueue, Fault::CopyAsync] {
        with_fault_at_every_call(fault, 4, |sim, begin| {
            let profile = profile::start();
            let result = attempt(sim, begin, &model, TIGHT);
            profile::stop(profile).and(result)
        });
    }
}
