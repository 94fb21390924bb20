//! Tests of profiles and their traces. A profile records the whole process, so the tests run one at a time.

use crate::sim::exclusive;
use fst::error::{Error, Kind};
use fst::profile::{self, Count, Memory, SPANS_MAX, Stage};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::{Arc, Barrier};
use std::thread;

/// Parsed trace.
struct Trace {
    summary: Value,
    events: Vec<Value>,
}

/// Span of a trace, with times in nanoseconds.
#[derive(Debug)]
struct Span {
    name: String,
    row: (i64, i64),
    begin: u64,
    end: u64,
    arguments: Value,
}

impl Trace {
    fn stop(profile: i64) -> Trace {
        let mut trace: Value = serde_json::from_str(&profile::stop(profile).unwrap()).unwrap();
        let [summary, events] = ["otherData", "traceEvents"].map(|key| trace[key].take());
        let Value::Array(events) = events else { panic!("{events}") };
        Trace { summary, events }
    }

    fn of(work: impl FnOnce()) -> Trace {
        let profile = profile::start();
        work();
        Trace::stop(profile)
    }

    fn spans(&self) -> Vec<Span> {
        let spans = self.events.iter().filter(|event| event["ph"] == "X");
        spans
            .map(|event| {
                let nanoseconds = |key: &str| {
                    let (whole, part) = event[key].to_string().split_once('.').map(to_owned).unwrap();
                    whole.parse::<u64>().unwrap() * 1000 + format!("{part:0<3}").parse::<u64>().unwrap()
                };
                let (begin, length) = (nanoseconds("ts"), nanoseconds("dur"));
                Span {
                    name: event["name"].as_str().unwrap().to_owned(),
                    row: (event["pid"].as_i64().unwrap(), event["tid"].as_i64().unwrap()),
                    begin,
                    end: begin + length,
                    arguments: event["args"].clone(),
                }
            })
            .collect()
    }

    fn bytes(&self, stage: Stage) -> Vec<u64> {
        let spans = self.spans().into_iter().filter(|span| span.name == stage.name());
        spans.map(|span| span.arguments["bytes"].as_u64().unwrap()).collect()
    }

    /// Returns the total `spans` or `bytes` of a stage.
    fn total(&self, stage: Stage, key: &str) -> u64 {
        let stages = self.summary["stages"].as_array().unwrap();
        stages.iter().find(|total| total["stage"] == stage.name()).unwrap()[key].as_u64().unwrap()
    }

    /// Returns the name of the thread of a row.
    fn name_of(&self, row: (i64, i64)) -> &str {
        let names_row =
            |event: &&Value| event["name"] == "thread_name" && event["pid"] == row.0 && event["tid"] == row.1;
        self.events.iter().find(names_row).unwrap()["args"]["name"].as_str().unwrap()
    }
}

fn to_owned((whole, part): (&str, &str)) -> (String, String) {
    (whole.to_owned(), part.to_owned())
}

#[test]
fn spans_are_ordered_by_begin_with_their_arguments() {
    let _lock = exclusive();
    let trace = Trace::of(|| {
        let outer = profile::span(Stage::Plan);
        drop(profile::span(Stage::Read).bytes(7_usize).detail(|| Arc::new(json!({ "path": "a \"b\"" }))));
        drop(profile::span(Stage::Cast).bytes(9_u64));
        drop(outer);
        profile::count(Count::Reads, 3);
        profile::count(Count::Launches, 2);
        profile::memory(Memory::Staging, 100_usize);
        profile::memory(Memory::Staging, 60_usize);
        profile::error(&Error::new(Kind::Io, "gone").at("x.safetensors"));
    });
    let spans = trace.spans();
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["plan", "read", "cast"]);
    assert!(spans[0].begin <= spans[1].begin && spans[1].end <= spans[2].begin && spans[2].end <= spans[0].end);
    assert_eq!(spans[1].arguments, json!({ "path": "a \"b\"", "bytes": 7 }));
    assert_eq!(trace.total(Stage::Cast, "bytes"), 9);
    let counts = ["reads", "copies", "launches", "peak_staging_bytes", "spans_dropped"].map(|key| &trace.summary[key]);
    assert_eq!(counts, [3, 0, 2, 100, 0]);
    assert_eq!(trace.summary["errors"], json!(["[io] x.safetensors: gone"]));
    assert!(
        trace.events.iter().any(|event| event["ph"] == "i" && event["args"]["message"] == "[io] x.safetensors: gone")
    );
}

