//! Device memory: allocations, and the accesses to their bytes.
//!
//! The address of an allocation is invalid on the host; the simulator stores the
//! bytes. Allocations lie far apart, so that a write beyond the end of an
//! allocation never reaches another allocation.

use crate::abi::{Kind, POISON, Status};
use crate::clock::{Clock, WorkId};
use crate::driver::Driver;
use crate::region::Region;
use std::collections::BTreeMap;

/// Start of the memory of device 0: above the addresses that a process can map on
/// x86-64 and 64-bit Arm, so that an access on the host faults.
const DEVICE_BASE: u64 = 0x00D0_0000_0000_0000;
/// Distance between the memories of two devices.
const DEVICE_STRIDE: u64 = 1 << 44;
/// Alignment of allocations, as in PyTorch's allocator.
const ALIGNMENT_BYTES: u64 = 512;
/// Smallest gap between two allocations.
const GAP_BYTES: u64 = 1 << 20;

/// Access of queued work to device memory.
#[derive(Clone, Debug)]
pub struct Access {
    /// Accessed bytes.
    pub region: Region,
    /// Whether the access is a write.
    pub writes: bool,
    /// Work that accesses the bytes.
    pub id: WorkId,
    /// Description of the work, for reports.
    pub operation: String,
}

/// Live allocation of device memory.
#[derive(Debug)]
struct Allocation {
    device: usize,
    bytes: Vec<u8>,
    /// Bytes after all queued copies will have run.
    expected: Vec<u8>,
    /// Accesses for which the host has not waited.
    accesses: Vec<Access>,
}

/// Memory of all devices, by address.
#[derive(Debug, Default)]
pub struct DeviceMemory {
    live: BTreeMap<u64, Allocation>,
    /// Lengths of freed allocations. Addresses are never reused.
    freed: BTreeMap<u64, u64>,
    /// Bytes of used address space, per device.
    used: BTreeMap<usize, u64>,
}

impl DeviceMemory {
    /// Allocates `bytes` bytes, filled with poison, and returns their address.
    pub fn allocate(&mut self, device: usize, bytes: u64) -> u64 {
        let used = self.used.entry(device).or_insert(GAP_BYTES);
        let address = DEVICE_BASE + device as u64 * DEVICE_STRIDE + *used;
        *used += bytes.next_multiple_of(ALIGNMENT_BYTES) + GAP_BYTES;
        let bytes = vec![POISON; bytes as usize];
        self.live.insert(address, Allocation { device, expected: bytes.clone(), bytes, accesses: Vec::new() });
        address
    }

    /// Returns the bytes of `region`, or `None` unless one live allocation contains the region.
    pub fn read(&self, region: &Region) -> Option<Vec<u8>> {
        let (base, block) = self.block(region)?;
        Some(region.gather(&block.bytes[(region.start() - base) as usize..]))
    }

    /// Returns the bytes of `region` that work queued next will read. They follow
    /// from the order of the calls, which every order of execution agrees with
    /// unless a wait is missing. Writes of kernels are not included.
    pub fn read_expected(&self, region: &Region) -> Option<Vec<u8>> {
        let (base, block) = self.block(region)?;
        Some(region.gather(&block.expected[(region.start() - base) as usize..]))
    }

    /// Writes `bytes` to the rows of `region`. Has no effect unless one live
    /// allocation contains the region.
    pub fn write(&mut self, region: &Region, bytes: &[u8]) {
        if let Some((base, block)) = self.block_mut(region) {
            region.scatter(bytes, &mut block.bytes[(region.start() - base) as usize..]);
        }
    }

    /// Records the bytes that queued work will write, for [`DeviceMemory::read_expected`].
    pub fn write_expected(&mut self, region: &Region, bytes: &[u8]) {
        if let Some((base, block)) = self.block_mut(region) {
            region.scatter(bytes, &mut block.expected[(region.start() - base) as usize..]);
        }
    }

    fn block_mut(&mut self, region: &Region) -> Option<(u64, &mut Allocation)> {
        let (base, _) = self.block(region)?;
        self.live.get_mut(&base).map(|block| (base, block))
    }

    fn block(&self, region: &Region) -> Option<(u64, &Allocation)> {
        let (&base, block) = self.live.range(..=region.start()).next_back()?;
        (region.end() <= base + block.bytes.len() as u64).then_some((base, block))
    }

    /// Describes why no live allocation contains `region`.
    fn explain(&self, region: &Region) -> (Kind, String) {
        let freed = self.freed.range(..=region.start()).next_back();
        if let Some((base, bytes)) = freed.filter(|(base, bytes)| region.start() < *base + *bytes) {
            return (Kind::UseAfterFree, format!("the allocation {base:#x} ({bytes} bytes) was freed before"));
        }
        let live = self.live.range(..=region.start()).next_back();
        let nearest = live.map_or("no allocation begins below it".to_owned(), |(base, block)| {
            format!("the nearest allocation is {base:#x} ({} bytes)", block.bytes.len())
        });
        (Kind::OutOfBounds, nearest)
    }
}

