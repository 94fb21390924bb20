//! Loads from files to device memory, on the simulated CUDA driver. Every test also fails if the driver reports a
//! violation.

use crate::gds::{self, DIRECT};
use crate::gpu_load::{Load, mixed_model};
use crate::host_load;
use crate::model::Model;
use crate::sim::abi::{CaptureMode, Fault};
use crate::sim::gpu::Gpu;
use crate::sim::random::Random;
use crate::sim::{Sim, TIGHT, schedules};
use fst::cast::elements::Cast;
use fst::cast::scatter::TASK_BYTES;
use fst::checkpoint::Checkpoint;
use fst::checkpoint::verify::Verify;
use fst::device::cuda::kernels::IMAGE;
use fst::device::cuda::{self, Cuda};
use fst::device::host::Host;
use fst::device::{self, Device, Scratch};
use fst::dtype::Dtype;
use fst::error::Kind;
use fst::format::digests::DIGESTS_KEY;
use fst::format::layout::Tensor;
use fst::options::{Options, ReaderChoice};
use fst::plan::Destination;
use fst::profile;
use fst::save::atomic_file::OutputFile;
use fst::save::file_kernel::Linux;
use fst::save::writer::Writer;
use fst::staging::{PAGE_BYTES, Request, Staging, pool};
use serde_json::Value;
use std::fs;
use std::sync::Arc;
use tempfile::TempDir;

/// Options of the staged engine and of GPUDirect Storage.
const ENGINES: [Options; 2] = [TIGHT, DIRECT];

/// Loads all tensors of a model, and compares their bytes.
fn load_all(gpu: &Gpu<'_>, model: &Model, options: &Options) {
    let load = Load::all(gpu, model);
    load.run(options.clone()).unwrap();
    load.assert_holds(model);
}

#[test]
fn slices_of_any_dimension_are_exact() {
    let dtypes = [Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::C64];
    for (seed, sim) in (0..).zip(schedules()) {
        let mut random = Random::new(seed);
        let mut below = |limit: u64| random.below(limit);
        let mut shapes = Vec::new();
        let mut slices = Vec::new();
        for _ in 0..25 {
            // A large first dimension makes rows fill several chunks, and a large last one makes one row do so.
            let rank = 1 + usize::try_from(below(4)).unwrap();
            let mut shape: Vec<u64> = (0..rank).map(|_| 1 + below(9)).collect();
            let large = usize::try_from(below(u64::try_from(rank).unwrap())).unwrap();
            shape[large] = 1 + below(700);
            let dim = usize::try_from(below(u64::try_from(rank).unwrap())).unwrap();
            let start = below(shape[dim] + 1);
            slices.push((dim, start, below(shape[dim] - start + 1)));
            shapes.push((dtypes[usize::try_from(below(4)).unwrap()], shape));
        }
        // Rows longer than a chunk, and rows with gaps that are not read.
        shapes.push((Dtype::F32, vec![3, 5000]));
        slices.push((1, 700, 4000));
        shapes.push((Dtype::F32, vec![4, 12_000]));
        slices.push((1, 11_000, 300));
        let tensors: Vec<(Dtype, &[u64])> = shapes.iter().map(|(dtype, shape)| (*dtype, &shape[..])).collect();
        let model = Model::new(&tensors);

        let _cufile = gds::start(&sim);
        let gpu = Gpu::new(&sim, 0);
        for options in ENGINES {
            let load = Load::slices(&gpu, &model, &slices);
            load.run(options).unwrap();
            for ((found, tensor), &(dim, start, length)) in load.read().iter().zip(&model.tensors).zip(&slices) {
                let expected = tensor.slice(dim, start, length);
                assert!(*found == expected, "{length} from {start} of dimension {dim} of {:?}", tensor.shape);
            }
        }
    }
}

