//! Budgets for the calls of the CUDA driver by a load or a save, counted by the simulated driver.

use crate::gpu_load::Load;
use crate::model::Model;
use crate::sim::abi::{CaptureMode, Counters};
use crate::sim::gpu::Gpu;
use crate::sim::{Sim, TIGHT, release, schedules};
use fst::cast::elements::Cast;
use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::TensorRegion;
use fst::device::Scratch;
use fst::device::cuda::Cuda;
use fst::device::cuda::driver::{FUNCTIONS, check_functions};
use fst::device::cuda::kernels::IMAGE;
use fst::dtype::Dtype;
use fst::error::Kind;
use fst::format::layout::{Layout, Tensor};
use fst::load::staged;
use fst::options::Options;
use fst::plan::{Chunk, SlotCopy};
use fst::save::atomic_file::OutputFile;
use fst::save::file_kernel::Linux;
use fst::save::memory::SourceMemory;
use fst::save::{DeviceStream, Extent, Save};
use fst::staging::{PAGE_BYTES, Request, Staging};
use safetensors::SafeTensors;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// Calls between two moments, with the objects that were live at the later one.
fn between(before: Counters, after: Counters) -> Counters {
    Counters {
        copies: after.copies - before.copies,
        stream_changes: after.stream_changes - before.stream_changes,
        launches: after.launches - before.launches,
        syncs: after.syncs - before.syncs,
        allocations: after.allocations - before.allocations,
        modules: after.modules - before.modules,
        streams: after.streams - before.streams,
        events: after.events - before.events,
        records: after.records - before.records,
        waits: after.waits - before.waits,
        queries: after.queries - before.queries,
        registrations: after.registrations - before.registrations,
        ..after
    }
}

/// Model of small tensors.
fn small_model(count: usize) -> Model {
    Model::new(&vec![(Dtype::F32, &[30, 10][..]); count])
}

/// Returns a load of one tensor of a model.
fn load_of_one<'a>(gpu: &'a Gpu<'a>, model: &Model, tensor: usize) -> Load<'a> {
    let checkpoint = Checkpoint::open(&model.paths).unwrap();
    let (file, entry) = checkpoint.entry(tensor).unwrap();
    let regions: Arc<[TensorRegion]> = [TensorRegion::whole(file, entry).unwrap()].into();
    Load::new(gpu, checkpoint, regions)
}

#[test]
fn a_load_of_many_chunks_records_once_for_each_copy_stream_and_a_second_creates_nothing() {
    let model = small_model(600);
    let options = Options { chunk_bytes: 64 << 10, staging_bytes: 256 << 10, ..TIGHT };
    for sim in schedules().take(3) {
        let gpu = Gpu::new(&sim, 0);
        for is_first in [true, false] {
            let load = Load::all(&gpu, &model);
            let mut transfer = load.open(options.clone()).unwrap();
            let chunks = transfer.planner().prepare(&load.destinations()).unwrap().chunks().len() as u64;
            let slots = 4;
            assert!(chunks > slots, "{chunks}");
            let before = sim.counters();
            load.fill(&mut transfer, &load.destinations()).unwrap();
            transfer.finish().unwrap();
            let calls = between(before, sim.counters());
            let lanes = if IMAGE.is_some() { 2 } else { 1 };
            if IMAGE.is_some() {
                assert_eq!((calls.copies, calls.launches), (chunks, chunks), "{calls:?}");
            }
            // One record per chunk and on the caller's stream, and two on each copy stream: for the caller's stream and for
            // the host.
            assert_eq!(
                (calls.records, calls.waits, calls.streams),
                (chunks + 1 + 2 * lanes, 2 * lanes, 0),
                "{calls:?}"
            );
            // The host queries events, because no signal would end a wait in the driver.
            assert_eq!(calls.syncs, 0, "{calls:?}");
            let (events, registrations) = if is_first { (slots + 5, slots) } else { (0, 0) };
            assert!(calls.events <= events && calls.registrations <= registrations, "{calls:?}");
            load.assert_holds(&model);
        }
    }
}

