//! Output of the model: what the copy engine waited for, in total and by the millisecond.

use super::{Run, THREADS};
use fst_nullcuda::model::{Kind, Span};

/// Length of the steps in which a load is examined, in microseconds that are not stretched.
const STEP_US: f64 = 5.0;

/// States of the copy engine. It is idle while a ready chunk waits for the driver's lock (`l:`), held by a registration, a
/// `cudaMalloc`, the creation of a module, stream or event, or another call, and while no chunk is ready (`n:`), because of
/// such a call, of reads, or of the host.
pub const STATES: [&str; 12] =
    ["copy", "dead", "order", "l:pin", "l:mal", "l:new", "l:call", "n:pin", "n:mal", "n:new", "n:read", "n:host"];

/// State of a load in one step.
#[derive(Clone, Copy, Default)]
pub struct Step {
    /// Index into [`STATES`].
    state: usize,
    holder: Option<Kind>,
    /// Threads that wait for the driver's lock, those that read, and those that wait for an event.
    blocked: u16,
    reading: u16,
    waiting: u16,
    has_ready_chunk: bool,
    is_copying: bool,
    is_dead: bool,
    is_ordered: bool,
}

/// Returns what happened in each step of a load.
pub fn steps(run: &Run) -> Vec<Step> {
    let step_ns = STEP_US * 1e3 * run.costs.scale;
    let index = |time: u64| (time.saturating_sub(run.begin) as f64 / step_ns) as usize;
    let mut steps = vec![Step::default(); index(run.end) + 1];
    let mut mark = |begin: u64, end: u64, mark: &dyn Fn(&mut Step)| {
        let (from, to) = (index(begin), index(end).min(steps.len()));
        steps.get_mut(from..to).into_iter().flatten().for_each(mark);
    };
    for span in &run.spans {
        let Span { kind, asked, begin, end, .. } = *span;
        match kind {
            Kind::Dead => mark(begin, end, &|step| step.is_dead = true),
            Kind::Transfer => mark(begin, end, &|step| step.is_copying = true),
            Kind::Order => mark(begin, end, &|step| step.is_ordered = true),
            Kind::Read => mark(begin, end, &|step| step.reading += 1),
            Kind::Wait => mark(begin, end, &|step| step.waiting += 1),
            Kind::Host => {}
            _ => {
                mark(begin, end, &|step| step.holder = Some(kind));
                mark(asked, begin, &|step| step.blocked += 1);
                if kind == Kind::Copy {
                    mark(asked, end, &|step| step.has_ready_chunk = true);
                }
            }
        }
    }
    for step in &mut steps {
        let holder = |first: usize| match step.holder {
            Some(Kind::Pin) => Some(first),
            Some(Kind::Malloc) => Some(first + 1),
            Some(Kind::Module | Kind::Create) => Some(first + 2),
            _ => None,
        };
        step.state = match step {
            Step { is_copying: true, .. } => 0,
            Step { is_dead: true, .. } => 1,
            Step { is_ordered: true, .. } => 2,
            Step { has_ready_chunk: true, .. } => holder(3).unwrap_or(6),
            Step { reading: 0, .. } => holder(7).unwrap_or(11),
            _ => holder(7).unwrap_or(10),
        };
    }
    steps
}

/// Prints a line for each millisecond of a load.
pub fn print_timeline(run: &Run) {
    println!("    ms  copy  dead  reading  waiting  blocked  lock held by          slots  the copy engine is idle for");
    let per_ms = (1e3 / STEP_US) as usize;
    for (ms, part) in steps(run).chunks(per_ms).enumerate() {
        let mean = |value: &dyn Fn(&Step) -> f64| part.iter().map(value).sum::<f64>() / part.len() as f64;
        let share = |test: &dyn Fn(&Step) -> bool| 100.0 * mean(&|step| f64::from(u8::from(test(step))));
        let begin = run.begin + (ms as f64 * 1e6 * run.costs.scale) as u64;
        let end = begin + (1e6 * run.costs.scale) as u64;
        let pinned = run.spans.iter().filter(|span| span.kind == Kind::Pin && span.end <= end).count();
        let mut holders = String::new();
        for kind in [Kind::Pin, Kind::Malloc, Kind::Module, Kind::Copy, Kind::Record, Kind::Query] {
            let held = share(&|step| step.holder == Some(kind));
            if held >= 3.0 {
                holders += &format!("{kind:?} {held:.0}% ");
            }
        }
        let idle = (2..STATES.len()).map(|state| (share(&|step| step.state == state), STATES[state]));
        let (most, why) = idle.max_by(|one, other| one.0.total_cmp(&other.0)).unwrap();
        println!(
            "  {ms:4} {:4.0}% {:4.0}% {:8.1} {:8.1} {:8.1}  {holders:22} {pinned:3}  {}",
            share(&|step| step.state == 0),
            share(&|step| step.state == 1),
            mean(&|step| f64::from(step.reading)),
            mean(&|step| f64::from(step.waiting)),
            mean(&|step| f64::from(step.blocked)),
            if most >= 3.0 { format!("{why} {most:.0}%") } else { String::new() },
        );
    }
}

/// Prints a line for the runs of one load.
pub fn print_row(name: &str, mut runs: Vec<Run>, measured: f64, bytes: u64) {
    runs.sort_by(|one, other| one.ms.total_cmp(&other.ms));
    let (least, most) = (runs[0].ms, runs[runs.len() - 1].ms);
    let middle = runs.len() / 2;
    let run = &runs[middle];
    let goal = 100.0 * bytes as f64 / run.costs.link_gbps / 1e6 / run.ms;
    let steps = steps(run);
    let parts: Vec<String> = (1..STATES.len())
        .map(|state| {
            let ms = steps.iter().filter(|step| step.state == state).count() as f64 * STEP_US / 1e3;
            if ms < 0.05 { format!("{:7}", "") } else { format!("{ms:6.1} ") }
        })
        .collect();
    let calls = run.spans.iter().filter(|span| span.kind.is_call()).count() as f64 / run.chunks as f64;
    let streams: Vec<usize> = run.spans.iter().filter(|span| span.kind == Kind::Dead).map(|span| span.bytes).collect();
    let changes = streams.windows(2).filter(|pair| pair[0] != pair[1]).count();
    let first_copy = run.spans.iter().filter(|span| span.kind == Kind::Copy).map(|span| span.asked).min();
    let is_early = |span: &&Span| span.kind == Kind::Pin && Some(span.end) <= first_copy;
    let pinned = run.spans.iter().filter(is_early).count();
    // The CPU time of the threads is not stretched.
    let mark = if run.cpu_ms / THREADS as f64 > 0.05 * run.ms { "cpu" } else { "" };
    println!(
        "{name:24} {:6.1} [{least:5.1} .. {most:5.1}] {measured:6.1} {:+4.0}% {goal:4.0}% |{}| {calls:5.2} {changes:5} {pinned:3} {:5.1} {mark}",
        run.ms,
        100.0 * (run.ms / measured - 1.0),
        parts.join(""),
        run.cpu_ms,
    );
}

pub fn print_head(set: &str) {
    let heads: String = STATES[1..].iter().map(|state| format!("{state:>6} ")).collect();
    println!("\nparameters: {set}");
    println!("load                         ms                    H100        link |{heads}| calls turns pin   cpu");
}