impl Driver {
    /// `cuMemAlloc_v2` in the current context.
    pub fn allocate(&mut self, bytes: u64) -> Result<u64, Status> {
        let device = self.current_device()?;
        self.count_allocation()?;
        if bytes == 0 {
            return Err(Status::InvalidValue);
        }
        Ok(self.memory.allocate(device, bytes))
    }

    /// `cuMemFree_v2`. Models the return of a block to an allocator that reuses the
    /// block at once, so the host must have waited for all work on the memory.
    pub fn free(&mut self, address: u64) -> Result<(), Status> {
        let Some(block) = self.memory.live.remove(&address) else {
            let (kind, state) = match self.memory.freed.contains_key(&address) {
                true => (Kind::DoubleFree, "was freed before"),
                false => (Kind::OutOfBounds, "is not the start of an allocation"),
            };
            self.report(kind, format!("free of {address:#x}, which {state}"));
            return Err(Status::InvalidValue);
        };
        self.memory.freed.insert(address, block.bytes.len() as u64);
        if self.is_lost(self.devices[block.device].context) {
            return Ok(());
        }
        if let Some(access) = block.accesses.iter().find(|access| !self.order.host.covers(access.id)) {
            let text =
                format!("free of {address:#x}; the host has not waited for the {} that uses it", access.operation);
            self.report(Kind::FreedInUse, text);
        }
        Ok(())
    }

    /// Reports a region that no live allocation contains.
    pub fn check_live(&mut self, region: &Region, operation: &str) -> Result<(), Status> {
        if self.memory.block(region).is_some() {
            return Ok(());
        }
        let (kind, why) = self.memory.explain(region);
        self.report(kind, format!("{operation} at {region}; {why}"));
        Err(Status::InvalidValue)
    }

    /// Checks that work on `device` may access `access.region` after all work in
    /// `clock`, and records the access.
    pub fn add_access(&mut self, device: usize, clock: &Clock, access: Access) -> Result<(), Status> {
        self.check_live(&access.region, &access.operation)?;
        let Some((base, block)) = self.memory.block(&access.region) else {
            return Err(Status::InvalidValue);
        };
        let owner = block.device;
        let conflict = block.conflict(&access.region, access.writes, clock).cloned();
        if owner != device {
            let text = format!("{} uses {} of device {owner}", access.operation, access.region);
            self.report(Kind::WrongDevice, text);
        }
        if let Some(earlier) = conflict {
            let text = format!(
                "{} at {} is not ordered after the {} at {}",
                access.operation, access.region, earlier.operation, earlier.region
            );
            self.report(Kind::MissingWait, text);
        }
        if let Some(block) = self.memory.live.get_mut(&base) {
            // An access for which the host has waited happens before all later
            // calls, and can never conflict again.
            let host = &self.order.host;
            block.accesses.retain(|access| !host.covers(access.id));
            block.accesses.push(access);
        }
        Ok(())
    }

    /// `sim_read`: a synchronous copy to the host.
    pub fn read_memory(&mut self, address: u64, bytes: u64) -> Result<Vec<u8>, Status> {
        let region = self.host_region("host read", address, bytes, false)?;
        self.memory.read(&region).ok_or(Status::InvalidValue)
    }

    /// `sim_write`: a synchronous copy from the host.
    pub fn write_memory(&mut self, address: u64, bytes: &[u8]) -> Result<(), Status> {
        let region = self.host_region("host write", address, bytes.len() as u64, true)?;
        self.memory.write(&region, bytes);
        self.memory.write_expected(&region, bytes);
        Ok(())
    }

    fn host_region(&mut self, operation: &str, address: u64, bytes: u64, writes: bool) -> Result<Region, Status> {
        let region = Region::linear(address, bytes).ok_or(Status::InvalidValue)?;
        self.check_live(&region, operation)?;
        let Some((_, block)) = self.memory.block(&region) else {
            return Err(Status::InvalidValue);
        };
        if let Some(earlier) = block.conflict(&region, writes, &self.order.host) {
            let text = format!("{operation} at {region}, but the host has not waited for the {}", earlier.operation);
            self.report(Kind::MissingWait, text);
        }
        Ok(region)
    }
}

impl Allocation {
    /// Returns an earlier access that may run at the same time as a new access, or after it.
    fn conflict(&self, region: &Region, writes: bool, clock: &Clock) -> Option<&Access> {
        self.accesses
            .iter()
            .find(|earlier| (earlier.writes || writes) && !clock.covers(earlier.id) && earlier.region.overlaps(region))
    }
}