/// Large tensors, in several chunks without a kernel.
#[test]
fn a_load_without_kernels_uses_one_copy_stream() {
    let model = Model::new(&[(Dtype::F32, &[3000][..]); 4]);
    for sim in schedules().take(3) {
        let gpu = Gpu::new(&sim, 0);
        for _ in 0..2 {
            let load = Load::all(&gpu, &model);
            let before = sim.counters();
            load.run(TIGHT).unwrap();
            let calls = between(before, sim.counters());
            assert_eq!((calls.stream_changes, calls.launches), (0, 0), "{calls:?}");
            // One record on the caller's stream and two on the copy stream, besides the chunks' records: for the caller's
            // stream and for the host.
            assert_eq!((calls.records, calls.waits, calls.syncs), (calls.copies + 3, 2, 0), "{calls:?}");
            load.assert_holds(&model);
        }
    }
}

/// Large tensors, for which no kernel is needed, in several chunks. A planned cast needs the kernels, and any number of
/// them loads one module.
#[test]
fn a_load_without_casts_or_scattered_chunks_loads_no_module() {
    let model = Model::new(&[(Dtype::F32, &[3000][..]); 4]);
    for sim in schedules().take(3) {
        let gpu = Gpu::new(&sim, 0);
        let load = Load::all(&gpu, &model);
        load.run(TIGHT).unwrap();
        assert_eq!(sim.counters().modules, 0);
        load.assert_holds(&model);
        let transfer = load.open(TIGHT).unwrap();
        let cast = Cast::new(Dtype::F32, Dtype::BF16).unwrap();
        for _ in 0..2 {
            assert_eq!(transfer.planner().can_cast(cast), IMAGE.is_some());
            assert_eq!(sim.counters().modules, u64::from(IMAGE.is_some()));
        }
    }
}

fn staged_bytes(chunk: &Chunk) -> usize {
    match chunk {
        Chunk::Staged { bytes, .. } => *bytes,
        Chunk::InPlace { .. } => panic!("{chunk:?}"),
    }
}

/// One chunk per thread, of 512 KiB to a slot. Up to 1 MiB are one chunk.
#[test]
fn the_size_of_chunks_follows_that_of_the_load() {
    let options = Options { chunk_bytes: 1 << 20, staging_bytes: 256 << 20, threads: 4, ..TIGHT };
    // Slots have room for a table only if there are kernels.
    let (slots, room) = if IMAGE.is_some() { (22, (1 << 20) / 16 * 15) } else { (20, 1 << 20) };
    let sim = Sim::start(0);
    for (kib, count, most) in [(900, 1, 910 << 10), (3 << 10, 4, 780 << 10), (20 << 10, slots, room)] {
        let model = Model::new(&[(Dtype::U8, &[kib << 10][..])]);
        let gpu = Gpu::new(&sim, 0);
        let load = Load::all(&gpu, &model);
        let mut transfer = load.open(options.clone()).unwrap();
        let batch = transfer.planner().prepare(&load.destinations()).unwrap();
        let bytes: Vec<usize> = batch.chunks().iter().map(staged_bytes).collect();
        assert!((count..=count + 1).contains(&bytes.len()), "{bytes:?}");
        assert!(bytes.iter().all(|&bytes| bytes <= most), "{bytes:?}");
        load.fill(&mut transfer, &load.destinations()).unwrap();
        transfer.finish().unwrap();
        load.assert_holds(&model);
    }
}

/// Copies are done one by one, when they are asked for.
#[test]
fn a_load_pins_no_slot_while_copies_keep_the_device_busy() {
    let sim = Sim::start_lazy(0);
    let gpu = Gpu::new(&sim, 0);
    let address = gpu.allocate(PAGE_BYTES);
    let request = Request { bytes: PAGE_BYTES, node: None, staging_bytes: 1 << 20 };
    let staging = Staging::new(Arc::new(Cuda::open(0, gpu.stream as u64).unwrap()), 16, request);
    let copy = SlotCopy {
        tensor: 0,
        slot_begin: 0,
        row_bytes: PAGE_BYTES,
        rows: 1,
        slot_stride: PAGE_BYTES,
        address,
        cast: None,
    };
    for _ in 0..8 {
        // The two slots are read into at once.
        let slots = [(); 2].map(|()| staging.acquire(PAGE_BYTES, &|| Ok(())).unwrap());
        slots.into_iter().for_each(|slot| staging.submit(slot, PAGE_BYTES, &[copy]).unwrap());
    }
    assert!((4..=5).contains(&sim.counters().registrations), "{:?}", sim.counters());
    staging.drain(&|| Ok(())).unwrap();
}

