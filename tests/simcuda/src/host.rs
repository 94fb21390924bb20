//! Host memory: registered (pinned) ranges, and checked reads and writes.

use crate::abi::{Kind, REGISTER_PORTABLE, Status};
use crate::clock::{Clock, WorkId};
use crate::driver::Driver;
use crate::region::Region;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::LazyLock;

/// Identifier of a registration. A new registration at the same address has a new identifier.
pub type PinId = u64;

/// Registered range of host memory.
#[derive(Debug)]
struct Pin {
    id: PinId,
    bytes: u64,
    context: usize,
    portable: bool,
    /// Copies that use the range.
    copies: Clock,
}

/// Registered ranges, by start address.
#[derive(Debug, Default)]
pub struct PinnedMemory {
    live: BTreeMap<u64, Pin>,
    next: PinId,
    bytes: u64,
    bytes_peak: u64,
}

impl PinnedMemory {
    /// Returns the registration that pins all of `region` in `context`.
    pub fn covering(&self, region: &Region, context: usize) -> Option<PinId> {
        let (&start, pin) = self.live.range(..=region.start()).next_back()?;
        let usable = pin.portable || pin.context == context;
        (usable && region.end() <= start + pin.bytes).then_some(pin.id)
    }

    /// Returns whether the registration is alive.
    pub fn is_live(&self, id: PinId) -> bool {
        self.live.values().any(|pin| pin.id == id)
    }

    /// Records that a queued copy uses a registration.
    pub fn add_copy(&mut self, id: Option<PinId>, copy: WorkId) {
        if let Some(pin) = self.live.values_mut().find(|pin| Some(pin.id) == id) {
            pin.copies.include(copy);
        }
    }

    /// Returns the number of live registrations.
    pub fn live(&self) -> usize {
        self.live.len()
    }

    /// Returns the number of registered bytes, and its peak.
    pub fn bytes(&self) -> (u64, u64) {
        (self.bytes, self.bytes_peak)
    }

    /// Describes each live registration.
    pub fn leaks(&self) -> Vec<String> {
        let leak = |(start, pin): (&u64, &Pin)| format!("{} bytes at {start:#x} are still registered", pin.bytes);
        self.live.iter().map(leak).collect()
    }

    fn overlaps(&self, start: u64, bytes: u64) -> bool {
        let before = self.live.range(..start + bytes).next_back();
        before.is_some_and(|(&other, pin)| start < other + pin.bytes)
    }
}

impl Driver {
    /// `cuMemHostRegister_v2`.
    pub fn register(&mut self, start: u64, bytes: u64, flags: u32) -> Result<(), Status> {
        let context = self.current_healthy()?;
        self.counters.allocations += 1;
        self.faults.pinning()?;
        let region = Region::linear(start, bytes).ok_or(Status::InvalidValue)?;
        if start == 0 || !is_mapped(&region) {
            return Err(Status::InvalidValue);
        }
        if self.pinned.overlaps(start, bytes) {
            return Err(Status::HostMemoryAlreadyRegistered);
        }
        let pinned = &mut self.pinned;
        pinned.next += 1;
        pinned.bytes += bytes;
        pinned.bytes_peak = pinned.bytes_peak.max(pinned.bytes);
        let portable = flags & REGISTER_PORTABLE != 0;
        let pin = Pin { id: pinned.next, bytes, context, portable, copies: Clock::default() };
        pinned.live.insert(start, pin);
        self.counters.registrations += 1;
        Ok(())
    }

    /// `cuMemHostUnregister`. The call releases the memory even if the context is
    /// lost, as the destruction of the context would.
    pub fn unregister(&mut self, start: u64) -> Result<(), Status> {
        let context = self.current_healthy();
        let Some(pin) = self.pinned.live.remove(&start) else {
            self.report(Kind::DoubleFree, format!("{start:#x} is unregistered, but it is not registered"));
            return Err(Status::HostMemoryNotRegistered);
        };
        self.pinned.bytes -= pin.bytes;
        let mapped = Region::linear(start, pin.bytes).is_some_and(|region| is_mapped(&region));
        if !mapped {
            let text = format!("{} bytes at {start:#x} were freed while they were registered", pin.bytes);
            self.report(Kind::HostReleased, text);
        }
        if !self.order.host.covers_all(&pin.copies) {
            let text = format!(
                "{} bytes at {start:#x} are unregistered; the host has not waited for a copy that uses them",
                pin.bytes
            );
            self.report(Kind::HostReleased, text);
        }
        context.map(|_| ())
    }
}

/// Returns the rows of `region` in host memory, or `None` if they are not mapped.
/// The operating system reads the memory, so that a read of unmapped memory is an
/// error and does not end the process.
pub fn read_host(region: &Region) -> Option<Vec<u8>> {
    let mut span = vec![0; region.span() as usize];
    own_memory()?.read_exact_at(&mut span, region.start()).ok()?;
    Some(if region.bytes() == region.span() { span } else { region.gather(&span) })
}

/// Writes to contiguous host memory through the operating system, like [`read_host`].
pub fn write_host(region: &Region, bytes: &[u8]) {
    // A release of the memory was reported when it happened.
    let _ = own_memory().map(|memory| memory.write_all_at(bytes, region.start()));
}

/// Returns whether the first and the last byte of `region` are readable.
pub fn is_mapped(region: &Region) -> bool {
    let mut byte = [0];
    let mut reads = |address| own_memory().is_some_and(|memory| memory.read_exact_at(&mut byte, address).is_ok());
    reads(region.start()) && reads(region.end() - 1)
}

fn own_memory() -> Option<&'static File> {
    static MEMORY: LazyLock<Option<File>> =
        LazyLock::new(|| File::options().read(true).write(true).open("/proc/self/mem").ok());
    MEMORY.as_ref()
}
