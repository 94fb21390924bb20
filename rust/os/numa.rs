//! NUMA nodes. On a machine with several nodes, a GPU reads memory of its own node fastest.

use memmap2::MmapRaw;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::fs;
use std::path::Path;

/// NUMA node: part of the memory, close to some of the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node(u32);

/// Returns the node of a PCI device such as `0000:3b:00.0`, or `None` if the machine has only one node or the node is
/// unknown.
pub fn of_pci_device(id: &str) -> Option<Node> {
    of_device(Path::new("/sys"), id)
}

/// Returns the node of a PCI device as [`of_pci_device`] does, from a directory that replaces `/sys`.
pub fn of_device(system: &Path, id: &str) -> Option<Node> {
    let has_several = system.join("devices/system/node/node1").exists();
    let path = system.join("bus/pci/devices").join(id.to_lowercase()).join("numa_node");
    // The kernel reports -1 for a device without a node.
    let node = fs::read_to_string(path).ok()?.trim().parse().ok().filter(|_| has_several)?;
    tracing::debug!(id, node, "NUMA node of the device");
    Some(Node(node))
}

/// Returns the CPUs near a PCI device, from a directory as `/sys`, or `None` if they are unknown.
pub fn cpus_near(system: &Path, id: &str) -> Option<CpuSet> {
    let path = system.join("bus/pci/devices").join(id.to_lowercase()).join("local_cpulist");
    parse_cpus(&fs::read_to_string(path).ok()?)
}

/// Parses a list such as `0-15,32`. Returns `None` for an empty or a wrong one.
fn parse_cpus(list: &str) -> Option<CpuSet> {
    let mut cpus = CpuSet::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let last = last.parse().ok().filter(|last| *last < CpuSet::MAX_CPU)?;
        (first.parse().ok()?..=last).for_each(|cpu| cpus.set(cpu));
    }
    (cpus.count() > 0).then_some(cpus)
}

/// Moves this thread to those of the CPUs on which it may run, and does nothing if there are none.
pub fn move_to(cpus: &CpuSet) {
    let Ok(mut allowed) = sched_getaffinity(None) else { return };
    let before = allowed;
    (0..CpuSet::MAX_CPU).filter(|cpu| !cpus.is_set(*cpu)).for_each(|cpu| allowed.unset(cpu));
    if allowed.count() == 0 || allowed == before {
        return;
    }
    if let Err(error) = sched_setaffinity(None, &allowed) {
        tracing::debug!(%error, "a reader cannot move to the NUMA node of the device");
    }
}

/// Requests that pages not yet allocated come from `node`, if it has free memory.
pub(crate) fn prefer(memory: &MmapRaw, Node(node): Node) {
    // The mask covers 1024 nodes, the maximum that Linux can be configured for.
    let mut mask = [0_u64; 16];
    let Some(word) = usize::try_from(node / 64).ok().and_then(|word| mask.get_mut(word)) else { return };
    *word = 1 << (node % 64);
    // rustix has no mbind(2).
    // SAFETY: the range is a mapping that `memory` owns. The call changes the placement of its pages, not their contents.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            memory.as_mut_ptr(),
            memory.len(),
            libc::MPOL_PREFERRED,
            mask.as_ptr(),
            // The kernel uses one bit less than this number.
            u64::BITS as usize * mask.len() + 1,
            0,
        )
    };
    if result != 0 {
        tracing::debug!(node, error = %std::io::Error::last_os_error(), "cannot place staging on the NUMA node of the device");
    }
}
