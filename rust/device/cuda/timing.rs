//! When a GPU did what: events around its work, while somebody profiles.

use super::driver::{Context, Event, Stream};
use crate::error::Result;
use crate::profile::{self, Stage};
use std::sync::Arc;

/// Ties the clock of a GPU to the one of the host.
pub struct Timer {
    ordinal: i32,
    base: Event,
    /// When the host saw `base`, on the clock of [`profile::now`].
    base_time: u64,
    context: Arc<Context>,
}

/// Marks on a stream, with what lies between each and the one before it. Empty while nobody profiles.
#[derive(Default)]
pub struct Laps {
    copy_stream: usize,
    events: Vec<Event>,
    work: Vec<(Stage, u64)>,
}

impl Timer {
    /// A timer while somebody profiles. The stream must be empty, so that the GPU is at the mark when the host is.
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

    /// Begins to time what is queued next on the stream of a lane.
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

    /// Tells the profile of laps whose work has ended.
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
    /// What was queued on the stream since the last mark was this.
    ///
    /// # Errors
    /// `device` or `out-of-memory`, from the driver.
    pub fn record(&mut self, stage: Stage, bytes: usize, stream: &Stream) -> Result<()> {
        if let Some(last) = self.events.last() {
            let event = last.another()?;
            event.record(stream)?;
            self.events.push(event);
            self.work.push((stage, u64::try_from(bytes).unwrap_or(u64::MAX)));
        }
        Ok(())
    }
}