#[test]
fn parts_of_tensors_are_verified() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("x.safetensors");
    let bytes: Vec<u8> = (0_u32..3 << 18).flat_map(u32::to_le_bytes).collect();
    let length = u64::try_from(bytes.len()).unwrap();
    let metadata = Some([(DIGESTS_KEY.to_owned(), "blake3".to_owned())].into());
    let output = OutputFile::create(&path, Box::new(Linux)).unwrap();
    let mut writer = Writer::begin(output, metadata, None, &Options::default()).unwrap();
    writer.add(Tensor::new("t", Dtype::U8, vec![length]).unwrap()).unwrap();
    let address = u64::try_from(bytes.as_ptr().expose_provenance()).unwrap();
    // SAFETY: the bytes outlive the call.
    unsafe { writer.append(&Host, 0, address, length) }.unwrap();
    writer.finish().unwrap();
    let file = fs::read(&path).unwrap();
    let data_begin = file.len() - bytes.len();
    {
        // A slot of the size of a group has no room for it and the table.
        let sim = Sim::start(0);
        let gpu = Gpu::new(&sim, 0);
        let checkpoint = Checkpoint::open_with(&[&path], &Verify::Digests.into()).unwrap();
        let (source, entry) = checkpoint.find("t").unwrap();
        let region = host_load::slice(source, entry, 0, 0, 2 << 20);
        let load = Load::new(&gpu, checkpoint, [region].into());
        let transfer = load.open(Options { chunk_bytes: 1 << 20, ..TIGHT }).unwrap();
        let batch = transfer.planner().prepare(&load.destinations()).unwrap();
        assert_eq!(batch.chunks().len(), 2, "{:?}", batch.chunks());
    }
    for sim in schedules() {
        let gpu = Gpu::new(&sim, 0);
        // They touch the second of three groups, and the first one by a byte.
        for (changed, is_found) in [(0, true), ((2 << 20) - 1, true), (2 << 20, false)] {
            let mut content = file.clone();
            content[data_begin + changed] ^= 1;
            for (content, is_found) in [(&file, false), (&content, is_found)] {
                fs::write(&path, content).unwrap();
                let checkpoint = Checkpoint::open_with(&[&path], &Verify::Digests.into()).unwrap();
                let (source, entry) = checkpoint.find("t").unwrap();
                let region = host_load::slice(source, entry, 0, (1 << 20) - 1, 300_000);
                let load = Load::new(&gpu, checkpoint, [region].into());
                let result = load.run(TIGHT);
                assert_eq!(result.map_err(|error| error.kind()), if is_found { Err(Kind::Integrity) } else { Ok(()) });
                if !is_found {
                    assert!(load.read()[0] == bytes[(1 << 20) - 1..][..300_000]);
                }
            }
        }
    }
}

#[test]
fn tensors_with_several_destinations_are_split() {
    for (seed, sim) in (0..).zip(schedules()) {
        let mut random = Random::new(seed);
        let model = Model::new(&[(Dtype::U8, &[300, 100]), (Dtype::F32, &[5000])]);
        let gpu = Gpu::new(&sim, 0);
        let slices = [(1, 20, 50), (0, 100, 4000)];
        let mut load = Load::slices(&gpu, &model, &slices);
        let mut destinations = Vec::new();
        for (tensor, region) in load.regions.iter().enumerate() {
            let mut begin = 0;
            while begin < region.bytes() {
                let end = (begin + 1 + random.below(3000)).min(region.bytes());
                let address = gpu.allocate(usize::try_from(end - begin).unwrap());
                destinations.push(Destination { tensor, begin, end, address, cast: None });
                begin = end;
            }
        }
        load.blocks.clear();
        let mut transfer = load.open(TIGHT).unwrap();
        load.fill(&mut transfer, &destinations).unwrap();
        transfer.finish().unwrap();
        for (index, (tensor, (dim, start, length))) in model.tensors.iter().zip(slices).enumerate() {
            let found = destinations.iter().filter(|destination| destination.tensor == index).flat_map(
                |&Destination { begin, end, address, .. }| gpu.read(address, usize::try_from(end - begin).unwrap()),
            );
            assert!(found.eq(tensor.slice(dim, start, length)));
        }
    }
}

