//! Loads through GPUDirect Storage, on the simulated CUDA driver and libcufile. Neither may report a violation.
//!
//! GPUDirect Storage needs the kernels. A build without them uses the staged engine, which must be correct, too.

use crate::gpu_load::{Load, mixed_model};
use crate::load_failures::attempt;
use crate::model::Model;
use crate::sim::abi::Fault;
use crate::sim::cufile::{self, Cufile};
use crate::sim::gpu::Gpu;
use crate::sim::{Sim, TIGHT, schedules, with_fault_at_every_call};
use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::TensorRegion;
use fst::device::cuda::{SCRATCH_BYTES_MAX, kernels};
use fst::dtype::Dtype;
use fst::error::Kind;
use fst::options::{Options, ReaderChoice};
use std::fs::{self, File};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use tempfile::NamedTempFile;
use tracing::Level;

/// Options with slots of two blocks, so that small tensors keep every slot busy.
pub const DIRECT: Options = Options { reader: ReaderChoice::Gds, ..TIGHT };

/// Whether this build supports GPUDirect Storage.
const IS_SUPPORTED: bool = kernels::IMAGE.is_some();

/// Log of a load for which the library's driver could not be opened.
static REFUSED_DRIVER: OnceLock<String> = OnceLock::new();

/// Starts a test with the library. Its driver can be refused only until it has been opened, so the first test to start
/// tries that.
pub fn start(sim: &Sim) -> Cufile<'_> {
    let cufile = Cufile::start(sim);
    REFUSED_DRIVER.get_or_init(|| {
        cufile.inject(cufile::Fault::DriverOpen, 1);
        let model = mixed_model();
        let gpu = Gpu::new(sim, 0);
        let load = Load::all(&gpu, &model);
        let (log, result) = log_of(|| load.run(DIRECT));
        result.unwrap();
        load.assert_holds(&model);
        // As PyTorch may have done. The next call of open reports that it is open.
        Cufile::start(sim).open();
        log
    });
    Cufile::start(sim)
}

/// Adds spaces to the header of a file, which shifts its data section.
fn pad_header(path: &Path, spaces: usize) {
    let bytes = fs::read(path).unwrap();
    let header_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let end = 8 + usize::try_from(header_bytes).unwrap();
    let padded = (header_bytes + spaces as u64).to_le_bytes();
    fs::write(path, [&padded[..], &bytes[8..end], &vec![b' '; spaces], &bytes[end..]].concat()).unwrap();
}

#[test]
fn every_dtype_is_exact_at_any_data_offset() {
    let dtypes: Vec<Dtype> = Dtype::all().filter(|dtype| dtype.scalar_type().is_some()).collect();
    let tensors: Vec<(Dtype, &[u64])> = dtypes.iter().map(|&dtype| (dtype, &[31, 36][..])).collect();
    for (spaces, sim) in [0, 1, 1000, 4095].into_iter().zip(schedules()) {
        let cufile = start(&sim);
        let model = Model::new(&tensors);
        pad_header(&model.paths[0], spaces);
        let gpu = Gpu::new(&sim, 0);
        let load = Load::all(&gpu, &model);
        let before = sim.counters();
        load.run(DIRECT).unwrap();
        let (after, reads) = (sim.counters(), cufile.counters());
        load.assert_holds(&model);
        if IS_SUPPORTED {
            // No byte was copied from the host, and all reads were direct.
            assert_eq!(after.copies, before.copies);
            assert_eq!(after.registrations, 0);
            assert!(reads.reads > 2 && reads.buffers == 1, "{reads:?}");
            assert_eq!((reads.unaligned_reads, reads.unregistered_reads), (0, 0));
            // One launch and one wait per chunk, and one wait before all reads.
            assert!(after.launches - before.launches <= reads.reads, "{after:?} {reads:?}");
            assert!(after.syncs - before.syncs <= reads.reads + 1, "{after:?} {reads:?}");
        }
    }
}

