//! Loads from a server to the simulated GPU: the right bytes, or the right error and nothing left behind.

use crate::gpu_load::Load;
use crate::model::Model;
use crate::range_server::{RangeServer, ServerFault};
use crate::sim::gpu::Gpu;
use crate::sim::schedules;
use fst::dtype::Dtype;
use fst::error::Kind;
use fst::options::Options;
use fst::remote::limits::FIRST_BYTES;
use std::fs;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Slots of two requests, so that a slot that is lost makes the next load wait for ever.
fn options() -> Options {
    Options { request_bytes: 256 << 10, staging_bytes: 512 << 10, ..Options::default() }
}

fn shapes() -> Vec<Vec<u64>> {
    (0..40).map(|index| vec![3 + index, 40_000 / (1 + index % 7)]).collect()
}

/// Moves a model to a server.
fn serve(model: &mut Model, rule: impl Fn(&Range<usize>) -> Option<ServerFault> + Send + Sync + 'static) {
    let server = RangeServer::start(model.paths[0].parent().unwrap(), rule);
    for path in &mut model.paths {
        *path = server.url(path.file_name().unwrap().to_str().unwrap());
    }
}

#[test]
fn any_fault_at_any_request_gives_the_right_bytes_or_error() {
    let faults = [
        (ServerFault::Cut, None),
        (ServerFault::Stall, None),
        (ServerFault::Unavailable, None),
        (ServerFault::WholeFile, Some(Kind::Io)),
        (ServerFault::WrongRange, Some(Kind::Io)),
        (ServerFault::OtherVersion, Some(Kind::SourceChanged)),
    ];
    let shapes = shapes();
    let tensors: Vec<(Dtype, &[u64])> = shapes.iter().take(12).map(|shape| (Dtype::BF16, &shape[..])).collect();
    let mut model = Model::new(&tensors);
    let length = usize::try_from(fs::metadata(&model.paths[0]).unwrap().len()).unwrap();
    let file = model.paths[0].clone();
    for (fault, error) in faults {
        for (at, sim) in [usize::try_from(FIRST_BYTES).unwrap(), length / 2, length - 1].into_iter().zip(schedules()) {
            let is_due = Arc::new(AtomicBool::new(true));
            model.paths[0].clone_from(&file);
            let rule_is_due = Arc::clone(&is_due);
            serve(&mut model, move |range| {
                (range.contains(&at) && rule_is_due.swap(false, Ordering::Relaxed)).then_some(fault)
            });
            let gpu = Gpu::new(&sim, 0);
            let load = Load::all(&gpu, &model);
            let result = load.run(options());
            assert!(!is_due.load(Ordering::Relaxed));
            assert_eq!(result.as_ref().err().map(fst::Error::kind), error, "{fault:?} at {at}: {result:?}");
            if error.is_some() {
                let position = result.unwrap_err().position().unwrap();
                assert!(position <= u64::try_from(at).unwrap());
                load.run(options()).unwrap();
            }
            load.assert_holds(&model);
        }
    }
}