#[test]
fn tiny_tensors_cost_one_copy_launch_and_wait_per_chunk() {
    let shapes: Vec<[u64; 1]> = (0..1500).map(|index| [1 + index % 9]).collect();
    let tensors: Vec<(Dtype, &[u64])> = shapes.iter().map(|shape| (Dtype::BF16, &shape[..])).collect();
    let model = Model::sharded(&tensors, 3);
    let options = Options { chunk_bytes: 64 << 10, staging_bytes: 256 << 10, ..TIGHT };
    // Number of table rows in a sixteenth of a slot.
    let chunks = u64::try_from(3 * 500_usize.div_ceil((4 << 10) / TASK_BYTES)).unwrap();
    for sim in schedules().take(3) {
        let gpu = Gpu::new(&sim, 0);
        let load = Load::all(&gpu, &model);
        let before = sim.counters();
        load.run(options.clone()).unwrap();
        let after = sim.counters();
        assert!(after.syncs - before.syncs <= chunks, "{after:?}");
        match IMAGE {
            Some(_) => assert_eq!((after.copies - before.copies, after.launches - before.launches), (chunks, chunks)),
            // A build without nvcc copies tensor by tensor.
            None => assert_eq!(after.launches, 0),
        }
        load.assert_holds(&model);
    }
}

#[test]
fn large_tensors_are_copied_straight_to_their_destinations() {
    let model = Model::new(&[(Dtype::U8, &[3_000_000]), (Dtype::F32, &[1_000_000])]);
    let options = Options { chunk_bytes: 2 << 20, staging_bytes: 8 << 20, ..TIGHT };
    for sim in schedules().take(2) {
        let gpu = Gpu::new(&sim, 0);
        let load = Load::all(&gpu, &model);
        assert_eq!(
            load.open(options.clone()).unwrap().planner().prepare(&load.destinations()).unwrap().scratch_bytes(),
            0
        );
        load.run(options.clone()).unwrap();
        let counters = sim.counters();
        assert_eq!((counters.launches, counters.copied_bytes), (0, 7_000_000));
        load.assert_holds(&model);
    }
}

#[test]
fn casts_match_those_on_the_cpu() {
    let casts = [
        (Dtype::F32, Dtype::BF16),
        (Dtype::BF16, Dtype::F32),
        (Dtype::F16, Dtype::BF16),
        (Dtype::F64, Dtype::F16),
        (Dtype::F32, Dtype::F8E4M3),
        (Dtype::I32, Dtype::F64),
        (Dtype::F8E4M3, Dtype::BF16),
    ];
    let shapes: Vec<[u64; 2]> = (0..40).map(|index| [1 + index % 9, 1 + index * 137 % 1000]).collect();
    let tensors: Vec<(Dtype, &[u64])> =
        shapes.iter().zip(casts.iter().cycle()).map(|(shape, (from, _))| (*from, &shape[..])).collect();
    let mut model = Model::new(&tensors);
    // Random bits contain NaNs, whose bits differ between the CPU and a GPU.
    model.write_finite();
    for (options, sim) in ENGINES.into_iter().cycle().zip(schedules()) {
        let cufile = gds::start(&sim);
        let gpu = Gpu::new(&sim, 0);
        let mut load = Load::all(&gpu, &model);
        let mut destinations = load.destinations();
        let mut expected = Vec::new();
        for (destination, ((from, to), tensor)) in destinations.iter_mut().zip(casts.iter().cycle().zip(&model.tensors))
        {
            let cast = Cast::new(*from, *to).unwrap();
            let items = u64::try_from(tensor.bytes.len()).unwrap() / from.item_bytes();
            let mut bytes = vec![0; usize::try_from(items * to.item_bytes()).unwrap()];
            cast.run(&tensor.bytes, &mut bytes);
            *destination = Destination { address: gpu.allocate(bytes.len()), cast: Some(cast), ..*destination };
            expected.push(bytes);
        }
        load.blocks.clear();
        let is_direct = options.reader == ReaderChoice::Gds;
        let mut transfer = load.open(options).unwrap();
        assert_eq!(transfer.planner().can_cast(destinations[0].cast.unwrap()), IMAGE.is_some());
        if IMAGE.is_some() {
            load.fill(&mut transfer, &destinations).unwrap();
            transfer.finish().unwrap();
            for ((destination, expected), tensor) in destinations.iter().zip(&expected).zip(&model.tensors) {
                let found = gpu.read(destination.address, expected.len());
                assert!(found == *expected, "{:?} {:?}", destination.cast, tensor.shape);
            }
            assert_eq!(cufile.counters().reads > 0, is_direct);
        } else {
            drop(transfer);
        }
    }
}