#[test]
fn a_load_of_one_chunk_costs_one_copy_and_one_record() {
    let model = small_model(100);
    for sim in schedules() {
        let gpu = Gpu::new(&sim, 0);
        let mut blocks = Vec::new();
        for tensor in 0..100 {
            let load = load_of_one(&gpu, &model, tensor);
            let before = sim.counters();
            load.run(TIGHT).unwrap();
            let calls = between(before, sim.counters());
            assert_eq!((calls.copies, calls.launches, calls.records), (1, 0, 1), "{calls:?}");
            assert_eq!((calls.waits, calls.syncs), (0, 0), "{calls:?}");
            // The first load opens the GPU.
            let created = if tensor == 0 { (2, 1, 1) } else { (0, 0, 0) };
            assert_eq!((calls.streams, calls.events, calls.registrations), created, "{calls:?}");
            assert!(calls.queries <= 1, "{calls:?}");
            blocks.push(load.blocks[0]);
            // The caller waits for its own work. The slot is free then.
            assert!(gpu.read(load.blocks[0], 1200) == model.tensors[tensor].bytes);
        }
    }
}

#[test]
fn kernels_stay_loaded_until_the_copy_of_an_ended_load_is_done() {
    let model = small_model(3);
    let sim = Sim::start_lazy(0);
    let gpu = Gpu::new(&sim, 0);
    let load = Load::all(&gpu, &model);
    load.run(Options { chunk_bytes: 64 << 10, staging_bytes: 64 << 10, ..TIGHT }).unwrap();
    let counters = sim.counters();
    assert_eq!((counters.launches, counters.syncs), (u64::from(IMAGE.is_some()), 0));
    fst::device::release();
    assert_eq!(sim.counters().live_modules, u64::from(IMAGE.is_some()));
    load.assert_holds(&model);
    fst::staging::pool::release(&|| Ok(())).unwrap();
    assert_eq!(sim.counters().live_modules, 0);
}

/// The caller's stream is busy while it loads tensor by tensor.
#[test]
fn copies_in_flight_use_bounded_memory() {
    let model = small_model(100);
    for options in [TIGHT, Options { staging_bytes: 1 << 20, ..TIGHT }] {
        for sim in schedules() {
            let gpu = Gpu::new(&sim, 0);
            let loads: Vec<Load<'_>> = (0..100).map(|tensor| load_of_one(&gpu, &model, tensor)).collect();
            let before = sim.counters();
            loads.iter().for_each(|load| load.run(options.clone()).unwrap());
            let calls = between(before, sim.counters());
            assert_eq!((calls.copies, calls.records, calls.waits, calls.streams), (100, 100, 0, 2), "{calls:?}");
            let slots = (options.staging_bytes as u64 / 4096).min(16);
            assert!(calls.registrations <= slots && calls.events <= slots + 1, "{calls:?}");
            for (load, tensor) in loads.iter().zip(&model.tensors) {
                assert!(gpu.read(load.blocks[0], 1200) == tensor.bytes);
            }
        }
    }
}

#[test]
fn threads_load_tensors_of_one_chunk_at_once() {
    let model = small_model(60);
    for sim in schedules() {
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let (sim, model) = (&sim, &model);
                scope.spawn(move || {
                    let gpu = Gpu::new(sim, i32::try_from(worker % 2).unwrap());
                    for tensor in (worker * 15)..(worker * 15 + 15) {
                        let load = load_of_one(&gpu, model, tensor);
                        load.run(TIGHT).unwrap();
                        // The allocator may give the memory to its next user on this stream.
                        if tensor % 2 == 0 {
                            load.use_blocks();
                        } else {
                            assert!(gpu.read(load.blocks[0], 1200) == model.tensors[tensor].bytes);
                        }
                    }
                });
            }
        });
    }
}

