//! Copies from device memory to host memory.

use crate::abi::{Kind, POISON, Status};
use crate::context;
use crate::driver::{Driver, SharedDriver};
use crate::fault::Fate;
use crate::host::{PinId, is_mapped, read_host, write_host};
use crate::random::Random;
use crate::region::Region;
use crate::stream::Work;

/// A copy to the host that was queued.
#[derive(Debug)]
pub struct Fetch {
    source: Region,
    target: Region,
    /// The registration of the target, unless it is pageable.
    pin: Option<PinId>,
    fails: bool,
}

impl Driver {
    /// `cuMemcpyDtoHAsync_v2`. Until the copy runs there is poison in its target, which a program finds that does not
    /// wait for it.
    pub fn fetch(&mut self, source: Region, target: Region, stream: usize) -> Result<(), Status> {
        let stream = self.stream_for_work("copy to the host", stream)?;
        let fate = self.faults.copy();
        if fate == Fate::Refused {
            return Err(Status::Unknown);
        }
        if !is_mapped(&target) {
            self.report(Kind::HostReleased, format!("copy to {target}, which is not mapped"));
            return Err(Status::InvalidValue);
        }
        let pin = self.pinned.covering(&target, context::current());
        if pin.is_none() && !self.faults.unpinned_allowed() {
            self.report(Kind::Unpinned, format!("copy to {target}, which is not registered"));
        }
        self.use_on_stream(stream, source, false, "copy to the host")?;
        write_host(&target, &vec![POISON; target.bytes() as usize]);
        self.counters.copies += 1;
        self.counters.copied_bytes += source.bytes();
        let fails = fate == Fate::FailsLater;
        let mark = self.push(stream, Work::Fetch(Fetch { source, target, pin, fails }));
        if let Some(pin) = pin {
            self.pinned.note_copy(pin, mark);
        }
        Ok(())
    }
}

impl Fetch {
    /// Does the copy, if nothing forbids it by now.
    pub fn run(self, shared: &SharedDriver, epoch: u64, context: usize, random: &mut Random) {
        let mut driver = shared.lock();
        if driver.epoch != epoch {
            return;
        }
        if self.fails {
            driver.lose(context);
            return;
        }
        // A target that was unregistered was reported when that happened, and a source that is gone when it was freed.
        let is_registered = self.pin.is_none_or(|pin| driver.pinned.is_live(pin));
        let Some(bytes) = driver.memory.read(&self.source).filter(|_| is_registered) else {
            return;
        };
        match read_host(&self.target) {
            None => {
                let text = format!("{} was freed while a copy to it was pending", self.target);
                driver.report(Kind::HostReleased, text);
                return;
            }
            Some(found) if found.iter().any(|&byte| byte != POISON) => {
                let text = format!("{} was written to while a copy to it was pending", self.target);
                driver.report(Kind::TargetChanged, text);
            }
            Some(_) => {}
        }
        // The first half arrives before the second.
        let half = bytes.len() / 2;
        let parts = [(self.target.start(), &bytes[..half]), (self.target.start() + half as u64, &bytes[half..])];
        drop(driver);
        for (start, part) in parts {
            let driver = shared.lock();
            if driver.epoch != epoch || self.pin.is_some_and(|pin| !driver.pinned.is_live(pin)) {
                return;
            }
            if let Some(region) = Region::linear(start, part.len() as u64) {
                write_host(&region, part);
            }
            drop(driver);
            random.delay();
        }
    }
}