/// Scratch memory of any size suffices for small tensors. Casts need a little.
#[test]
fn loads_work_with_little_scratch_memory_or_none() {
    let model = Model::new(&vec![(Dtype::F32, &[300][..]); 400]);
    let options = Options { chunk_bytes: 1 << 20, staging_bytes: 4 << 20, ..TIGHT };
    for sim in schedules() {
        let gpu = Gpu::new(&sim, 0);
        for (most, has_casts) in [(256 << 10, true), (256 << 10, false), (0, false), (0, true)] {
            let load = Load::all(&gpu, &model);
            let mut transfer = load.open(options.clone()).unwrap();
            let narrow = Cast::new(Dtype::F32, Dtype::BF16).unwrap();
            let cast = (has_casts && transfer.planner().can_cast(narrow)).then_some(narrow);
            let mut destinations = load.destinations();
            destinations.iter_mut().for_each(|destination| destination.cast = cast);
            let batch = transfer.planner().prepare_within(&destinations, most as u64).unwrap();
            assert!(most == 0 || batch.scratch_bytes() <= most, "{}", batch.scratch_bytes());
            let bytes = batch.scratch_bytes().min(most);
            let address = if bytes > 0 { gpu.allocate(bytes) } else { 0 };
            // SAFETY: nothing else uses the memory.
            let filled = unsafe { transfer.fill(&batch, Scratch { address, bytes: bytes as u64 }) };
            if most == 0 && cast.is_some() {
                assert_eq!(filled.unwrap_err().kind(), Kind::OutOfMemory);
                continue;
            }
            filled.unwrap();
            transfer.finish().unwrap();
            if cast.is_none() {
                load.assert_holds(&model);
            }
        }
    }
}

#[test]
fn loads_work_without_pinned_memory_and_without_kernels() {
    let model = mixed_model();
    for ((fault, launches), sim) in [
        (Fault::RefusePinning, [true, true]),
        // Drivers before the compiler's refuse the image, and compile the PTX.
        (Fault::RefuseFatbins, [true, true]),
        // A GPU for which the image and the PTX have no code is not asked again.
        (Fault::RefuseModules, [false, false]),
        // An error that may pass, for both, does not end the use of the kernels.
        (Fault::ModulesPass, [false, true]),
    ]
    .into_iter()
    .zip(schedules())
    {
        let gpu = Gpu::new(&sim, 0);
        sim.inject(fault, 2);
        for may_launch in launches {
            let profile = profile::start();
            load_all(&gpu, &model, &TIGHT);
            let trace: Value = serde_json::from_str(&profile::stop(profile).unwrap()).unwrap();
            let why = trace["otherData"]["missing_kernels"][0]["why"].as_str().unwrap_or_default();
            assert_eq!(why.contains("CUDA_ERROR_NO_BINARY_FOR_GPU"), fault == Fault::RefuseModules && IMAGE.is_some());
            let counters = sim.counters();
            assert_eq!(counters.launches > 0, may_launch && IMAGE.is_some(), "{fault:?}");
            assert_eq!(counters.registered_bytes_peak == 0, fault == Fault::RefusePinning);
            assert!(counters.faults > 0 || IMAGE.is_none());
        }
    }
}

