//! Shows where the time of a load to a GPU goes, without a GPU: real loads on a driver that takes the time of an H100.
//!
//! ```text
//! cargo bench --bench gpu_model -- [timeline] [designs] [set=stream] [dense] [moe] [adapter] [sizes] [rounds=5] [scale=11]
//! cargo bench --bench gpu_model -- [slots=20] [prepared] [ranks=8] [malloc_us=22] ...
//! ```
//!
//! `designs` compares designs by their worst set of parameters. The second line has changes: fewer slots, slots that are pinned before the load, processes that load at once with one lock of the driver, other parameters.
//!
//! The driver and the reads come from tests/nullcuda/src/model.rs, with the parameters of benches/h100.toml. Time is
//! stretched, so that the CPU's part of fst, which is not, is small beside it. docs/decisions/gpu-model.md has the results.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "a failure ends the benchmark")]
#![allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "figures")]

#[path = "gpu_model/designs.rs"]
mod designs;
#[path = "gpu_model/driver.rs"]
mod driver;
#[path = "gpu_model/report.rs"]
mod report;

use driver::{IS_MODELLED, driver, malloc, now, spend};
use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::TensorRegion;
use fst::checkpoint::selection::Selection;
use fst::device::cuda::Cuda;
use fst::device::{self, Scratch};
use fst::dtype::Dtype;
use fst::format::layout::{Layout, Tensor};
use fst::load::background::BackgroundTransfer;
use fst::load::transfer::Transfer;
use fst::options::{Options, ReaderChoice};
use fst::plan::Destination;
use fst::staging::pool;
use fst_nullcuda::model::{Costs, Span};
use memmap2::MmapRaw;
use report::{print_head, print_row, print_timeline};
use rustix::time::{ClockId, clock_gettime};
use std::fs::File;
use std::io::Write;
use std::iter;
use std::mem;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// First address of the destinations, which no process can map.
const DEVICE_BASE: u64 = 0x00D0_0000_0000_0000;
/// Sets of parameters that are compared by default.
const SETS: [&str; 4] = ["stream", "event", "copy", "reads"];
/// Chunk sizes and their measured rates in GB/s.
const SIZES: [(usize, f64); 6] =
    [(256 << 10, 14.7), (512 << 10, 24.0), (1 << 20, 35.0), (2 << 20, 43.4), (4 << 20, 43.7), (8 << 20, 37.5)];
/// Threads that read, as on the machine.
const THREADS: usize = 16;

/// Arguments of the program.
struct Arguments {
    sets: Vec<String>,
    loads: Vec<String>,
    slots: Option<usize>,
    rounds: usize,
    scale: f64,
    has_timeline: bool,
    has_designs: bool,
    /// Whether only times are printed.
    is_plain: bool,
    chunk_mib: Option<usize>,
    is_prepared: bool,
    ranks: usize,
    /// Memory that the ranks share, in the process of one.
    shared: Option<Shared>,
    costs: Vec<(String, f64)>,
}

impl Arguments {
    fn parse() -> Arguments {
        let mut parsed = Arguments {
            sets: Vec::new(),
            loads: Vec::new(),
            slots: None,
            rounds: 5,
            scale: 11.0,
            has_timeline: false,
            has_designs: false,
            is_plain: false,
            chunk_mib: None,
            is_prepared: false,
            ranks: 1,
            shared: None,
            costs: Vec::new(),
        };
        for argument in std::env::args().skip(1).filter(|argument| argument != "--bench") {
            match argument.split_once('=') {
                Some(("set", value)) => parsed.sets.push(value.into()),
                Some(("slots", value)) => parsed.slots = Some(value.parse().unwrap()),
                Some(("chunk_mib", value)) => parsed.chunk_mib = Some(value.parse().unwrap()),
                Some(("rounds", value)) => parsed.rounds = value.parse().unwrap(),
                Some(("scale", value)) => parsed.scale = value.parse().unwrap(),
                Some(("ranks", value)) => parsed.ranks = value.parse().unwrap(),
                Some(("shared", value)) => parsed.shared = Some(Shared::open(Path::new(value))),
                Some((name, value)) => parsed.costs.push((name.into(), value.parse().unwrap())),
                None if argument == "designs" => parsed.has_designs = true,
                None if argument == "plain" => parsed.is_plain = true,
                None if argument == "timeline" => parsed.has_timeline = true,
                None if argument == "prepared" => parsed.is_prepared = true,
                None => parsed.loads.push(argument),
            }
        }
        if parsed.sets.is_empty() {
            parsed.sets = if parsed.has_designs {
                designs::SETS.map(String::from).to_vec()
            } else {
                SETS.map(String::from).to_vec()
            };
        }
        if parsed.loads.is_empty() {
            parsed.loads = ["dense", "moe", "adapter", "sizes"].map(String::from).to_vec();
        }
        parsed
    }
}

