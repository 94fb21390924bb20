//! Streams: queues of work. A thread per stream runs the work in order.

use crate::abi::{Kind, Status};
use crate::clock::{Clock, WorkId};
use crate::context::{self, Device};
use crate::copy_to_device::CopyToDevice;
use crate::copy_to_host::CopyToHost;
use crate::driver::{Driver, Orphan, SharedDriver, new_handle};
use crate::event::Record;
use crate::launch::Launch;
use crate::matrices::MatrixLaunch;
use crate::memory::Access;
use crate::random::Random;
use crate::region::Region;
use std::collections::VecDeque;
use std::time::Instant;

/// Queue of work.
#[derive(Debug)]
pub struct Stream {
    /// Index of the stream in every clock, smaller than the handle.
    pub index: usize,
    /// Context of the stream.
    pub context: usize,
    /// Work that happens before the next queued work.
    pub clock: Clock,
    /// Last work that uses memory. The program must wait for this work.
    pub last_use: WorkId,
    /// Work that has not started.
    queue: VecDeque<(WorkId, Work)>,
    /// Whether the stream is destroyed. Its queued work still runs.
    destroyed: bool,
}

/// Work of a stream.
#[derive(Debug)]
pub enum Work {
    /// Copy from host memory to device memory.
    CopyToDevice(CopyToDevice),
    /// Copy from device memory to host memory.
    CopyToHost(CopyToHost),
    /// Kernel that fills device memory with one value.
    Fill(Region, u8),
    /// Kernel that only reads.
    Read,
    /// Scatter kernel of fst.
    Launch(Launch),
    /// Dequantization kernel of fst.
    Dequantize(MatrixLaunch),
    /// Failure, which ends all work of the context.
    Fail,
    /// Wait until work of another stream has run.
    Wait(WorkId),
}

impl Driver {
    /// `cuStreamCreate`.
    pub fn create_stream(&mut self) -> Result<usize, Status> {
        let context = self.current_healthy()?;
        self.count_allocation()?;
        self.counters.streams += 1;
        let handle = new_handle();
        self.add_stream(handle, context);
        Ok(handle)
    }

    /// `cuStreamDestroy_v2`. Queued work still runs, as in CUDA.
    pub fn destroy_stream(&mut self, handle: usize) -> Result<(), Status> {
        if handle == 0 {
            return Err(Status::InvalidHandle);
        }
        let handle = self.resolve_stream("destroyed", handle)?;
        let Some(stream) = self.streams.get_mut(&handle) else {
            return Err(Status::InvalidHandle);
        };
        stream.destroyed = true;
        let context = stream.context;
        self.orphans.push(Orphan { id: stream.last_use, context, cause: "a stream was destroyed" });
        self.healthy(context)
    }

    /// `cuStreamWaitEvent`.
    pub fn wait_event(&mut self, stream: usize, event: usize) -> Result<(), Status> {
        let stream = self.stream_for_work("a wait", stream)?;
        self.counters.waits += 1;
        let Some(Record { id, clock, .. }) = self.record_of(event)? else {
            return Ok(());
        };
        self.push(stream, Work::Wait(id));
        if let Some(waiting) = self.streams.get_mut(&stream) {
            waiting.clock.join(&clock);
            if waiting.index != id.stream {
                self.order.awaited.join(&clock);
            }
        }
        Ok(())
    }

    /// Queues a kernel of another program that reads `region`, or fills it with `value`.
    pub fn launch_test_kernel(&mut self, stream: usize, region: Region, value: Option<u8>) -> Result<(), Status> {
        let operation = if value.is_some() { "kernel write" } else { "kernel read" };
        let stream = self.stream_for_work(operation, stream)?;
        self.access_on_stream(stream, region, value.is_some(), operation)?;
        if let Some(value) = value {
            self.memory.write_expected(&region, &vec![value; region.bytes() as usize]);
        }
        self.push(stream, value.map_or(Work::Read, |value| Work::Fill(region, value)));
        Ok(())
    }

    /// Checks and records an access of the next work on `stream` to device memory.
    pub fn access_on_stream(
        &mut self,
        stream: usize,
        region: Region,
        writes: bool,
        operation: &str,
    ) -> Result<(), Status> {
        let (last, mut clock) = self.tail(stream);
        let id = clock.append(last.stream);
        let device = self.device_of(context::current())?;
        let operation = format!("{operation} (work {} of stream {})", id.number, id.stream);
        self.add_access(device, &clock, Access { region, writes, id, operation })
    }