#[test]
fn a_wait_for_the_callers_event_leaves_captures_valid() {
    let sim = Sim::start_lazy(0);
    let gpu = Gpu::new(&sim, 0);
    let block = gpu.allocate(100);
    let event = sim.cuda.create_event().unwrap();
    gpu.queue_fill(block, 100);
    sim.cuda.record_event(event, gpu.stream).unwrap();
    sim.capture();
    // SAFETY: the event belongs to the primary context.
    unsafe { cuda::wait_for_event(event, 0, &|| Ok(())) }.unwrap();
    assert_eq!(sim.read(block, 100).unwrap(), [0x11; 100]);
    gpu.with_context(|| sim.cuda.destroy_event(event)).unwrap();
}

#[test]
fn a_captured_stream_is_refused() {
    let sim = Sim::start(0);
    let gpu = Gpu::new(&sim, 0);
    for tensors in [&[(Dtype::U8, &[10][..])][..], &[(Dtype::U8, &[4096][..]); 3]] {
        let load = Load::all(&gpu, &Model::new(tensors));
        // The capture may begin after the transfer was opened.
        let mut transfer = load.open(TIGHT).unwrap();
        let before = sim.counters().copies;
        sim.cuda.begin_capture(gpu.stream, CaptureMode::Global).unwrap();
        for error in [load.fill(&mut transfer, &load.destinations()), load.run(TIGHT)].map(Result::unwrap_err) {
            assert_eq!(error.kind(), Kind::InvalidArgument, "{error}");
        }
        drop(transfer);
        sim.cuda.end_capture(gpu.stream).unwrap();
        assert_eq!(sim.counters().copies, before);
    }
}

/// Handles 0, 1 and 2 are other streams where the copies are queued: in the primary context, or on another thread.
#[test]
fn a_default_stream_of_another_context_or_of_a_thread_is_refused() {
    let model = mixed_model();
    let sim = Sim::start(0);
    let (gpu, _other_gpu) = (Gpu::new(&sim, 0), Gpu::new(&sim, 1));
    let refused = |stream| {
        let error = Cuda::open(0, stream).map(drop).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidArgument, "{error}");
        error.to_string()
    };
    sim.cuda.set_current(gpu.context).unwrap();
    assert!(refused(2).contains("per-thread"));
    sim.cuda.set_current(sim.other_context(0)).unwrap();
    for stream in [0, 1] {
        assert!(refused(stream).contains("another CUDA context"));
    }
    // Another stream has a context of its own, and the default stream of another GPU belongs to its primary context.
    load_all(&gpu, &model, &TIGHT);
    Cuda::open(1, 0).map(drop).unwrap();
    // A program may enter a green context between two tensors.
    let cuda = Cuda::open(0, u64::try_from(gpu.stream).unwrap()).unwrap();
    assert_eq!(cuda.set_stream(0).unwrap_err().kind(), Kind::InvalidArgument);
    assert_eq!(sim.cuda.current(), Ok(sim.other_context(0)));
    drop(cuda);
    sim.cuda.set_current(gpu.context).unwrap();
}

/// Model of 1 MiB.
fn megabyte_model() -> Model {
    Model::new(&[(Dtype::U8, &[600_000]), (Dtype::F32, &[100, 1000])])
}

