//! Streams: queues of work, each with a thread that runs it in order.

use crate::abi::{Kind, Status};
use crate::clock::{Clock, Mark};
use crate::context::{self, Device};
use crate::copy::Copy;
use crate::driver::{Driver, Orphan, SharedDriver, new_handle};
use crate::event::Record;
use crate::fetch::Fetch;
use crate::launch::Launch;
use crate::memory::Access;
use crate::random::Random;
use crate::region::Region;
use std::collections::VecDeque;
use std::time::Instant;

/// A queue of work.
#[derive(Debug)]
pub struct Stream {
    /// Its index in every clock. Unlike the handle it is small.
    pub index: usize,
    /// The context that it belongs to.
    pub context: usize,
    /// What comes before work that is queued next.
    pub clock: Clock,
    /// The last work that uses memory, which somebody must wait for.
    pub last_use: Mark,
    /// What has not begun to run, with its number.
    queue: VecDeque<(Mark, Work)>,
    /// Whether a graph captures what is queued. A test says so; work runs all the same.
    pub capturing: bool,
    /// Destroyed streams stay here until their work has run.
    destroyed: bool,
}

/// Something that a stream does.
#[derive(Debug)]
pub enum Work {
    /// Host memory goes to device memory.
    Copy(Copy),
    /// Device memory goes to host memory.
    Fetch(Fetch),
    /// A kernel that fills device memory with one value.
    Fill(Region, u8),
    /// A kernel that only reads.
    Read,
    /// A kernel of fst.
    Launch(Launch),
    /// Nothing, until the other stream's work has run.
    Wait(Mark),
}

impl Driver {
    /// `cuStreamCreate`.
    pub fn create_stream(&mut self) -> Result<usize, Status> {
        let context = self.current_healthy()?;
        self.count_allocation()?;
        let handle = new_handle();
        self.add_stream(handle, context);
        Ok(handle)
    }