    /// Queues work and returns its identifier.
    pub fn push(&mut self, stream: usize, work: Work) -> WorkId {
        let (last, mut clock) = self.tail(stream);
        let id = clock.append(last.stream);
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.clock = clock;
            if !matches!(work, Work::Wait(_)) {
                stream.last_use = id;
            }
            stream.queue.push_back((id, work));
        }
        id
    }

    /// Returns the last work of a stream, and all work that happens before the next
    /// queued work, including work for which the host has waited.
    pub fn tail(&self, handle: usize) -> (WorkId, Clock) {
        let mut clock = self.order.host.clone();
        let mut id = WorkId { stream: 0, number: 0 };
        if let Some(stream) = self.streams.get(&handle) {
            clock.join(&stream.clock);
            id = clock.last(stream.index);
        }
        (id, clock)
    }

    /// Resolves and checks the stream on which the calling thread queues `operation`.
    pub fn stream_for_work(&mut self, operation: &str, handle: usize) -> Result<usize, Status> {
        let current = context::current();
        if self.device_of(current).is_err() {
            self.report(Kind::WrongContext, format!("{operation} is queued by a thread without a live context"));
            return Err(Status::InvalidContext);
        }
        let handle = self.resolve_stream("used", handle)?;
        let context = self.streams.get(&handle).map_or(0, |stream| stream.context);
        if context != current {
            self.report(
                Kind::WrongContext,
                format!("{operation} is queued on a stream of a context that is not current"),
            );
            return Err(Status::InvalidContext);
        }
        self.healthy(context)?;
        Ok(handle)
    }

    /// Returns the handle of a live stream. The handles 0 and `CU_STREAM_LEGACY`
    /// refer to the default stream of the current context.
    pub fn resolve_stream(&mut self, operation: &str, handle: usize) -> Result<usize, Status> {
        if handle <= 1 {
            let device = self.device_of(context::current())?;
            let Device { context: primary, default_stream, other, .. } = self.devices[device];
            let context = context::current();
            let default_stream = if context == primary { default_stream } else { other.1 };
            if !self.streams.contains_key(&default_stream) {
                self.add_stream(default_stream, context);
            }
            return Ok(default_stream);
        }
        let stream = self.streams.get(&handle).filter(|stream| !stream.destroyed);
        let Some(context) = stream.map(|stream| stream.context) else {
            self.report(Kind::UseAfterFree, format!("stream {handle:#x} is {operation}, but there is no such stream"));
            return Err(Status::InvalidHandle);
        };
        self.device_of(context)?;
        Ok(handle)
    }

    fn add_stream(&mut self, handle: usize, context: usize) {
        let index = self.streams.len();
        let clock = Clock::default();
        let last_use = clock.last(index);
        let stream = Stream { index, context, clock, last_use, queue: VecDeque::new(), destroyed: false };
        self.streams.insert(handle, stream);
        let (epoch, random) = (self.epoch, Random::new(self.seed ^ (index as u64 + 1)));
        let thread = std::thread::spawn(move || crate::driver::DRIVER.run_stream(handle, epoch, random));
        self.threads.push(thread);
    }

    /// Returns the streams that the program has created and not destroyed.
    pub fn created_streams(&self) -> impl Iterator<Item = usize> + '_ {
        let is_default =
            |handle: usize| self.devices.iter().any(|device| [device.default_stream, device.other.1].contains(&handle));
        let created = self.streams.iter().filter(move |(handle, stream)| !stream.destroyed && !is_default(**handle));
        created.map(|(&handle, _)| handle)
    }

    /// Returns whether all queued work has run.
    pub fn is_idle(&self) -> bool {
        self.streams.keys().all(|&handle| self.order.finished.covers(self.tail(handle).0))
    }

    /// Removes and returns the next work of a stream, or `None` if no work may start.
    fn take(&mut self, handle: usize) -> Option<(WorkId, Work)> {
        if !self.may_run() {
            return None;
        }
        let stream = self.streams.get_mut(&handle)?;
        if let Some((_, Work::Wait(other))) = stream.queue.front() {
            let (context, other) = (stream.context, *other);
            if !self.order.finished.covers(other) && !self.is_lost(context) {
                return None;
            }
        }
        let next = self.streams.get_mut(&handle)?.queue.pop_front();
        if next.is_some() {
            self.permits = self.permits.saturating_sub(1);
        }
        next
    }
}

impl SharedDriver {
    /// `cuStreamSynchronize`.
    pub fn synchronize_stream(&self, handle: usize) -> Result<(), Status> {
        let mut driver = self.lock();
        driver.potentially_unsafe("cuStreamSynchronize")?;
        driver.counters.syncs += 1;
        let handle = driver.resolve_stream("waited for", handle)?;
        let context = driver.streams.get(&handle).map_or(0, |stream| stream.context);
        let (id, clock) = driver.tail(handle);
        let mut driver = self.wait_on_host(driver, id)?;
        driver.healthy(context)?;
        driver.order.set_host_waited(&clock);
        Ok(())
    }

    /// Runs the work of a stream until the next reset.
    fn run_stream(&self, handle: usize, epoch: u64, mut random: Random) {
        loop {
            let mut driver = self.lock();
            let (id, work) = loop {
                if driver.epoch != epoch {
                    return;
                }
                match driver.take(handle) {
                    Some(next) => break next,
                    None => driver = self.wait_for_change(driver),
                }
            };
            let context = driver.streams.get(&handle).map_or(0, |stream| stream.context);
            let lost = driver.is_lost(context);
            drop(driver);
            if !lost {
                random.delay();
                match work {
                    Work::CopyToDevice(copy) => copy.run(self, epoch, context, &mut random),
                    Work::CopyToHost(copy) => copy.run(self, epoch, &mut random),
                    Work::Launch(launch) => launch.run(self, epoch),
                    Work::Dequantize(launch) => launch.run(self, epoch),
                    Work::Fail => self.fail(epoch, context),
                    Work::Fill(region, value) => self.fill(epoch, &region, value),
                    Work::Read | Work::Wait(_) => {}
                }
            }
            let mut driver = self.lock();
            if driver.epoch == epoch {
                driver.order.finished.include(id);
                driver.finished_at.insert((id.stream, id.number), Instant::now());
                self.notify_all();
            }
        }
    }

    fn fail(&self, epoch: u64, context: usize) {
        let mut driver = self.lock();
        if driver.epoch == epoch {
            driver.set_lost(context);
        }
    }

    fn fill(&self, epoch: u64, region: &Region, value: u8) {
        let mut driver = self.lock();
        if driver.epoch == epoch {
            driver.memory.write(region, &vec![value; region.bytes() as usize]);
        }
    }
}