#[test]
fn pinned_memory_is_bounded_by_the_options_and_by_the_file() {
    let model = megabyte_model();
    for (chunk_bytes, staging_bytes) in [
        (TIGHT.chunk_bytes, TIGHT.staging_bytes),
        (TIGHT.chunk_bytes, TIGHT.chunk_bytes),
        // A part of a slot is left, and a part of a page.
        (TIGHT.chunk_bytes, 10_000),
        (5000, 20_000),
        // All slots are larger than the file, of which whole pages are pinned.
        (300_000, 8 << 20),
        (700_000, 8 << 20),
        (2_000_000, 8 << 20),
    ] {
        let options = Options { chunk_bytes, staging_bytes, ..TIGHT };
        for sim in schedules().take(2) {
            let gpu = Gpu::new(&sim, 0);
            load_all(&gpu, &model, &options);
            let counters = sim.counters();
            let limit = staging_bytes.min(1_000_000_usize.next_multiple_of(4 << 10)) as u64;
            assert!((1..=limit).contains(&counters.registered_bytes_peak), "{counters:?} with {options:?}");
            // The memory stays pinned, so the next load pins none.
            assert_eq!(counters.registered_bytes, counters.registered_bytes_peak);
            load_all(&gpu, &model, &options);
            assert_eq!(sim.counters().registrations, counters.registrations);
        }
    }
}

#[test]
fn workers_pin_one_slot_at_a_time() {
    let model = Model::new(&[(Dtype::U8, &[8 << 20])]);
    let options = Options { chunk_bytes: 512 << 10, staging_bytes: 8 << 20, threads: 8, ..TIGHT };
    for sim in schedules().take(3) {
        let gpu = Gpu::new(&sim, 0);
        let load = Load::all(&gpu, &model);
        let profile = profile::start();
        load.run(options.clone()).unwrap();
        let trace: Value = serde_json::from_str(&profile::stop(profile).unwrap()).unwrap();
        let mut pins = spans_of(&trace, "pin");
        pins.sort_by(|one, other| one.2.total_cmp(&other.2));
        assert!(pins.len() > 1, "{pins:?}");
        // Sums of times are exact to a nanosecond.
        assert!(pins.windows(2).all(|pair| pair[0].3 <= pair[1].2 + 1e-3), "{pins:?}");
        load.assert_holds(&model);
    }
}

/// The options leave memory for one chunk.
#[test]
fn several_workers_read_each_cached_chunk() {
    let options = Options { chunk_bytes: 1 << 20, staging_bytes: 1 << 20, threads: 4, ..TIGHT };
    for (reader, sim) in [ReaderChoice::Pread, ReaderChoice::Auto, ReaderChoice::Pread].into_iter().zip(schedules()) {
        let options = Options { reader, ..options.clone() };
        let model = Model::new(&[(Dtype::U8, &[1_400_000]), (Dtype::F32, &[100, 1000]), (Dtype::BF16, &[500_000])]);
        let gpu = Gpu::new(&sim, 0);
        let load = Load::all(&gpu, &model);
        let mut transfer = load.open(options.clone()).unwrap();
        let chunks = transfer.planner().prepare(&load.destinations()).unwrap().chunks().len();
        let profile = profile::start();
        load.fill(&mut transfer, &load.destinations()).unwrap();
        transfer.finish().unwrap();
        let trace: Value = serde_json::from_str(&profile::stop(profile).unwrap()).unwrap();
        load.assert_holds(&model);
        assert!(spans_of(&trace, "read").len() > 3 * chunks, "{chunks} chunks: {trace:?}");

        let length = fs::metadata(&model.paths[0]).unwrap().len();
        let load = Load::all(&gpu, &model);
        fs::File::options().write(true).open(&model.paths[0]).unwrap().set_len(length - 1000).unwrap();
        let error = load.run(options).unwrap_err();
        let message = error.to_string();
        let named = [model.paths[0].to_str().unwrap(), &model.tensors[2].name, &format!("byte {}", length - 1000)];
        assert!(error.kind() == Kind::Io && named.iter().all(|name| message.contains(name)), "{message}");
        assert_eq!(pool::release(&|| Ok(())).unwrap(), 1 << 20);
    }
}

