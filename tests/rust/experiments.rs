//! Switches of experiments: each changes what it says. A process reads them once, so each value has its own process.

use crate::gpu_load::Load;
use crate::model::Model;
use crate::sim::gpu::Gpu;
use crate::sim::{Sim, TIGHT};
use crate::smaps::mappings;
use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::TensorRegion;
use fst::device::CopyInFlight;
use fst::device::cuda::Cuda;
use fst::dtype::Dtype;
use fst::error::Result;
use fst::format::layout::{Layout, Tensor};
use fst::load::background::BackgroundTransfer;
use fst::load::staged;
use fst::load::transfer::Transfer;
use fst::options::{Options, ReaderChoice};
use fst::plan::Chunk;
use fst::staging::Block;
use std::cell::Cell;
use std::fs::OpenOptions;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const NAME: &str = "FST_EXPERIMENTS";
const OPTIONS: Options = Options {
    reader: ReaderChoice::Pread,
    chunk_bytes: 4 << 20,
    request_bytes: 4 << 20,
    staging_bytes: 256 << 20,
    threads: 4,
    ..TIGHT
};

/// Copy that is done when it has been queried several times.
struct Queried(Cell<u32>);

impl CopyInFlight for Queried {
    fn is_done(&self) -> Result<bool> {
        self.0.set(self.0.get() + 1);
        Ok(self.0.get() == 6)
    }
}

/// Returns the number of tensors in each window of a load of 40 tensors of 8 MiB, and the number of slots that were pinned
/// when it was open.
fn windows(gpu: &Gpu<'_>, sim: &Sim) -> (Vec<usize>, u64) {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("x.safetensors");
    let tensors: Vec<Tensor> =
        (0..40).map(|index| Tensor::new(format!("t{index:02}"), Dtype::U8, vec![8 << 20]).unwrap()).collect();
    let layout = Layout::new(&tensors, &None).unwrap();
    std::fs::write(&path, layout.header()).unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(layout.file_bytes()).unwrap();
    let checkpoint = Checkpoint::open(&[&path]).unwrap();
    let regions: Arc<[TensorRegion]> =
        checkpoint.entries().map(|(file, entry)| TensorRegion::whole(file, entry)).collect::<Result<_>>().unwrap();
    let cuda = Arc::new(Cuda::open(0, gpu.stream as u64).unwrap());
    let (threads, begin) = (thread_count(), Instant::now());
    let transfer = Transfer::open(&checkpoint, regions, cuda, OPTIONS).unwrap();
    // A thread pins the slots, and ends.
    while thread_count() > threads && begin.elapsed() < Duration::from_secs(10) {
        thread::sleep(Duration::from_millis(1));
    }
    let pinned = sim.counters().live_registrations;
    let order: Vec<usize> = (0..40).collect();
    let ends = BackgroundTransfer::new(transfer, &checkpoint).window_ends(&order);
    ([0].iter().chain(&ends).zip(&ends).map(|(begin, end)| end - begin).collect(), pinned)
}

/// Returns what the switches of this process change.
fn found() -> String {
    let begin = Instant::now();
    Queried(Cell::new(0)).wait(&|| Ok(())).unwrap();
    let waited_ms = begin.elapsed().as_millis();
    let is_huge = {
        let block = Block::allocate(4 << 20, None).unwrap();
        let address = block.as_ref().as_ptr().addr() as u64;
        let all = mappings();
        let mapping = all.iter().find(|mapping| mapping.addresses.contains(&address)).unwrap();
        mapping.words("VmFlags").contains(&"hg")
    };
    let sim = Sim::start(0);
    let gpu = Gpu::new(&sim, 0);
    staged::warm_up(&Cuda::open(0, gpu.stream as u64).unwrap(), &OPTIONS).unwrap();
    let slots = sim.counters().live_registrations;
    crate::sim::release();
    // Twenty-four megabytes in one tensor, so that its chunks need no kernel.
    let model = Model::new(&[(Dtype::U8, &[24 << 20])]);
    let load = Load::all(&gpu, &model);
    let chunks = load.open(OPTIONS).unwrap().planner().prepare(&load.destinations()).unwrap();
    let first: Vec<usize> = chunks.chunks().iter().map(kib_of).take(4).collect();
    // Without the switch, other tests load such chunks.
    for _ in 0..if first[0] == 512 { 2 } else { 0 } {
        load.run(OPTIONS).unwrap();
        load.assert_holds(&model);
    }
    crate::sim::release();
    let (windows, ahead) = windows(&gpu, &sim);
    format!(
        "slots {slots} chunks {first:?} windows {windows:?} waited {} huge {is_huge} ahead {ahead} ",
        waited_ms >= 100
    )
}

