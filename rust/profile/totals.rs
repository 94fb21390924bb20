//! Totals of stages, and counters, of one profile or of the process.

use super::{Count, Stage};
use crate::num::to_u64;
use serde_json::{Map, Value, json};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Totals of all stages, and all counters. They only grow.
#[derive(Default)]
pub struct Totals {
    stages: [StageTotal; Stage::ALL.len()],
    counts: [AtomicU64; Count::ALL.len()],
}

#[derive(Default)]
struct StageTotal {
    spans: AtomicU64,
    bytes: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Totals {
    pub fn add(&self, stage: Stage, bytes: u64, nanoseconds: u64) {
        if let Some(total) = self.stages.get(stage as usize) {
            total.spans.fetch_add(1, Ordering::Relaxed);
            total.bytes.fetch_add(bytes, Ordering::Relaxed);
            total.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        }
    }

    pub fn count(&self, what: Count, number: usize) {
        if let Some(count) = self.counts.get(what as usize) {
            count.fetch_add(to_u64(number), Ordering::Relaxed);
        }
    }

    /// Returns all counters by name, and under `stages` the totals of those with at least one span.
    pub fn to_json(&self) -> Map<String, Value> {
        let counts = Count::ALL.iter().zip(&self.counts);
        let counts = counts.map(|(count, number)| (count.name().to_owned(), number.load(Ordering::Relaxed).into()));
        let used = Stage::ALL.iter().zip(&self.stages).filter(|(_, total)| total.spans.load(Ordering::Relaxed) > 0);
        let stages = used.map(|(stage, total)| {
            json!({
                "stage": stage.name(),
                "spans": total.spans.load(Ordering::Relaxed),
                "bytes": total.bytes.load(Ordering::Relaxed),
                "seconds": seconds(total.nanoseconds.load(Ordering::Relaxed)),
            })
        });
        counts.chain([("stages".to_owned(), stages.collect())]).collect()
    }
}

pub(super) fn seconds(nanoseconds: u64) -> f64 {
    Duration::from_nanos(nanoseconds).as_secs_f64()
}
