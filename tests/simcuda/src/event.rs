//! Events: points in the work of a stream for which streams and the host can wait.

use crate::abi::{EVENT_DISABLE_TIMING, Kind, Status};
use crate::clock::{Clock, WorkId};
use crate::context;
use crate::driver::{Driver, Orphan, SharedDriver, new_handle};
use std::time::Instant;

/// Event, recorded or not.
#[derive(Debug)]
pub struct Event {
    context: usize,
    /// Whether the event records times.
    has_timing: bool,
    /// Last record, or `None` before the first record.
    record: Option<Record>,
    /// Number of host threads that wait for the event.
    waiting: usize,
}

/// Point in the work of a stream at which an event was recorded.
#[derive(Clone, Debug)]
pub struct Record {
    /// Last work before the record.
    pub id: WorkId,
    /// All work that happens before the record.
    pub clock: Clock,
    /// Last work before the record that uses memory.
    last_use: WorkId,
    /// Time of the call of `cuEventRecord`.
    called_at: Instant,
}

impl Driver {
    /// `cuEventCreate`.
    pub fn create_event(&mut self, flags: u32) -> Result<usize, Status> {
        let context = self.current_healthy()?;
        self.count_allocation()?;
        self.counters.events += 1;
        let handle = new_handle();
        self.events
            .insert(handle, Event { context, has_timing: flags & EVENT_DISABLE_TIMING == 0, record: None, waiting: 0 });
        Ok(handle)
    }

    /// `cuEventRecord`.
    pub fn record_event(&mut self, event: usize, stream: usize) -> Result<(), Status> {
        let stream = self.stream_for_work("an event record", stream)?;
        let context = context::current();
        self.counters.records += 1;
        let (id, clock) = self.tail(stream);
        let last_use = self.streams.get(&stream).map_or(id, |stream| stream.last_use);
        let event = self.event_mut("recorded", event)?;
        if event.context != context {
            self.report(Kind::WrongContext, "an event is recorded in another context than its own".to_owned());
            return Err(Status::InvalidHandle);
        }
        event.record = Some(Record { id, clock, last_use, called_at: Instant::now() });
        Ok(())
    }

    /// `cuEventQuery`.
    pub fn query_event(&mut self, event: usize) -> Result<(), Status> {
        self.counters.queries += 1;
        let Event { context, record, .. } = self.event_mut("queried", event)?;
        let (context, record) = (*context, record.clone());
        self.healthy(context)?;
        let Some(Record { id, clock, .. }) = record else {
            return Ok(());
        };
        if !self.order.finished.covers(id) {
            self.permits = 1;
            return Err(Status::NotReady);
        }
        self.order.set_host_waited(&clock);
        Ok(())
    }

    /// `cuEventElapsedTime`, in milliseconds.
    pub fn elapsed_time(&mut self, start: usize, end: usize) -> Result<f32, Status> {
        let (start, end) = (self.time_of(start)?, self.time_of(end)?);
        Ok(end.saturating_duration_since(start).as_secs_f32() * 1e3)
    }

    fn time_of(&mut self, event: usize) -> Result<Instant, Status> {
        let event = self.event_mut("queried for its time", event)?;
        let Some(Record { id, called_at, .. }) = event.record.clone().filter(|_| event.has_timing) else {
            return Err(Status::InvalidHandle);
        };
        if !self.order.finished.covers(id) {
            return Err(Status::NotReady);
        }
        let finished_at = self.finished_at.get(&(id.stream, id.number)).copied();
        Ok(finished_at.map_or(called_at, |finished_at| finished_at.max(called_at)))
    }

    /// `cuEventDestroy_v2`.
    pub fn destroy_event(&mut self, handle: usize) -> Result<(), Status> {
        let event = self.event_mut("destroyed", handle)?;
        let (context, waiting, record) = (event.context, event.waiting, event.record.take());
        self.events.remove(&handle);
        if waiting > 0 {
            self.report(Kind::UseAfterFree, "an event is destroyed while a thread waits for it".to_owned());
        }
        if let Some(Record { last_use, .. }) = record {
            self.orphans.push(Orphan { id: last_use, context, cause: "an event was destroyed" });
        }
        self.healthy(context)
    }

    /// Returns the last record of the event, or `None` before the first record.
    pub fn record_of(&mut self, event: usize) -> Result<Option<Record>, Status> {
        Ok(self.event_mut("waited for", event)?.record.clone())
    }

    fn event_mut(&mut self, operation: &str, handle: usize) -> Result<&mut Event, Status> {
        if !self.events.contains_key(&handle) {
            self.report(Kind::UseAfterFree, format!("event {handle:#x} is {operation}, but there is no such event"));
        }
        self.events.get_mut(&handle).ok_or(Status::InvalidHandle)
    }
}

impl SharedDriver {
    /// `cuEventSynchronize`.
    pub fn synchronize_event(&self, handle: usize) -> Result<(), Status> {
        let mut driver = self.lock();
        driver.potentially_unsafe("cuEventSynchronize")?;
        driver.counters.syncs += 1;
        let event = driver.event_mut("waited for", handle)?;
        let (context, record) = (event.context, event.record.clone());
        let Some(Record { id, clock, .. }) = record else {
            return driver.healthy(context);
        };
        event.waiting += 1;
        let mut driver = self.wait_on_host(driver, id)?;
        if let Some(event) = driver.events.get_mut(&handle) {
            event.waiting -= 1;
        }
        driver.healthy(context)?;
        driver.order.set_host_waited(&clock);
        Ok(())
    }
}
