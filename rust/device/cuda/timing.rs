//! Times of a GPU's work, taken with events while a profile runs.

use super::driver::{Context, Event, Stream};
use crate::error::Result;
use crate::num::to_u64;
use crate::profile::{self, Stage};
use std::sync::Arc;

/// Relation between the clock of a GPU and that of the host.
pub struct Timer {
    ordinal: i32,
    base: Event,
    /// Time at which the host saw `base`, on the clock of [`profile::now`].
    base_time: u64,
    context: Arc<Context>,
}

/// Timed events on a copy stream, and the work between consecutive ones. Empty while no profile runs.
#[derive(Default)]
pub struct Laps {
    copy_stream: usize,
    events: Vec<Event>,
    work: Vec<(Stage, u64)>,
}

impl Timer {
    /// Creates a timer if a profile runs. The stream must be idle, so that host and GPU see the event at the same time.
    ///
    /// # Errors
    /// `device` or `out-of-memory`, from the driver.
    pub fn start(context: &Arc<Context>, ordinal: i32, stream: &Stream) -> Result<Option<Timer>> {
        if !profile::is_on() {
            return Ok(None);
        }
        let base = Event::timed(context)?;
        base.record(stream)?;
        base.wait()?;
        Ok(Some(Timer { ordinal, base, base_time: profile::now(), context: Arc::clone(context) }))
    }

    /// Starts to time the work queued next on a copy stream.
    ///
    /// # Errors
    /// `device` or `out-of-memory`, from the driver.
    pub fn laps(&self, copy_stream: usize, stream: &Stream) -> Result<Laps> {
        if !profile::is_on() {
            return Ok(Laps::default());
        }
        let begin = Event::timed(&self.context)?;
        begin.record(stream)?;
        Ok(Laps { copy_stream, events: vec![begin], work: Vec::new() })
    }

    /// Records laps in the profile. Their work must be complete.
    ///
    /// # Errors
    /// `device`, from the driver.
    pub fn report(&self, laps: &Laps) -> Result<()> {
        let times = laps.events.iter().map(|event| Ok(self.base_time + event.nanoseconds_since(&self.base)?));
        let times = times.collect::<Result<Vec<u64>>>()?;
        for ((begin, end), &(stage, bytes)) in times.iter().zip(times.iter().skip(1)).zip(&laps.work) {
            profile::device_span(stage, self.ordinal, laps.copy_stream, *begin, *end, bytes);
        }
        Ok(())
    }
}

impl Laps {
    /// Ends a lap: labels the work queued on the stream since the last event.
    ///
    /// # Errors
    /// `device` or `out-of-memory`, from the driver.
    pub fn record(&mut self, stage: Stage, bytes: usize, stream: &Stream) -> Result<()> {
        if let Some(last) = self.events.last() {
            let event = last.another()?;
            event.record(stream)?;
            self.events.push(event);
            self.work.push((stage, to_u64(bytes)));
        }
        Ok(())
    }
}