/// Memory that the processes of all ranks map: the driver's lock, the host's memory, and the number of ranks that have come
/// to a barrier.
struct Shared(MmapRaw);

impl Shared {
    fn open(path: &Path) -> Shared {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let shared = Shared(MmapRaw::map_raw(&file).unwrap());
        // SAFETY: the memory stays mapped as long as the program uses the driver.
        unsafe { (driver().share)(shared.0.as_mut_ptr().cast()) };
        shared
    }

    /// Waits until all ranks have called this function as often.
    fn wait(&self, ranks: usize) {
        // SAFETY: the file has three counters.
        let arrived = unsafe { &*self.0.as_ptr().cast::<AtomicU64>().add(2) };
        let all = (arrived.fetch_add(1, Ordering::AcqRel) / ranks as u64 + 1) * ranks as u64;
        while arrived.load(Ordering::Acquire) < all {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Runs the loads in a process for each rank, all at once, and prints the time of the slowest rank.
fn run_ranks(arguments: &Arguments, directory: &Path) {
    println!("load                         ms, slowest of {} ranks, and the fastest", arguments.ranks);
    for set in &arguments.sets {
        for load in &arguments.loads {
            let shared = directory.join("shared");
            std::fs::write(&shared, [0; 24]).unwrap();
            let rank = |_| {
                let mut command = Command::new(std::env::current_exe().unwrap());
                let same = std::env::args().skip(1).filter(|argument| argument.contains('=') || argument == "prepared");
                command.args(same).args([
                    load,
                    "plain",
                    &format!("set={set}"),
                    &format!("shared={}", shared.display()),
                ]);
                command.stdout(Stdio::piped()).spawn().unwrap()
            };
            let ranks: Vec<Child> = (0..arguments.ranks).map(rank).collect();
            let times = ranks.into_iter().map(|rank| {
                let output = rank.wait_with_output().unwrap().stdout;
                let time = |line: &str| line.split_whitespace().map(|ms| ms.parse().unwrap()).collect();
                String::from_utf8(output).unwrap().lines().map(time).collect()
            });
            // Times of each round, first and second, of each rank.
            let times: Vec<Vec<Vec<f64>>> = times.collect();
            for (index, name) in ["first", "second"].iter().enumerate() {
                let mut rounds: Vec<(f64, f64)> = (0..arguments.rounds)
                    .map(|round| {
                        let times = times.iter().map(|rank| rank[round][index]);
                        (times.clone().fold(0.0, f64::max), times.fold(f64::MAX, f64::min))
                    })
                    .collect();
                rounds.sort_by(|one, other| one.0.total_cmp(&other.0));
                let (slowest, fastest) = rounds[rounds.len() / 2];
                println!("{set} {:24} {slowest:6.1} {fastest:6.1}", format!("{load}, {name}"));
            }
        }
    }
}

/// Returns the parameters that no section names, changed by some sections and arguments.
fn costs(arguments: &Arguments, sections: &[&str]) -> Costs {
    let text = include_str!("../h100.toml");
    let mut costs = Costs { scale: arguments.scale, ..Costs::default() };
    let mut is_used = true;
    for line in text.lines().map(|line| line.split('#').next().unwrap().trim()).filter(|line| !line.is_empty()) {
        if let Some(section) = line.strip_prefix('[') {
            is_used = sections.contains(&section.trim_end_matches(']'));
        } else if is_used {
            let (name, value) = line.split_once('=').unwrap();
            let cost = costs.by_name(name.trim()).unwrap_or_else(|| panic!("no parameter {name}"));
            *cost = value.trim().parse().unwrap();
        }
    }
    for (name, value) in &arguments.costs {
        *costs.by_name(name).unwrap_or_else(|| panic!("no parameter {name}")) = *value;
    }
    costs
}

/// Sizes of the tensors of a workload of fst_bench, in bytes.
fn sizes(load: &str) -> Vec<u64> {
    match load {
        "adapter" => [16_384, 24_576].repeat(250),
        "dense" | "sizes" => {
            let layer =
                [8192, 33_554_432, 8_388_608, 8_388_608, 33_554_432, 8192, 117_440_512, 117_440_512, 117_440_512];
            [&[140_509_184][..], &layer.repeat(4), &[8192, 140_509_184]].concat()
        }
        "moe" => {
            let attention = [768, 786_432, 98_304, 98_304, 786_432, 64, 64, 768, 98_304];
            let layer = [&attention[..], &[110_592; 3 * 128]].concat();
            [&[21_884_928][..], &layer.repeat(48), &[768, 21_884_928]].concat()
        }
        _ => panic!("no load {load}"),
    }
}

/// Writes a file with names and shapes as models have them, and holes.
fn write_file(path: &Path, sizes: &[u64]) {
    let tensor = |(index, bytes): (usize, &u64)| {
        let name = format!("model.layers.{:02}.mlp.experts.{}.gate_proj.weight", index / 400, index % 400);
        Tensor::new(name, Dtype::BF16, vec![bytes / 64, 32]).unwrap()
    };
    let tensors: Vec<Tensor> = sizes.iter().enumerate().map(tensor).collect();
    let layout = Layout::new(&tensors, &None).unwrap();
    let mut file = File::create(path).unwrap();
    file.write_all(layout.header()).unwrap();
    file.set_len(layout.file_bytes()).unwrap();
}

fn cpu_seconds(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Serial phases of fst, which are stretched as if they were part of the model.
struct Serial {
    costs: Costs,
    /// CPU time of the phases.
    cpu_seconds: f64,
}

impl Serial {
    /// Runs a phase.
    fn run<T>(&mut self, phase: impl FnOnce() -> T) -> T {
        let begin = cpu_seconds(ClockId::ThreadCPUTime);
        let result = phase();
        let seconds = cpu_seconds(ClockId::ThreadCPUTime) - begin;
        spend(seconds * 1e6 * (1.0 - 1.0 / self.costs.scale));
        self.cpu_seconds += seconds;
        result
    }
}

/// PyTorch's caching allocator, as far as it calls `cudaMalloc`: segments of 2 MiB for blocks up to 1 MiB, of 20 MiB for
/// blocks up to 10 MiB, and one for each other.
#[derive(Default)]
struct Allocator {
    small_left: u64,
    large_left: u64,
}

impl Allocator {
    /// Allocates a block. Returns whether this takes a call of `cudaMalloc`.
    fn needs_segment(&mut self, bytes: u64) -> bool {
        let bytes = bytes.next_multiple_of(512);
        let (left, segment_bytes) = match bytes {
            0 => return false,
            1..=0x10_0000 => (&mut self.small_left, 2 << 20),
            0x10_0001..0xA0_0000 => (&mut self.large_left, 20 << 20),
            _ => (&mut 0, bytes),
        };
        let needs_segment = *left < bytes;
        if needs_segment {
            *left = segment_bytes;
        }
        *left -= bytes;
        needs_segment
    }
}

/// A load and what it did.
struct Run {
    ms: f64,
    /// CPU time of fst and the model outside of the phases that are stretched, in milliseconds.
    cpu_ms: f64,
    begin: u64,
    end: u64,
    spans: Vec<Span>,
    chunks: usize,
    costs: Costs,
}

/// Loads a file as csrc/load.cpp does, with its calls of PyTorch. `is_first`: the allocator has no blocks.
fn load(path: &Path, options: &Options, costs: Costs, is_first: bool) -> Run {
    // SAFETY: the pointer is valid.
    unsafe { (driver().start)(&raw const costs) };
    let (begin, cpu_begin) = (now(), cpu_seconds(ClockId::ProcessCPUTime));
    let mut serial = Serial { costs, cpu_seconds: 0.0 };
    spend(costs.load_us);
    let selection = serial.run(|| Selection::all(&Arc::new(Checkpoint::open(&[path]).unwrap())).unwrap());
    let mut allocator = is_first.then(Allocator::default);
    let chunks = transfer(&selection, options, &mut serial, &mut allocator);
    IS_MODELLED.store(false, Ordering::Relaxed);
    spend(costs.result_us * selection.regions().len() as f64);
    let end = now();
    let cpu = cpu_seconds(ClockId::ProcessCPUTime) - cpu_begin - serial.cpu_seconds;
    let mut count = 0;
    // SAFETY: no thread of the load is left, so that the recording does not change.
    let spans = unsafe {
        (driver().stop)();
        std::slice::from_raw_parts((driver().spans)(&raw mut count), count).to_vec()
    };
    Run { ms: (end - begin) as f64 / 1e6 / costs.scale, cpu_ms: cpu * 1e3, begin, end, spans, chunks, costs }
}

/// Allocates tensors, as `at::empty` does.
fn allocate<'a>(regions: impl Iterator<Item = &'a TensorRegion>, costs: &Costs, allocator: &mut Option<Allocator>) {
    let mut empty_us = 0.0;
    for region in regions {
        empty_us += costs.empty_us;
        if allocator.as_mut().is_some_and(|allocator| allocator.needs_segment(region.bytes())) {
            spend(mem::take(&mut empty_us));
            malloc();
        }
    }
    spend(empty_us);
}

/// Allocates scratch memory of this size.
fn scratch(bytes: usize, allocator: &mut Option<Allocator>) -> Scratch {
    if allocator.as_mut().is_some_and(|allocator| allocator.needs_segment(bytes as u64)) {
        malloc();
    }
    Scratch { address: DEVICE_BASE >> 1, bytes: bytes as u64 }
}

fn destination(tensor: usize, region: &TensorRegion) -> Destination {
    let address = DEVICE_BASE + region.range.begin.next_multiple_of(512);
    Destination { tensor, begin: 0, end: region.bytes(), address, cast: None }
}

/// Allocates and fills all tensors, in one or more windows. Returns the number of chunks.
fn transfer(selection: &Selection, options: &Options, serial: &mut Serial, allocator: &mut Option<Allocator>) -> usize {
    let (checkpoint, regions) = (selection.checkpoint(), selection.regions());
    IS_MODELLED.store(true, Ordering::Relaxed);
    let mut transfer = serial.run(|| {
        let cuda = Arc::new(Cuda::open(0, 0).unwrap());
        let transfer = Transfer::open(checkpoint, Arc::clone(regions), cuda, options.clone()).unwrap();
        BackgroundTransfer::new(transfer, checkpoint)
    });
    let order = serial.run(|| selection.in_file_order());
    let ends = serial.run(|| transfer.window_ends(&order));
    let mut block = Scratch::default();
    let mut chunks = 0;
    for (begin, end) in iter::once(0).chain(ends.iter().copied()).zip(&ends) {
        let window = &order[begin..*end];
        allocate(window.iter().map(|&index| &regions[index]), &serial.costs, allocator);
        let batch = serial.run(|| {
            let destinations: Vec<Destination> =
                window.iter().map(|&index| destination(index, &regions[index])).collect();
            transfer.planner().prepare(&destinations).unwrap()
        });
        chunks += batch.chunks().len();
        if block.bytes < batch.scratch_bytes() as u64 {
            block = scratch(batch.scratch_bytes().next_power_of_two(), allocator);
        }
        // SAFETY: the driver accesses no memory.
        let done =
            unsafe { if ends.len() == 1 { transfer.fill(&batch, block) } else { transfer.submit(batch, block) } };
        done.unwrap();
    }
    transfer.finish().unwrap();
    chunks
}

/// Runs a load twice, as the first and the second one of a process.
fn load_twice(path: &Path, options: &Options, costs: Costs, arguments: &Arguments) -> [Run; 2] {
    device::release();
    pool::release(&|| Ok(())).unwrap();
    if arguments.is_prepared {
        load(path, options, costs, true);
    }
    [true, false].map(|is_first| {
        if let Some(shared) = &arguments.shared {
            shared.wait(arguments.ranks);
        }
        load(path, options, costs, is_first)
    })
}

fn main() {
    let arguments = Arguments::parse();
    // SAFETY: both concern this thread and those that it starts, which then wake up in time. A user may lack the right.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1);
        libc::sched_setscheduler(0, libc::SCHED_RR, &libc::sched_param { sched_priority: 1 });
    }
    let directory = std::env::temp_dir().join(format!("fst-gpu-model-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    if arguments.ranks > 1 && arguments.shared.is_none() {
        run_ranks(&arguments, &directory);
        return std::fs::remove_dir_all(directory).unwrap();
    }
    let file = |load: &str| -> (PathBuf, u64) {
        let (path, sizes) = (directory.join(load), sizes(load));
        write_file(&path, &sizes);
        (path, sizes.iter().sum())
    };
    if arguments.has_designs {
        let same: Vec<String> =
            std::env::args().skip(1).filter(|text| text.contains('=') && !text.starts_with("set=")).collect();
        for load in &arguments.loads {
            let bytes: u64 = sizes(load).iter().sum();
            designs::compare(load, &arguments.sets, &same, bytes as f64 / costs(&arguments, &[]).link_gbps / 1e6);
        }
        return std::fs::remove_dir_all(directory).unwrap();
    }
    let options = Options { reader: ReaderChoice::Pread, threads: THREADS, ..Options::default() };
    let options = Options { chunk_bytes: arguments.chunk_mib.map_or(options.chunk_bytes, |mib| mib << 20), ..options };
    for set in &arguments.sets {
        if !arguments.is_plain {
            print_head(set);
        }
        for load in &arguments.loads {
            let (path, bytes) = file(load);
            if load == "sizes" {
                for (chunk_bytes, rate) in SIZES {
                    let options = Options { chunk_bytes, ..options.clone() };
                    let costs = costs(&arguments, &[set, "tmpfs"]);
                    let second = (0..arguments.rounds.min(3))
                        .map(|_| load_twice(&path, &options, costs, &arguments))
                        .map(|[_, second]| second);
                    let name = format!("chunks of {} KiB", chunk_bytes >> 10);
                    print_row(&name, second.collect(), bytes as f64 / rate / 1e6, bytes);
                }
                continue;
            }
            let measured = match load.as_str() {
                "dense" => [75.55, 45.40],
                "moe" => [205.15, 122.25],
                _ => [7.54, 3.56],
            };
            let slots = arguments.slots.map_or(options.staging_bytes, |slots| slots * options.chunk_bytes);
            let options = Options { staging_bytes: slots, ..options.clone() };
            let costs = costs(&arguments, &[set]);
            let runs: Vec<[Run; 2]> =
                (0..arguments.rounds).map(|_| load_twice(&path, &options, costs, &arguments)).collect();
            if arguments.has_timeline {
                for (name, run) in ["first", "second"].iter().zip(runs.last().unwrap()) {
                    println!("{load}, {name} load:");
                    print_timeline(run);
                }
            }
            if arguments.is_plain {
                runs.iter().for_each(|[first, second]| println!("{} {}", first.ms, second.ms));
                continue;
            }
            let (first, second) = runs.into_iter().map(|[first, second]| (first, second)).unzip();
            print_row(&format!("{load}, first"), first, measured[0], bytes);
            print_row(&format!("{load}, second"), second, measured[1], bytes);
        }
    }
    std::fs::remove_dir_all(directory).unwrap();
}
