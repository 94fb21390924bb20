//! Copies from device memory to host memory.

use crate::abi::{Kind, POISON, Status};
use crate::context;
use crate::driver::{Driver, SharedDriver};
use crate::fault::Outcome;
use crate::host::{PinId, is_mapped, read_host, write_host};
use crate::random::Random;
use crate::region::Region;
use crate::stream::Work;

/// Queued copy from device memory to host memory.
#[derive(Debug)]
pub struct CopyToHost {
    source: Region,
    target: Region,
    /// Registration of the target, or `None` for pageable memory.
    pin: Option<PinId>,
    fails: bool,
}

impl Driver {
    /// `cuMemcpyDtoHAsync_v2`. Fills the target with poison until the copy runs, so that a program without a wait reads
    /// poison.
    pub fn copy_to_host(&mut self, source: Region, target: Region, stream: usize) -> Result<(), Status> {
        let stream = self.stream_for_work("copy to the host", stream)?;
        let outcome = self.faults.copy();
        if outcome == Outcome::Rejected {
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
        self.access_on_stream(stream, source, false, "copy to the host")?;
        write_host(&target, &vec![POISON; target.bytes() as usize]);
        self.count_copy(stream, source.bytes());
        let fails = outcome == Outcome::FailsLater;
        let id = self.push(stream, Work::CopyToHost(CopyToHost { source, target, pin, fails }));
        if let Some(pin) = pin {
            self.pinned.add_copy(pin, id);
        }
        Ok(())
    }
}

impl CopyToHost {
    /// Copies, unless the context is lost or a buffer is no longer valid.
    pub fn run(self, shared: &SharedDriver, epoch: u64, context: usize, random: &mut Random) {
        let mut driver = shared.lock();
        if driver.epoch != epoch {
            return;
        }
        if self.fails {
            driver.set_lost(context);
            return;
        }
        // The unregistration of the target and the free of the source were reported when they happened.
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
                let text = format!("{} was written while a copy to it was pending", self.target);
                driver.report(Kind::TargetChanged, text);
            }
            Some(_) => {}
        }
        // The first half arrives before the second.
        let half = bytes.len() / 2;
        let halves = [(self.target.start(), &bytes[..half]), (self.target.start() + half as u64, &bytes[half..])];
        drop(driver);
        for (start, bytes) in halves {
            let driver = shared.lock();
            if driver.epoch != epoch || self.pin.is_some_and(|pin| !driver.pinned.is_live(pin)) {
                return;
            }
            if let Some(region) = Region::linear(start, bytes.len() as u64) {
                write_host(&region, bytes);
            }
            drop(driver);
            random.delay();
        }
    }
}