#[test]
fn every_reader_loads_every_dtype_to_a_gpu() {
    let dtypes = Dtype::all().filter(|dtype| dtype.scalar_type().is_some());
    let tensors: Vec<(Dtype, &[u64])> = dtypes.map(|dtype| (dtype, &[31, 36][..])).collect();
    let models = [Model::new(&tensors), megabyte_model()];
    for reader in [ReaderChoice::Mmap, ReaderChoice::Pread, ReaderChoice::Uring, ReaderChoice::Auto] {
        for chunk_bytes in [4 << 10, 1 << 20] {
            let options = Options { reader, chunk_bytes, staging_bytes: 2 << 20, ..TIGHT };
            for (sim, model) in schedules().take(2).zip(&models) {
                load_all(&Gpu::new(&sim, 0), model, &options);
            }
        }
    }
}

#[test]
fn callers_on_the_default_stream_or_another_device_keep_their_context() {
    let model = mixed_model();
    for sim in schedules() {
        let target = Gpu::with_default_stream(&sim, 1);
        let current = Gpu::new(&sim, 0);
        load_all(&target, &model, &TIGHT);
        assert_eq!(sim.cuda.current(), Ok(current.context));
    }
}

#[test]
fn loads_run_concurrently_to_two_devices() {
    let models = [mixed_model(), Model::new(&[(Dtype::F32, &[9000]), (Dtype::U8, &[5])])];
    for sim in schedules() {
        let _cufile = gds::start(&sim);
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let (sim, model) = (&sim, &models[worker / 2]);
                scope.spawn(move || {
                    let gpu = Gpu::new(sim, i32::try_from(worker % 2).unwrap());
                    ENGINES.iter().for_each(|options| load_all(&gpu, model, options));
                });
            }
        });
    }
}

#[test]
fn concurrent_loads_share_one_bound_without_deadlock() {
    let model = megabyte_model();
    for (slots, sim) in [1, 2, 5].into_iter().zip(schedules()) {
        let options = Options { staging_bytes: slots * TIGHT.chunk_bytes, ..TIGHT };
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let (sim, model, options) = (&sim, &model, &options);
                scope.spawn(move || load_all(&Gpu::new(sim, worker % 2), model, options));
            }
        });
        let peak = usize::try_from(sim.counters().registered_bytes_peak).unwrap();
        assert!(peak <= options.staging_bytes, "{peak} bytes pinned");
    }
}

#[test]
fn one_transfer_uses_the_same_memory_repeatedly() {
    let model = Model::new(&[(Dtype::F32, &[2000]), (Dtype::F32, &[5000]), (Dtype::F32, &[3000])]);
    for (options, sim) in ENGINES.into_iter().cycle().zip(schedules()) {
        let _cufile = gds::start(&sim);
        let gpu = Gpu::new(&sim, 0);
        let mut load = Load::all(&gpu, &model);
        let block = gpu.allocate(20_000);
        load.blocks = vec![block; 3];
        let mut transfer = load.open(options).unwrap();
        for (destination, tensor) in load.destinations().into_iter().zip(&model.tensors) {
            load.fill(&mut transfer, &[destination]).unwrap();
            assert!(gpu.read(block, tensor.bytes.len()) == tensor.bytes);
            // The caller's next use of the block is still queued when the next batch begins.
            sim.launch_read(gpu.stream, block, tensor.bytes.len()).unwrap();
        }
        transfer.finish().unwrap();
    }
}

#[test]
fn a_device_without_other_users_opens_and_closes() {
    for at in 0.. {
        let sim = Sim::start(at);
        sim.inject(Fault::OutOfMemory, at);
        let opened = Cuda::open(0, 0);
        // Every failure is reported.
        assert_eq!(opened.is_err(), sim.counters().faults > 0);
        let is_over = at > 0 && opened.is_ok();
        drop(opened);
        assert_eq!(sim.cuda.current(), Ok(0));
        if is_over {
            // At least a context and two streams were refused.
            assert!(at > 3);
            break;
        }
    }
}

