//! Copies from device memory to host memory.

use crate::abi::{Kind, POISON, Status};
use crate::driver::{Driver, SharedDriver};
use crate::host::{PinId, read_host, write_host};
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
}

impl Driver {
    /// `cuMemcpyDtoHAsync_v2`. Fills the target with poison until the copy runs, so that a program without a wait reads
    /// poison.
    pub fn copy_to_host(&mut self, source: Region, target: Region, stream: usize) -> Result<(), Status> {
        let (stream, outcome, pin) = self.begin_copy("copy to the host", &target, source, false, stream)?;
        write_host(&target, &vec![POISON; target.bytes() as usize]);
        let id = self.push(stream, outcome.of(Work::CopyToHost(CopyToHost { source, target, pin })));
        self.pinned.add_copy(pin, id);
        Ok(())
    }
}

impl CopyToHost {
    /// Copies, unless a buffer is no longer valid.
    pub fn run(self, shared: &SharedDriver, epoch: u64, random: &mut Random) {
        let mut driver = shared.lock();
        if driver.epoch != epoch {
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