fn thread_count() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Runs this program in a process with switches, and returns whether it passed, and its output.
fn run_with(switches: &str, arguments: &[&str]) -> (bool, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(arguments).arg("--test-threads=1").env(NAME, switches).output().unwrap();
    (output.status.success(), String::from_utf8(output.stdout).unwrap())
}

/// Errors, interrupts, bounds and ends of loads, with slots that a thread pins meanwhile.
#[test]
fn loads_whose_slots_are_pinned_ahead_pass_other_tests() {
    let tests = [
        "background::a_fault_at_any_call_is_a_clean_error",
        "background::destinations_may_be_freed_after_the_transfer_is_dropped",
        "background::an_interrupt_ends_the_thread",
        "interrupts::an_interrupt_ends_every_wait_for_a_busy_gpu",
        "pipeline::a_dropped_transfer_leaves_no_resource",
        "pipeline::concurrent_loads_share_one_bound_without_deadlock",
        "pipeline::loads_work_without_pinned_memory_and_without_kernels",
    ];
    let (has_passed, text) = run_with("pin_ahead=3", &[&["--exact"][..], &tests].concat());
    assert!(has_passed && text.contains(&format!("{} passed", tests.len())), "{text}");
}

fn kib_of(chunk: &Chunk) -> usize {
    match chunk {
        Chunk::Staged { bytes, .. } => bytes >> 10,
        Chunk::InPlace { .. } => 0,
    }
}

#[test]
fn each_switch_changes_what_it_says() {
    let is_child = std::env::var_os(NAME).is_some();
    if is_child {
        match Options::from_env() {
            Ok(_) => println!("found {}", found()),
            Err(error) => println!("found {:?} {error}", error.kind()),
        }
        return;
    }
    // Chunks leave a sixteenth of a slot for the table of a kernel.
    let full = if fst::device::cuda::kernels::IMAGE.is_some() { 3840 } else { 4096 };
    let base = ["slots 4".to_owned(), format!("chunks {:?}", [full; 4]), "windows [40]".into(), "waited false".into()];
    let ramp = format!("chunks {:?}", [512, 1024, full - 1536, full]);
    for (setting, changed) in [
        ("workers_per_slot=1", "slots 7"),
        ("copies_ahead=4", "slots 6"),
        ("windows=4", "windows [10, 10, 10, 10]"),
        ("window_mib=20", "windows [3, 5, 10, 20, 2]"),
        ("first_chunk_kib=512", &ramp),
        ("query_us=20000", "waited true"),
        ("huge_pages=1", "huge true"),
        ("huge_pages=0", "huge false"),
        ("pin_ahead=2", "ahead 2 "),
        ("pin_ahead=0", "ahead 0 "),
        // The simulated GPU is no device of this machine.
        ("reader_node=1", "ahead 4 "),
        ("windows=2, query_us=50", "windows [20, 20]"),
        (
            "windows",
            "InvalidArgument [invalid-argument] FST_EXPERIMENTS has \"windows\"; it is a list of some of workers_per_slot=1..64",
        ),
    ] {
        let test = ["--exact", "experiments::each_switch_changes_what_it_says", "--nocapture"];
        let (has_passed, text) = run_with(setting, &test);
        assert!(has_passed && text.contains(changed), "{setting}: {text}");
        // All else is as without the switch.
        let word = |text: &str| text.split(' ').next().unwrap_or_default().to_owned();
        let others = base.iter().filter(|part| word(part) != word(changed) && !changed.starts_with("Invalid"));
        others.for_each(|part| assert!(text.contains(part.as_str()), "{setting}: {part}: {text}"));
    }
}
