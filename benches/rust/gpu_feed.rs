//! Measures the host's part of loads to a GPU and of saves from one, on a driver whose work is done at once.
//!
//! ```text
//! cargo bench --bench gpu_feed -- tensors [directory]    CPU time per small tensor and calls of the driver
//! cargo bench --bench gpu_feed -- bytes [directory]      GB per second of CPU by chunk size and slots, beside memcpy
//! ```
//!
//! The driver is that of tests/nullcuda. Destinations are addresses that nothing accesses.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "a failure ends the benchmark")]
#![allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "figures are printed")]

use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::TensorRegion;
use fst::checkpoint::selection::Selection;
use fst::device::cuda::Cuda;
use fst::device::{self, Scratch};
use fst::dtype::Dtype;
use fst::format::layout::{Layout, Tensor};
use fst::load::stream::{Order, Stream};
use fst::load::transfer::Transfer;
use fst::options::{Options, ReaderChoice};
use fst::plan::Destination;
use fst::save::atomic_file::OutputFile;
use fst::save::file_kernel::Linux;
use fst::save::memory::SourceMemory;
use fst::save::{DeviceStream, Extent, Save};
use fst::staging::pool;
use libloading::Library;
use rustix::time::{ClockId, clock_gettime};
use std::fs::File;
use std::hint::black_box;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const RUNS: usize = 5;
/// First address of the destinations, which no process can map.
const DEVICE_BASE: u64 = 0x00D0_0000_0000_0000;
/// Number and size of the small tensors: those of a mixture of experts, and a typical scale.
const SMALL_COUNT: usize = 18_867;
const SMALL_BYTES: u64 = 4096;
const CHUNKS: [usize; 6] = [256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20];
const SLOTS: [usize; 3] = [1, 2, 8];

/// Null driver, in the place of libcuda.
struct Driver {
    calls: unsafe extern "C" fn() -> u64,
    finish_at_once: unsafe extern "C" fn(bool),
}

impl Driver {
    /// Must be called before any code opens libcuda.
    fn open() -> Driver {
        let program = std::env::current_exe().unwrap();
        let path = program.parent().unwrap().join("libfst_nullcuda.so");
        // SAFETY: the library has no initializers, and the types match.
        unsafe {
            let library = Box::leak(Box::new(Library::new(&path).unwrap()));
            Driver {
                calls: *library.get(b"null_calls").unwrap(),
                finish_at_once: *library.get(b"null_finish_at_once").unwrap(),
            }
        }
    }

    fn calls(&self) -> u64 {
        // SAFETY: the function has no preconditions.
        unsafe { (self.calls)() }
    }