#[test]
fn profile_contains_spans_that_begin_and_end_during_it() {
    let _lock = exclusive();
    assert!(!profile::is_on());
    let mut is_evaluated = false;
    drop(profile::span(Stage::Read).detail(|| {
        is_evaluated = true;
        Arc::default()
    }));
    assert!(!is_evaluated);
    profile::count(Count::Reads, 1);
    let before = profile::span(Stage::Read).bytes(2_usize);
    let outer = profile::start();
    let around = profile::span(Stage::Read).bytes(3_usize);
    let inner = profile::start();
    drop(before);
    drop(around);
    drop(profile::span(Stage::Read).bytes(4_usize));
    let late = profile::span(Stage::Read).bytes(5_usize);
    let inner = Trace::stop(inner);
    drop(late);
    let after = profile::span(Stage::Read).bytes(6_usize);
    let outer = Trace::stop(outer);
    drop(after);
    assert_eq!(inner.bytes(Stage::Read), [4]);
    assert_eq!(outer.bytes(Stage::Read), [3, 4, 5]);
    assert_eq!(outer.summary["reads"], 0);
    assert!(!profile::is_on());
    assert!(Trace::of(|| {}).spans().is_empty());
}

#[test]
fn threads_have_separate_rows_that_later_threads_reuse() {
    let _lock = exclusive();
    const THREADS: usize = 8;
    const SPANS: usize = 500;
    let run = || {
        let barrier = Barrier::new(THREADS);
        thread::scope(|scope| {
            for index in 0..THREADS {
                let barrier = &barrier;
                let work = move || {
                    barrier.wait();
                    for number in 0..SPANS {
                        drop(profile::span(Stage::Read).bytes(index * SPANS + number));
                    }
                    barrier.wait();
                };
                thread::Builder::new().name("worker".into()).spawn_scoped(scope, work).unwrap();
            }
        });
    };
    let trace = Trace::of(run);
    let mut bytes = trace.bytes(Stage::Read);
    bytes.sort_unstable();
    assert!(bytes.into_iter().eq(0..(THREADS * SPANS) as u64));
    let spans = trace.spans();
    let rows: BTreeSet<(i64, i64)> = spans.iter().map(|span| span.row).collect();
    assert_eq!(rows.len(), THREADS);
    for &row in &rows {
        let of_row: Vec<&Span> = spans.iter().filter(|span| span.row == row).collect();
        assert!(of_row.windows(2).all(|pair| pair[0].end <= pair[1].begin), "spans of one thread overlap");
        assert_eq!(trace.name_of(row), format!("worker {}", row.1));
    }
    // A thread releases its row shortly after its last span.
    let reused: BTreeSet<(i64, i64)> = Trace::of(run).spans().iter().map(|span| span.row).collect();
    assert_eq!(reused.len(), THREADS);
}

#[test]
fn concurrent_loads_have_separate_rows() {
    let _lock = exclusive();
    let trace = Trace::of(|| {
        let first = profile::span(Stage::Load);
        let second = profile::span(Stage::Load);
        drop(first);
        let third = profile::span(Stage::Load);
        drop(second);
        drop(third);
    });
    let rows: Vec<i64> = trace.spans().iter().map(|span| span.row.1).collect();
    assert_eq!(rows, [0, 1, 0]);
    assert_eq!(trace.name_of(trace.spans()[1].row), "load 1");
}

#[test]
fn dropped_spans_are_counted() {
    let _lock = exclusive();
    let trace = Trace::of(|| {
        for _ in 0..SPANS_MAX + 10 {
            drop(profile::span(Stage::Read).bytes(2_usize));
        }
    });
    assert_eq!(trace.summary["spans_dropped"], 10);
    assert_eq!(trace.events.iter().filter(|event| event["ph"] == "X").count(), SPANS_MAX);
    assert_eq!(trace.total(Stage::Read, "spans"), (SPANS_MAX + 10) as u64);
    assert_eq!(trace.total(Stage::Read, "bytes"), 2 * (SPANS_MAX + 10) as u64);
}