#[test]
fn scratch_memory_stays_within_its_bound() {
    let sim = Sim::start(0);
    let _cufile = start(&sim);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.safetensors");
    let bytes = 1_u64 << 30;
    let header = format!(r#"{{"t":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    // A sparse file, which takes no space on the disk.
    File::options().write(true).open(&path).unwrap().set_len(8 + header.len() as u64 + bytes).unwrap();
    let gpu = Gpu::new(&sim, 0);
    for chunk_bytes in [4 << 10, 4 << 20, 100 << 20, 256 << 20] {
        let checkpoint = Checkpoint::open(&[&path]).unwrap();
        let regions: Vec<TensorRegion> =
            checkpoint.entries().map(|(file, entry)| TensorRegion::whole(file, entry).unwrap()).collect();
        let load = Load { gpu: &gpu, checkpoint, regions: Arc::from(regions), blocks: vec![1 << 40] };
        let transfer = load.open(Options { chunk_bytes, ..DIRECT }).unwrap();
        let batch = transfer.planner().prepare(&load.destinations()).unwrap();
        assert!(batch.scratch_bytes() <= SCRATCH_BYTES_MAX, "{}", batch.scratch_bytes());
        assert_eq!(batch.scratch_bytes() > 0, IS_SUPPORTED);
    }
}

/// Runs loads that must succeed despite a fault of the library, and returns its counters and the log of each.
fn loaded_with(prepare: impl Fn(&Sim, &Cufile<'_>)) -> Vec<(cufile::Counters, String)> {
    let model = mixed_model();
    let load = |sim: Sim| {
        let cufile = start(&sim);
        let gpu = Gpu::new(&sim, 0);
        let load = Load::all(&gpu, &model);
        prepare(&sim, &cufile);
        let (log, result) = log_of(|| load.run(DIRECT));
        result.unwrap();
        load.assert_holds(&model);
        let counters = cufile.counters();
        (counters, log)
    };
    schedules().map(load).collect()
}

#[test]
fn refusals_are_logged_and_the_staged_engine_is_used() {
    start(&Sim::start(0));
    let mut logs =
        vec![(REFUSED_DRIVER.get().unwrap().clone(), "cuFileDriverOpen failed with CU_FILE_NVFS_DRIVER_ERROR")];
    // For the first and the second file.
    for at in [1, 2] {
        for (counters, log) in loaded_with(|_, cufile| cufile.inject(cufile::Fault::HandleRegister, at)) {
            assert_eq!(counters.reads, 0);
            logs.push((log, "cuFileHandleRegister failed with CU_FILE_IO_NOT_SUPPORTED"));
        }
    }
    for (counters, log) in loaded_with(|sim, _| sim.inject(Fault::RefuseModules, 0)) {
        assert_eq!(counters.reads, 0);
        logs.push((log, "this build has no kernels for this GPU"));
    }
    for (log, reason) in logs {
        let reason = if IS_SUPPORTED { reason } else { "this build has no kernels for this GPU" };
        assert!(log.contains("reads as with auto") && log.contains(reason), "{log}");
    }
}

#[test]
fn reads_into_unregistered_memory_work() {
    for (counters, log) in loaded_with(|_, cufile| cufile.inject(cufile::Fault::RefuseBuffers, 1)) {
        assert_eq!(counters.reads, counters.unregistered_reads);
        assert_eq!(log.contains("cuFileBufRegister failed with CU_FILE_GPU_MEMORY_PINNING_FAILED"), IS_SUPPORTED);
    }
}

#[test]
fn short_and_interrupted_reads_are_resumed() {
    for (counters, _) in loaded_with(|_, cufile| cufile.inject(cufile::Fault::ShortReads, 2)) {
        assert_eq!(counters.faults > 0, IS_SUPPORTED);
    }
    for at in 1..5 {
        for (counters, _) in loaded_with(|_, cufile| cufile.inject(cufile::Fault::Interrupted, at)) {
            assert_eq!(counters.faults > 0, IS_SUPPORTED);
        }
    }
}

#[test]
fn a_read_that_fails_during_the_load_is_a_clean_error() {
    if !IS_SUPPORTED {
        return;
    }
    let model = mixed_model();
    for (fault, reason) in
        [(cufile::Fault::Disk, "os error 5"), (cufile::Fault::Library, "CU_FILE_INTERNAL_ERROR; FST_READER=auto")]
    {
        for at in 1.. {
            let sim = if at % 2 == 0 { Sim::start(at) } else { Sim::start_lazy(at) };
            let cufile = start(&sim);
            let gpu = Gpu::new(&sim, 0);
            let load = Load::all(&gpu, &model);
            cufile.inject(fault, at);
            let result = load.run(DIRECT);
            let is_over = cufile.counters().faults == 0;
            if is_over {
                assert!(at > 5);
                result.unwrap();
                break;
            }
            let error = result.unwrap_err();
            assert_eq!(error.kind(), Kind::Io);
            let text = error.to_string();
            assert!(
                text.contains(".safetensors: tensor ") && text.contains(": byte ") && text.contains(reason),
                "{text}"
            );
        }
    }
}

#[test]
fn a_truncated_file_is_a_clean_error() {
    for (missing, sim) in [1, 5000, 9000, 40_000].into_iter().zip(schedules()) {
        let _cufile = start(&sim);
        let model = mixed_model();
        let length = fs::metadata(&model.paths[0]).unwrap().len();
        let gpu = Gpu::new(&sim, 0);
        let load = Load::all(&gpu, &model);
        let cut = length.saturating_sub(missing);
        File::options().write(true).open(&model.paths[0]).unwrap().set_len(cut).unwrap();
        let error = load.run(Options { threads: 1, ..DIRECT }).unwrap_err();
        assert_eq!(error.kind(), Kind::Io, "{error}");
        assert!(error.to_string().contains("bytes early"), "{error}");
    }
}

#[test]
fn driver_faults_are_clean_errors() {
    let model = mixed_model();
    let least = if IS_SUPPORTED { 5 } else { 0 };
    for fault in [Fault::OutOfMemory, Fault::LaunchEnqueue, Fault::LaunchAsync] {
        let results = with_fault_at_every_call(fault, least, |sim, begin| {
            let _cufile = start(sim);
            attempt(sim, begin, &model, DIRECT)
        });
        // Without memory for the kernels, the staged engine loads: once with each schedule.
        let staged = if fault == Fault::OutOfMemory { 2 } else { 0 };
        let loaded = results.iter().filter(|result| result.is_ok()).count();
        assert!(!IS_SUPPORTED || loaded == staged, "{fault:?}: {results:?}");
    }
}

/// Returns the log of this thread while `work` runs, and the result of `work`.
fn log_of<T>(work: impl FnOnce() -> T) -> (String, T) {
    let log = NamedTempFile::new().unwrap();
    let subscriber = tracing_subscriber::fmt().with_max_level(Level::TRACE).with_writer(log.reopen().unwrap()).finish();
    let result = tracing::subscriber::with_default(subscriber, work);
    (fs::read_to_string(log.path()).unwrap(), result)
}