#[test]
fn kept_memory_outlives_its_users_and_is_released_on_request() {
    let sim = Sim::start(0);
    let request = Request { bytes: PAGE_BYTES, node: None, staging_bytes: 4 * PAGE_BYTES };
    let staging = Staging::new(Arc::new(Cuda::open(0, 0).unwrap()), 2, request);
    let slots = [(); 2].map(|()| staging.acquire(1, &|| Ok(())).unwrap());
    assert_eq!(sim.counters().registered_bytes, 2 * PAGE_BYTES as u64);
    // One slot is still in use, and only it retains the context.
    let [used, unused] = slots;
    drop((staging, unused));
    device::release();
    assert_eq!(pool::release(&|| Ok(())).unwrap(), PAGE_BYTES);
    assert_eq!(sim.counters().registered_bytes, PAGE_BYTES as u64);
    drop(used);
    assert_eq!(pool::release(&|| Ok(())).unwrap(), PAGE_BYTES);
    assert_eq!(pool::release(&|| Ok(())).unwrap(), 0);
    sim.finish().assert_clean();
}

#[test]
fn a_dropped_transfer_leaves_no_resource() {
    let model = mixed_model();
    for sim in schedules() {
        let gpu = Gpu::new(&sim, 0);
        let load = Load::all(&gpu, &model);
        let mut transfer = load.open(TIGHT).unwrap();
        load.fill(&mut transfer, &load.destinations()).unwrap();
        drop(transfer);
        load.assert_holds(&model);
        drop(load.open(TIGHT).unwrap());
    }
}

/// Returns the spans of a trace with this name: process, row, begin and end in microseconds.
fn spans_of(trace: &Value, name: &str) -> Vec<(i64, i64, f64, f64)> {
    let events = trace["traceEvents"].as_array().unwrap().iter();
    let spans = events.filter(|event| event["ph"] == "X" && event["name"] == name);
    spans
        .map(|event| {
            let (begin, length) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
            (event["pid"].as_i64().unwrap(), event["tid"].as_i64().unwrap(), begin, begin + length)
        })
        .collect()
}

#[test]
fn a_profile_records_the_work_of_the_gpu() {
    let model = mixed_model();
    for sim in schedules() {
        let gpu = Gpu::new(&sim, 0);
        let load = Load::all(&gpu, &model);
        let before = sim.counters();
        let profile = profile::start();
        load.run(TIGHT).unwrap();
        let trace: Value = serde_json::from_str(&profile::stop(profile).unwrap()).unwrap();
        let after = sim.counters();
        load.assert_holds(&model);

        let facts = &trace["otherData"];
        let stages = facts["stages"].as_array().unwrap();
        let total = |stage: &str, what: &str| {
            stages.iter().find(|total| total["stage"] == stage).map_or(0, |total| total[what].as_u64().unwrap())
        };
        assert_eq!(facts["copies"], after.copies - before.copies);
        assert_eq!(facts["launches"], after.launches - before.launches);
        assert_eq!(total("pin", "spans"), after.registrations - before.registrations);
        assert_eq!(total("copy", "bytes"), after.copied_bytes - before.copied_bytes);

        let (queued, copies, waits) = (spans_of(&trace, "queue"), spans_of(&trace, "copy"), spans_of(&trace, "wait"));
        assert!(copies.len() == queued.len() && !waits.is_empty(), "{copies:?} {queued:?} {waits:?}");
        // No work runs before it is queued. The clock of a GPU is accurate to a microsecond.
        assert!(copies.iter().all(|copy| copy.2 + 1.0 >= queued[0].2), "{copies:?} {queued:?}");
        let mut work = [copies, spans_of(&trace, "kernel")].concat();
        work.sort_by(|a, b| (a.1, a.2).partial_cmp(&(b.1, b.2)).unwrap());
        assert!(work.iter().all(|&(process, row, begin, end)| process == 3 && row < 2 && begin <= end), "{work:?}");
        let overlap = |pair: &&[(i64, i64, f64, f64)]| pair[0].1 == pair[1].1 && pair[0].3 > pair[1].2 + 1.0;
        assert_eq!(work.windows(2).find(overlap), None);
    }
}
