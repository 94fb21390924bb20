//! Device memory: allocations, and who uses which of their bytes.
//!
//! An allocation's address means nothing to the host; its bytes are kept here.
//! Allocations lie far apart, so that a write beyond the end of one never lands
//! in another.

use crate::abi::{Kind, POISON, Status};
use crate::clock::{Clock, Mark};
use crate::driver::Driver;
use crate::region::Region;
use std::collections::BTreeMap;

/// Where the memory of device 0 begins: above what any process can map, on
/// x86-64 and on 64-bit Arm, so that touching it on the host faults.
const DEVICE_BASE: u64 = 0x00D0_0000_0000_0000;
/// The distance between the memories of two devices.
const DEVICE_STRIDE: u64 = 1 << 44;
/// Every allocation begins at a multiple of this, as PyTorch's do.
const ALIGNMENT_BYTES: u64 = 512;
/// At least this much lies between two allocations.
const GAP_BYTES: u64 = 1 << 20;

/// One piece of work that reads or writes device memory.
#[derive(Clone, Debug)]
pub struct Access {
    /// Which bytes.
    pub region: Region,
    /// Whether it writes them.
    pub writes: bool,
    /// The work that does it.
    pub mark: Mark,
    /// In words, for the report.
    pub what: String,
}

/// A live block of device memory.
#[derive(Debug)]
struct Allocation {
    device: usize,
    bytes: Vec<u8>,
    /// What the bytes will be when all copies that are queued have run.
    foreseen: Vec<u8>,
    /// Accesses that the host does not know to be finished yet.
    accesses: Vec<Access>,
}

/// The memory of all devices, by address.
#[derive(Debug, Default)]
pub struct DeviceMemory {
    live: BTreeMap<u64, Allocation>,
    /// Lengths of the blocks that were freed. Addresses are never used again.
    freed: BTreeMap<u64, u64>,
    /// Bytes of address space used up, per device.
    used: BTreeMap<usize, u64>,
}

impl DeviceMemory {
    /// A new block of `bytes` bytes of poison.
    pub fn allocate(&mut self, device: usize, bytes: u64) -> u64 {
        let used = self.used.entry(device).or_insert(GAP_BYTES);
        let address = DEVICE_BASE + device as u64 * DEVICE_STRIDE + *used;
        *used += bytes.next_multiple_of(ALIGNMENT_BYTES) + GAP_BYTES;
        let bytes = vec![POISON; bytes as usize];
        self.live.insert(address, Allocation { device, foreseen: bytes.clone(), bytes, accesses: Vec::new() });
        address
    }

    /// How many blocks are alive.
    pub fn live(&self) -> usize {
        self.live.len()
    }

    /// The bytes of `region`, if all of it lies in one live block.
    pub fn read(&self, region: &Region) -> Option<Vec<u8>> {
        let (base, block) = self.block(region)?;
        Some(region.gather(&block.bytes[(region.start() - base) as usize..]))
    }

    /// The same, as it will be for work that is queued now. It follows the order
    /// of the calls, which every order of the work agrees with if no wait is
    /// missing. What kernels write is not foreseen.
    pub fn read_foreseen(&self, region: &Region) -> Option<Vec<u8>> {
        let (base, block) = self.block(region)?;
        Some(region.gather(&block.foreseen[(region.start() - base) as usize..]))
    }

    /// Fills the rows of `region` with `bytes`, one after the other; does
    /// nothing if not all of it lies in one live block.
    pub fn write(&mut self, region: &Region, bytes: &[u8]) {
        if let Some((base, block)) = self.block_mut(region) {
            region.scatter(bytes, &mut block.bytes[(region.start() - base) as usize..]);
        }
    }