    /// `cuStreamDestroy_v2`. Work that is queued still runs, as in CUDA.
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
        self.orphans.push(Orphan { mark: stream.last_use, context, what: "a stream was destroyed" });
        self.healthy(context)
    }

    /// `cuStreamWaitEvent`.
    pub fn wait_event(&mut self, stream: usize, event: usize) -> Result<(), Status> {
        let stream = self.stream_for_work("a wait", stream)?;
        let Some(Record { mark, clock, .. }) = self.record_of(event)? else {
            return Ok(());
        };
        self.push(stream, Work::Wait(mark));
        if let Some(waiting) = self.streams.get_mut(&stream) {
            waiting.clock.join(&clock);
            if waiting.index != mark.stream {
                self.order.awaited.join(&clock);
            }
        }
        Ok(())
    }

    /// Some other program's kernel that reads `region`, or fills it with `value`.
    pub fn launch_other(&mut self, stream: usize, region: Region, value: Option<u8>) -> Result<(), Status> {
        let what = if value.is_some() { "kernel write" } else { "kernel read" };
        let stream = self.stream_for_work(what, stream)?;
        self.use_on_stream(stream, region, value.is_some(), what)?;
        if let Some(value) = value {
            self.memory.foresee(&region, &vec![value; region.bytes() as usize]);
        }
        self.push(stream, value.map_or(Work::Read, |value| Work::Fill(region, value)));
        Ok(())
    }

    /// Checks what the next piece of work on `stream` does to device memory.
    pub fn use_on_stream(&mut self, stream: usize, region: Region, writes: bool, what: &str) -> Result<(), Status> {
        let (last, mut clock) = self.tail(stream);
        let mark = clock.append(last.stream);
        let device = self.device_of(context::current())?;
        let what = format!("{what} (work {} of stream {})", mark.number, mark.stream);
        self.use_memory(device, &clock, Access { region, writes, mark, what })
    }

    /// Queues work and tells its number.
    pub fn push(&mut self, stream: usize, work: Work) -> Mark {
        let (last, mut clock) = self.tail(stream);
        let mark = clock.append(last.stream);
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.clock = clock;
            if !matches!(work, Work::Wait(_)) {
                stream.last_use = mark;
            }
            stream.queue.push_back((mark, work));
        }
        mark
    }

    /// The last work of a stream, and everything that comes before what is
    /// queued next, the host's knowledge included.
    pub fn tail(&self, handle: usize) -> (Mark, Clock) {
        let mut clock = self.order.host.clone();
        let mut mark = Mark { stream: 0, number: 0 };
        if let Some(stream) = self.streams.get(&handle) {
            clock.join(&stream.clock);
            mark = clock.last(stream.index);
        }
        (mark, clock)
    }

    /// The stream on which the calling thread wants to queue `what`.
    pub fn stream_for_work(&mut self, what: &str, handle: usize) -> Result<usize, Status> {
        let current = context::current();
        if self.device_of(current).is_err() {
            self.report(Kind::WrongContext, format!("{what} is queued by a thread without a live context"));
            return Err(Status::InvalidContext);
        }
        let handle = self.resolve_stream("used", handle)?;
        let context = self.streams.get(&handle).map_or(0, |stream| stream.context);
        if context != current {
            self.report(Kind::WrongContext, format!("{what} is queued on a stream of a context that is not current"));
            return Err(Status::InvalidContext);
        }
        self.healthy(context)?;
        Ok(handle)
    }

    /// The stream of this handle, to ask or to change something about it.
    pub fn stream_mut(&mut self, handle: usize) -> Result<&mut Stream, Status> {
        let handle = self.resolve_stream("used", handle)?;
        self.streams.get_mut(&handle).ok_or(Status::InvalidHandle)
    }

    /// The stream that a handle names: 0 and `CU_STREAM_LEGACY` name the
    /// default stream of the current context.
    fn resolve_stream(&mut self, what: &str, handle: usize) -> Result<usize, Status> {
        if handle <= 1 {
            let device = self.device_of(context::current())?;
            let Device { context, default_stream, .. } = self.devices[device];
            if !self.streams.contains_key(&default_stream) {
                self.add_stream(default_stream, context);
            }
            return Ok(default_stream);
        }
        let stream = self.streams.get(&handle).filter(|stream| !stream.destroyed);
        let Some(context) = stream.map(|stream| stream.context) else {
            self.report(Kind::UseAfterFree, format!("stream {handle:#x} is {what}, but there is no such stream"));
            return Err(Status::InvalidHandle);
        };
        self.device_of(context)?;
        Ok(handle)
    }

    fn add_stream(&mut self, handle: usize, context: usize) {
        let index = self.streams.len();
        let clock = Clock::default();
        let last_use = clock.last(index);
        let stream =
            Stream { index, context, clock, last_use, queue: VecDeque::new(), capturing: false, destroyed: false };
        self.streams.insert(handle, stream);
        let (epoch, random) = (self.epoch, Random::new(self.seed ^ (index as u64 + 1)));
        let thread = std::thread::spawn(move || crate::driver::DRIVER.run_stream(handle, epoch, random));
        self.threads.push(thread);
    }

    /// Streams that the program has created and not destroyed.
    pub fn created_streams(&self) -> impl Iterator<Item = usize> + '_ {
        let is_default = |handle: usize| self.devices.iter().any(|device| device.default_stream == handle);
        let created = self.streams.iter().filter(move |(handle, stream)| !stream.destroyed && !is_default(**handle));
        created.map(|(&handle, _)| handle)
    }

    /// Whether all work that was ever queued has run.
    pub fn is_idle(&self) -> bool {
        self.streams.keys().all(|&handle| self.order.finished.covers(self.tail(handle).0))
    }

    /// The next work of a stream, if it may begin now.
    fn take(&mut self, handle: usize) -> Option<(Mark, Work)> {
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
        driver.counters.syncs += 1;
        let handle = driver.resolve_stream("waited for", handle)?;
        let context = driver.streams.get(&handle).map_or(0, |stream| stream.context);
        let (mark, clock) = driver.tail(handle);
        let mut driver = self.wait_on_host(driver, mark)?;
        driver.healthy(context)?;
        driver.order.host_learns(&clock);
        Ok(())
    }

    /// What a stream's thread does, until the next reset.
    fn run_stream(&self, handle: usize, epoch: u64, mut random: Random) {
        loop {
            let mut driver = self.lock();
            let (mark, work) = loop {
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
                    Work::Copy(copy) => copy.run(self, epoch, context, &mut random),
                    Work::Fetch(fetch) => fetch.run(self, epoch, context, &mut random),
                    Work::Launch(launch) => launch.run(self, epoch, context),
                    Work::Fill(region, value) => self.fill(epoch, &region, value),
                    Work::Read | Work::Wait(_) => {}
                }
            }
            let mut driver = self.lock();
            if driver.epoch == epoch {
                driver.order.finished.include(mark);
                driver.finished_at.insert((mark.stream, mark.number), Instant::now());
                self.announce();
            }
        }
    }

    fn fill(&self, epoch: u64, region: &Region, value: u8) {
        let mut driver = self.lock();
        if driver.epoch == epoch {
            driver.memory.write(region, &vec![value; region.bytes() as usize]);
        }
    }
}