    fn finish_at_once(&self, finishes: bool) {
        // SAFETY: the function has no preconditions.
        unsafe { (self.finish_at_once)(finishes) }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let directory = arguments.get(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let driver = Driver::open();
    match arguments.first().map(String::as_str) {
        Some("tensors") => tensors(&driver, &directory),
        Some("bytes") => bytes(&directory),
        _ => println!("usage: cargo bench --bench gpu_feed -- tensors|bytes [directory]"),
    }
}

/// Seconds of the CPU that this process has used.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Lays out a file of tensors of these sizes.
fn layout_of(sizes: &[u64]) -> Layout {
    let tensor = |(index, &size): (usize, &u64)| {
        Tensor::new(format!("layers.{index:06}.weight"), Dtype::U8, vec![size]).unwrap()
    };
    Layout::new(&sizes.iter().enumerate().map(tensor).collect::<Vec<_>>(), &None).unwrap()
}

fn write_file(path: &Path, sizes: &[u64]) {
    let layout = layout_of(sizes);
    let mut file = File::create(path).unwrap();
    file.write_all(layout.header()).unwrap();
    let block = vec![7; 1 << 20];
    let mut left = layout.file_bytes() - layout.header().len() as u64;
    while left > 0 {
        let length = left.min(block.len() as u64);
        file.write_all(&block[..length as usize]).unwrap();
        left -= length;
    }
    file.sync_all().unwrap();
}

fn destinations(regions: &[TensorRegion]) -> Vec<Destination> {
    let destination = |(tensor, region): (usize, &TensorRegion)| {
        let address = DEVICE_BASE + region.range.begin.next_multiple_of(512);
        Destination { tensor, begin: 0, end: region.bytes(), address, cast: None }
    };
    regions.iter().enumerate().map(destination).collect()
}

fn scratch(bytes: usize) -> Scratch {
    Scratch { address: DEVICE_BASE >> 1, bytes: bytes as u64 }
}

/// Loads a selection as C++ does.
fn load(selection: &Selection, options: Options) {
    let regions = selection.regions();
    let cuda = Arc::new(Cuda::open(0, 0).unwrap());
    let mut transfer = Transfer::open(selection.checkpoint(), Arc::clone(regions), cuda, options).unwrap();
    let batch = transfer.planner().prepare(&destinations(regions)).unwrap();
    let scratch = scratch(batch.scratch_bytes());
    // SAFETY: the null driver accesses no memory.
    unsafe { transfer.fill(&batch, scratch) }.unwrap();
    transfer.finish().unwrap();
}

fn load_one_by_one(checkpoint: &Arc<Checkpoint>, names: &[String]) {
    for name in names {
        let selection = Selection::named(checkpoint, std::slice::from_ref(name)).unwrap();
        load(&selection, Options::from_env().unwrap());
    }
}

fn stream(checkpoint: &Arc<Checkpoint>) {
    let selection = Selection::all(checkpoint).unwrap();
    let regions = selection.regions();
    let cuda = Arc::new(Cuda::open(0, 0).unwrap());
    let stream =
        Stream::open(checkpoint, Arc::clone(regions), cuda, Options::from_env().unwrap(), Order::Submitted).unwrap();
    let batch = stream.planner().prepare(&destinations(regions)).unwrap();
    let scratch = scratch(batch.scratch_bytes());
    let tensors: Vec<usize> = (0..regions.len()).collect();
    // SAFETY: the null driver accesses no memory.
    unsafe {
        stream.set_scratch(scratch);
        stream.submit(&tensors, batch)
    }
    .unwrap();
    for _ in &tensors {
        // As C++ does before each tensor.
        stream.set_stream(0).unwrap();
        stream.take().unwrap();
    }
    stream.finish().unwrap();
}

fn save(sizes: &[u64], path: &Path) {
    let memory: Arc<dyn SourceMemory> = Arc::new(Cuda::open(0, 0).unwrap());
    let extents: Vec<Extent> = sizes
        .iter()
        .enumerate()
        .map(|(index, &length)| Extent { device: 0, address: DEVICE_BASE + index as u64 * 8192, length })
        .collect();
    let output = OutputFile::create(path, Box::new(Linux)).unwrap();
    let streams = vec![DeviceStream { memory, stream: 0 }];
    let mut save = Save::begin(layout_of(sizes), output, streams, &Options::from_env().unwrap()).unwrap();
    let scratch: Vec<Scratch> = save.scratch_bytes(&extents).into_iter().map(scratch).collect();
    // SAFETY: the null driver accesses no memory.
    unsafe { save.append(&extents, &scratch) }.unwrap();
    save.finish().unwrap();
}

/// Prints CPU microseconds and driver calls per tensor.
fn tensors(driver: &Driver, directory: &Path) {
    driver.finish_at_once(true);
    let path = directory.join("gpu_feed_small.safetensors");
    let sizes = vec![SMALL_BYTES; SMALL_COUNT];
    write_file(&path, &sizes);
    let checkpoint = Arc::new(Checkpoint::open(&[&path]).unwrap());
    let names: Vec<String> = checkpoint.entries().take(1000).map(|(_, entry)| entry.name.to_string()).collect();
    println!("{:44} {:>12} {:>14}", "", "us of CPU", "driver calls");
    let report = |what: &str, count: usize, run: &dyn Fn()| {
        let mut calls = 0;
        let times = (0..RUNS).map(|_| {
            let (begin, calls_before) = (cpu_seconds(), driver.calls());
            run();
            calls = driver.calls() - calls_before;
            (cpu_seconds() - begin) * 1e6 / count as f64
        });
        let time = median(times.collect());
        println!("{what:44} {time:12.2} {:14.3}", calls as f64 / count as f64);
    };
    report("a load of one tensor of 4 KiB", names.len(), &|| load_one_by_one(&checkpoint, &names));
    report("a streamed tensor of 4 KiB", SMALL_COUNT, &|| stream(&checkpoint));
    let all = Selection::all(&checkpoint).unwrap();
    report("a tensor of 4 KiB of one load", SMALL_COUNT, &|| load(&all, Options::from_env().unwrap()));
    let target = directory.join("gpu_feed_saved.safetensors");
    report("a saved tensor of 4 KiB", SMALL_COUNT, &|| save(&sizes, &target));
    report("a first load, after release_memory", 1, &|| {
        device::release();
        pool::release();
        load_one_by_one(&checkpoint, &names[..1]);
    });
    std::fs::remove_file(path).unwrap();
    std::fs::remove_file(target).unwrap();
}

/// Prints the GB that one second of the CPU feeds, by chunk size and number of slots.
fn bytes(directory: &Path) {
    let path = directory.join("gpu_feed_large.safetensors");
    write_file(&path, &[64 << 20; 8]);
    let checkpoint = Arc::new(Checkpoint::open(&[&path]).unwrap());
    let all = Selection::all(&checkpoint).unwrap();
    let total: u64 = all.regions().iter().map(TensorRegion::bytes).sum();
    println!("GB per second of CPU; memcpy copies as much memory to as many slots");
    println!("{:>9} {:>6} {:>8} {:>8} {:>8}", "chunk KiB", "slots", "memcpy", "cached", "direct");
    for chunk_bytes in CHUNKS {
        for slots in SLOTS {
            pool::release();
            // One thread has two slots.
            let threads = slots.div_ceil(2);
            let options = Options { chunk_bytes, staging_bytes: slots * chunk_bytes, threads, ..Options::default() };
            print!("{:9} {slots:6} {:8.2}", chunk_bytes >> 10, memcpy_rate(total as usize, chunk_bytes, slots));
            for reader in [ReaderChoice::Pread, ReaderChoice::Uring] {
                let options = Options { reader, ..options.clone() };
                print!(" {:8.2}", cpu_rate(total, || load(&all, options.clone())));
            }
            println!();
        }
    }
    std::fs::remove_file(path).unwrap();
}

/// Returns the GB per second of CPU at which `run` moves `total` bytes.
fn cpu_rate(total: u64, mut run: impl FnMut()) -> f64 {
    let times = (0..RUNS).map(|_| {
        let begin = cpu_seconds();
        run();
        cpu_seconds() - begin
    });
    total as f64 / median(times.collect()) / 1e9
}

/// Returns the rate of copies of `total` bytes of memory, chunk by chunk, to slots in turn.
fn memcpy_rate(total: usize, chunk_bytes: usize, slots: usize) -> f64 {
    let source = vec![1_u8; total];
    let mut targets = vec![vec![2_u8; chunk_bytes]; slots];
    cpu_rate(total as u64, || {
        for (index, chunk) in source.chunks(chunk_bytes).enumerate() {
            targets[index % slots][..chunk.len()].copy_from_slice(chunk);
            black_box(&mut targets);
        }
    })
}
