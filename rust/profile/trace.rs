//! Converts a recording to a Chrome trace: times in microseconds since the start of the profile, one process each for
//! saves, loads, threads, and the work of a GPU.

use super::recorder::Recorder;
use super::totals::seconds;
use super::{Entry, Memory, Stage, Track, thread};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

/// Process ids in the trace. GPU n has the id `FIRST_GPU + n`.
const SAVES: i64 = 0;
const LOADS: i64 = 1;
const HOST: i64 = 2;
const FIRST_GPU: i64 = 3;

/// Row of the trace: process id and number in that process.
type Row = (i64, usize);

/// Returns the trace of all spans recorded until `end`.
pub fn text(recorder: &Recorder, end: u64) -> String {
    let entries = recorder.entries();
    let errors = recorder.errors.lock().clone();
    let mut loads = Loads::default();
    let rows: Vec<Row> = entries.iter().map(|entry| row_of(entry, &mut loads)).collect();
    let used: BTreeSet<Row> = rows.iter().copied().chain(errors.iter().map(|error| (HOST, error.row))).collect();
    let since = |time: u64| microseconds(time.saturating_sub(recorder.begin));
    let mut events: Vec<String> = names(&used).iter().map(Value::to_string).collect();
    events.extend(entries.iter().zip(&rows).map(|(entry, (process, row))| {
        format!(
            r#"{{"name":"{}","cat":"fst","ph":"X","ts":{},"dur":{},"pid":{process},"tid":{row},"args":{}}}"#,
            entry.stage.name(),
            since(entry.begin),
            microseconds(entry.end.saturating_sub(entry.begin)),
            arguments(entry)
        )
    }));
    events.extend(errors.iter().map(|error| {
        let (at, arguments) = (since(error.at), json!({ "message": error.text }));
        format!(
            r#"{{"name":"error","cat":"fst","ph":"i","s":"t","ts":{at},"pid":{HOST},"tid":{},"args":{arguments}}}"#,
            error.row
        )
    }));
    let mut totals = recorder.totals.to_json();
    let others = json!({
        "seconds": seconds(end.saturating_sub(recorder.begin)),
        "spans_dropped": recorder.dropped.load(Ordering::Relaxed),
        "storage_bytes": recorder.storage_bytes(),
        "peak_staging_bytes": recorder.memory_of(Memory::Staging),
        "peak_scratch_bytes": recorder.memory_of(Memory::Scratch),
        "readers": *recorder.readers.lock(),
        "missing_kernels": *recorder.missing_kernels.lock(),
        "errors": errors.iter().map(|error| error.text.as_str()).collect::<Vec<_>>(),
    });
    totals.extend(others.as_object().cloned().unwrap_or_default());
    let totals = Value::Object(totals);
    format!("{{\"displayTimeUnit\":\"ms\",\"otherData\":{totals},\"traceEvents\":[\n{}\n]}}\n", events.join(",\n"))
}

/// End of the last load or save in each row, by process. Concurrent loads need several rows.
#[derive(Default)]
struct Loads(BTreeMap<i64, Vec<u64>>);

impl Loads {
    fn assign_row(&mut self, process: i64, entry: &Entry) -> usize {
        let rows = self.0.entry(process).or_default();
        let free = rows.iter_mut().enumerate().find(|(_, end)| **end <= entry.begin);
        if let Some((row, end)) = free {
            *end = entry.end;
            return row;
        }
        rows.push(entry.end);
        rows.len() - 1
    }
}

fn row_of(entry: &Entry, loads: &mut Loads) -> Row {
    match entry.track {
        Track::Load => {
            let process = if entry.stage == Stage::Save { SAVES } else { LOADS };
            (process, loads.assign_row(process, entry))
        }
        Track::Thread(row) => (HOST, row),
        Track::CopyStream { ordinal, copy_stream } => (FIRST_GPU + i64::from(ordinal), copy_stream),
    }
}

/// Returns the events that name processes and rows in Perfetto.
fn names(rows: &BTreeSet<Row>) -> Vec<Value> {
    let threads = thread::names();
    let processes: BTreeSet<i64> = rows.iter().map(|&(process, _)| process).collect();
    let named = |kind: &str, (process, row): Row, name: String| json!({ "name": kind, "ph": "M", "pid": process, "tid": row, "args": { "name": name } });
    let process = |&process: &i64| {
        let name = match process {
            SAVES => "saves".to_owned(),
            LOADS => "loads".to_owned(),
            HOST => "host".to_owned(),
            gpu => format!("GPU {}", gpu - FIRST_GPU),
        };
        named("process_name", (process, 0), name)
    };
    let row = |&(process, row): &Row| {
        let name = match (process, threads.get(row)) {
            (SAVES, _) => format!("save {row}"),
            (LOADS, _) => format!("load {row}"),
            (HOST, Some(thread)) => format!("{thread} {row}"),
            _ => format!("copy stream {row}"),
        };
        named("thread_name", (process, row), name)
    };
    processes.iter().map(process).chain(rows.iter().map(row)).collect()
}

fn arguments(entry: &Entry) -> Value {
    let mut arguments = match entry.detail.as_deref() {
        Some(Value::Object(detail)) => detail.clone(),
        _ => Map::new(),
    };
    arguments.insert("bytes".to_owned(), entry.bytes.into());
    Value::Object(arguments)
}

fn microseconds(nanoseconds: u64) -> String {
    format!("{}.{:03}", nanoseconds / 1000, nanoseconds % 1000)
}