    /// As [`DeviceMemory::write`], for work that is queued now.
    pub fn foresee(&mut self, region: &Region, bytes: &[u8]) {
        if let Some((base, block)) = self.block_mut(region) {
            region.scatter(bytes, &mut block.foreseen[(region.start() - base) as usize..]);
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

    /// Why `region` is not inside one live block, in words.
    fn explain(&self, region: &Region) -> (Kind, String) {
        let freed = self.freed.range(..=region.start()).next_back();
        if let Some((base, bytes)) = freed.filter(|(base, bytes)| region.start() < *base + *bytes) {
            return (Kind::UseAfterFree, format!("the block {base:#x} ({bytes} bytes) was freed before"));
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

    /// `cuMemFree_v2`. It stands for giving a block back to an allocator that
    /// hands it out again at once, so all work on it must be known to be done.
    pub fn free(&mut self, address: u64) -> Result<(), Status> {
        let Some(block) = self.memory.live.remove(&address) else {
            let (kind, what) = match self.memory.freed.contains_key(&address) {
                true => (Kind::DoubleFree, "was freed before"),
                false => (Kind::OutOfBounds, "is not the start of an allocation"),
            };
            self.report(kind, format!("free of {address:#x}, which {what}"));
            return Err(Status::InvalidValue);
        };
        self.memory.freed.insert(address, block.bytes.len() as u64);
        if self.is_lost(self.devices[block.device].context) {
            return Ok(());
        }
        if let Some(access) = block.accesses.iter().find(|access| !self.order.host.covers(access.mark)) {
            let text = format!("free of {address:#x}; nobody waited for the {} that uses it", access.what);
            self.report(Kind::FreedInUse, text);
        }
        Ok(())
    }

    /// Reports it if not all of `region` lies in one live block.
    pub fn must_be_live(&mut self, region: &Region, what: &str) -> Result<(), Status> {
        if self.memory.block(region).is_some() {
            return Ok(());
        }
        let (kind, why) = self.memory.explain(region);
        self.report(kind, format!("{what} at {region}; {why}"));
        Err(Status::InvalidValue)
    }

    /// Checks that work on `device` may use `access.region` after everything
    /// that `clock` covers, and remembers that it does.
    pub fn use_memory(&mut self, device: usize, clock: &Clock, access: Access) -> Result<(), Status> {
        self.must_be_live(&access.region, &access.what)?;
        let Some((base, block)) = self.memory.block(&access.region) else {
            return Err(Status::InvalidValue);
        };
        let owner = block.device;
        let conflict = block.conflict(&access.region, access.writes, clock).cloned();
        if owner != device {
            let text = format!("{} uses {} of device {owner}", access.what, access.region);
            self.report(Kind::WrongDevice, text);
        }
        if let Some(earlier) = conflict {
            let text = format!(
                "{} at {} is not ordered after the {} at {}",
                access.what, access.region, earlier.what, earlier.region
            );
            self.report(Kind::MissingWait, text);
        }
        if let Some(block) = self.memory.live.get_mut(&base) {
            // Whatever the host knows to be finished comes before all that the
            // program does from now on, and can never conflict again.
            let host = &self.order.host;
            block.accesses.retain(|access| !host.covers(access.mark));
            block.accesses.push(access);
        }
        Ok(())
    }

    /// `sim_read`: what a synchronous copy to the host would see.
    pub fn read_memory(&mut self, address: u64, bytes: u64) -> Result<Vec<u8>, Status> {
        let region = self.host_region("host read", address, bytes, false)?;
        self.memory.read(&region).ok_or(Status::InvalidValue)
    }

    /// `sim_write`: what a synchronous copy from the host would do.
    pub fn write_memory(&mut self, address: u64, bytes: &[u8]) -> Result<(), Status> {
        let region = self.host_region("host write", address, bytes.len() as u64, true)?;
        self.memory.write(&region, bytes);
        self.memory.foresee(&region, bytes);
        Ok(())
    }

    fn host_region(&mut self, what: &str, address: u64, bytes: u64, writes: bool) -> Result<Region, Status> {
        let region = Region::linear(address, bytes).ok_or(Status::InvalidValue)?;
        self.must_be_live(&region, what)?;
        let Some((_, block)) = self.memory.block(&region) else {
            return Err(Status::InvalidValue);
        };
        if let Some(earlier) = block.conflict(&region, writes, &self.order.host) {
            let text = format!("{what} at {region}, but nobody waited for the {}", earlier.what);
            self.report(Kind::MissingWait, text);
        }
        Ok(region)
    }
}

impl Allocation {
    /// An earlier access that may run at the same time as a new one, or after.
    fn conflict(&self, region: &Region, writes: bool, clock: &Clock) -> Option<&Access> {
        self.accesses.iter().find(|earlier| {
            (earlier.writes || writes) && !clock.covers(earlier.mark) && earlier.region.overlaps(region)
        })
    }
}