#[test]
fn a_load_after_a_preparation_creates_events_only() {
    let model = small_model(600);
    let options = Options { chunk_bytes: 64 << 10, threads: 16, ..TIGHT };
    for sim in schedules().take(3) {
        let gpu = Gpu::new(&sim, 0);
        let warm_up = |options: &Options| staged::warm_up(&Cuda::open(0, gpu.stream as u64).unwrap(), options);
        // One slot, although the bound leaves room for none. Then two that sixteen threads read into, one that is taken next
        // and two in flight, and not more a second time.
        for (staging_bytes, slots) in [(60 << 10, 1), (1 << 20, 5), (1 << 20, 5)] {
            warm_up(&Options { staging_bytes, ..options.clone() }).unwrap();
            let Counters { live_registrations, streams, modules, copies, .. } = sim.counters();
            // The caller's own stream and two copy streams.
            let kernels = u64::from(IMAGE.is_some());
            assert_eq!((live_registrations, streams, modules, copies), (slots, 3, kernels, 0));
        }
        let load = Load::all(&gpu, &model);
        let before = sim.counters();
        load.run(Options { staging_bytes: 1 << 20, threads: 3, ..options.clone() }).unwrap();
        let calls = between(before, sim.counters());
        assert_eq!((calls.registrations, calls.streams, calls.modules), (0, 0, 0), "{calls:?}");
        load.assert_holds(&model);
        release();
        let Counters { live_registrations, live_streams, live_modules, .. } = sim.counters();
        assert_eq!((live_registrations, live_streams, live_modules), (0, 1, 0));
        sim.cuda.begin_capture(gpu.stream, CaptureMode::Relaxed).unwrap();
        let error = warm_up(&options).unwrap_err();
        assert!(error.kind() == Kind::InvalidArgument && error.to_string().contains("captured"), "{error}");
        assert_eq!(sim.counters().live_registrations, 0);
        sim.cuda.end_capture(gpu.stream).unwrap();
    }
}

#[test]
fn a_release_leaves_nothing_of_the_driver_in_use() {
    let (small, large) = (small_model(40), small_model(400));
    for sim in schedules() {
        let gpu = Gpu::new(&sim, 0);
        let all = Load::all(&gpu, &large);
        let one = load_of_one(&gpu, &small, 0);
        for load in [&all, &one] {
            load.run(TIGHT).unwrap();
        }
        let Counters { live_streams, live_events, live_registrations, live_contexts, .. } = sim.counters();
        assert!(live_streams == 3 && live_events > 0 && live_registrations > 0 && live_contexts > 1);
        // The copy of the last load may be in flight.
        release();
        let Counters { live_streams, live_events, live_registrations, live_contexts, live_modules, .. } =
            sim.counters();
        // The caller's own stream and context.
        assert_eq!((live_streams, live_contexts), (1, 1));
        assert_eq!((live_events, live_registrations, live_modules), (0, 0, 0));
        all.assert_holds(&large);
        one.run(TIGHT).unwrap();
    }
}

#[test]
fn a_gpu_released_during_a_load_is_given_back_after_it() {
    let model = small_model(100);
    let sim = Sim::start(3);
    let gpu = Gpu::new(&sim, 0);
    let load = Load::all(&gpu, &model);
    let mut transfer = load.open(TIGHT).unwrap();
    release();
    load.fill(&mut transfer, &load.destinations()).unwrap();
    release();
    transfer.finish().unwrap();
    load.assert_holds(&model);
    fst::staging::pool::release(&|| Ok(())).unwrap();
    let Counters { live_streams, live_events, live_registrations, .. } = sim.counters();
    assert_eq!((live_streams, live_events, live_registrations), (1, 0, 0));
}

