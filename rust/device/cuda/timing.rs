//! Times of a GPU's work, taken with events while a profile runs.

use super::driver::{Context, Event, Stream};
use crate::error::Result;
use crate::num::to_u64;
use crate::profile::{self, Stage};
use cudarc::driver::sys;
use std::sync::Arc;

/// Relation between the clocks of a GPU and of the host.
pub struct Timer {
    ordinal: i32,
    base: Event,
    /// Time at which the host saw `base`, on the clock of [`profile::now`].
    base_time: u64,
    context: Arc<Context>,
}

/// Timed events on a stream, and the work between consecutive ones. Empty while no profile runs.
///
/// The profile gets the times when the laps are dropped, which is after their work, except after an error.
#[derive(Default)]
pub struct Laps {
    timer: Option<Arc<Timer>>,
    stream_index: usize,
    events: Vec<Event>,
    work: Vec<(Stage, u64)>,
}

impl Timer {
    /// Creates a timer if a profile runs.
    pub fn start(context: &Arc<Context>, ordinal: i32) -> Result<Option<Arc<Timer>>> {
        if !profile::is_on() {
            return Ok(None);
        }
        // The stream is new, and so idle: host and GPU see the event at the same time.
        let stream = Stream::create(context)?;
        let base = Event::timed(context)?;
        base.record(stream.handle)?;
        base.synchronize()?;
        Ok(Some(Arc::new(Timer { ordinal, base, base_time: profile::now(), context: Arc::clone(context) })))
    }
}

impl Laps {
    /// Starts to time the work queued next on a stream, if a profile runs.
    pub fn start(timer: Option<&Arc<Timer>>, stream_index: usize, stream: sys::CUstream) -> Result<Laps> {
        let Some(timer) = timer.filter(|_| profile::is_on()) else { return Ok(Laps::default()) };
        let begin = Event::timed(&timer.context)?;
        begin.record(stream)?;
        Ok(Laps { timer: Some(Arc::clone(timer)), stream_index, events: vec![begin], work: Vec::new() })
    }

    /// Ends a lap: labels the work queued on the stream since the last event.
    pub fn record(&mut self, stage: Stage, bytes: usize, stream: sys::CUstream) -> Result<()> {
        if let Some(timer) = &self.timer {
            let event = Event::timed(&timer.context)?;
            event.record(stream)?;
            self.events.push(event);
            self.work.push((stage, to_u64(bytes)));
        }
        Ok(())
    }

    /// Records the laps in the profile. Their work must be complete.
    fn report(&self) -> Result<()> {
        let Some(timer) = &self.timer else { return Ok(()) };
        let times = self.events.iter().map(|event| Ok(timer.base_time + event.nanoseconds_since(&timer.base)?));
        let times = times.collect::<Result<Vec<u64>>>()?;
        for ((begin, end), &(stage, bytes)) in times.iter().zip(times.iter().skip(1)).zip(&self.work) {
            profile::device_span(stage, timer.ordinal, self.stream_index, *begin, *end, bytes);
        }
        Ok(())
    }
}

impl Drop for Laps {
    fn drop(&mut self) {
        if let Err(error) = self.report() {
            tracing::debug!(%error, "the times of a copy are not in the profile");
        }
    }
}