/// Saves tensors of 1200 bytes of a GPU, with scratch memory if there is any, and returns the calls of the driver.
fn save(sim: &Sim, gpu: &Gpu<'_>, count: usize, has_scratch: bool) -> Counters {
    let bytes_of =
        |index: usize| -> Vec<u8> { (0..1200).map(|at| u8::try_from((at * 7 + index * 13) % 251).unwrap()).collect() };
    let tensors: Vec<Tensor> =
        (0..count).map(|index| Tensor::new(format!("{index:05}"), Dtype::U8, vec![1200]).unwrap()).collect();
    let extents = (0..count).map(|index| {
        let address = gpu.allocate(1200);
        sim.write(address, &bytes_of(index)).unwrap();
        Extent { device: 0, address, length: 1200 }
    });
    let extents: Vec<Extent> = extents.collect();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("saved");
    let layout = Layout::new(&tensors, &None).unwrap();
    let stream = gpu.stream as u64;
    let before = sim.counters();
    let memory: Arc<dyn SourceMemory> = Arc::new(Cuda::open(gpu.ordinal, stream).unwrap());
    let output = OutputFile::create(&path, Box::new(Linux)).unwrap();
    let mut save = Save::begin(layout, output, vec![DeviceStream { memory, stream }], &SAVE).unwrap();
    let bytes = if has_scratch { save.scratch_bytes(&extents)[0] } else { 0 };
    let mut scratch = Scratch::default();
    if bytes > 0 {
        scratch = Scratch { address: gpu.allocate(bytes), bytes: bytes as u64 };
        gpu.queue_fill(scratch.address, bytes);
    }
    // SAFETY: the GPU owns the memory, and nothing else writes to it.
    unsafe { save.append(&extents, &[scratch]) }.unwrap();
    save.finish().unwrap();
    if bytes > 0 {
        gpu.queue_fill(scratch.address, bytes);
    }
    let calls = between(before, sim.counters());
    let file = std::fs::read(&path).unwrap();
    let found = SafeTensors::deserialize(&file).unwrap();
    for index in 0..count {
        assert!(found.tensor(&format!("{index:05}")).unwrap().data() == bytes_of(index), "{index}");
    }
    calls
}

const SAVE: Options = Options { chunk_bytes: 64 << 10, staging_bytes: 256 << 10, ..TIGHT };

#[test]
fn a_save_of_small_tensors_costs_one_copy_per_chunk() {
    let count = 400;
    for sim in schedules() {
        let gpu = Gpu::new(&sim, 0);
        let calls = save(&sim, &gpu, count, true);
        // The header takes part of the chunks.
        let chunks = (count as u64 * 1200).div_ceil(SAVE.chunk_bytes as u64) + 1;
        if IMAGE.is_some() {
            assert!(calls.copies <= chunks && calls.launches <= chunks, "{calls:?}");
        }
        // Each copy stream waits for the caller's stream before its first use.
        assert!(calls.syncs == 0 && calls.records <= chunks + 1 && calls.waits <= 2, "{calls:?}");
        let again = save(&sim, &gpu, count, true);
        // Each thread has an event and a slot, and keeps them for the next save. A save may use fewer threads. One more
        // event is the caller's stream's.
        let threads = SAVE.threads as u64;
        assert!(again.streams == 0 && calls.events + again.events <= threads + 1, "{calls:?} {again:?}");
        assert!(calls.registrations + again.registrations <= threads, "{calls:?} {again:?}");
        // A GPU without free memory is saved from tensor by tensor.
        let calls = save(&sim, &gpu, count, false);
        assert!(calls.copies >= count as u64 && calls.launches == 0, "{calls:?}");
    }
}

#[test]
fn a_driver_that_lacks_a_function_is_named_as_too_old() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("rust/device");
    let files = ["cuda.rs", "cuda/convert.rs", "cuda/driver.rs", "cuda/gds.rs", "cuda/gpu.rs", "cuda/kernels.rs"];
    let text = files.map(|file| std::fs::read_to_string(directory.join(file)).unwrap()).concat();
    let called = text.split("sys::cu").skip(1).filter_map(|rest| {
        let end = rest.find(|character: char| !character.is_alphanumeric() && character != '_')?;
        let is_call = rest.starts_with(char::is_uppercase) && rest[end..].starts_with('(');
        is_call.then(|| format!("cu{}", &rest[..end]))
    });
    let called: BTreeSet<String> = called.collect();
    assert_eq!(called, FUNCTIONS.split_whitespace().map(String::from).collect());
    for absent in called {
        let error = check_functions(|name| name != absent).unwrap_err();
        assert_eq!(error.kind(), Kind::Device);
        assert!(error.to_string().contains(&format!("too old: it lacks {absent};")), "{error}");
    }
}
