//! Where on the machine memory lies. On a machine with several nodes, a GPU
//! reads memory of its own node fastest.

use memmap2::MmapRaw;
use std::fs;
use std::path::Path;

/// A node of the machine: some of its memory, near to some of its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node(u32);

/// The node of a PCI device such as `0000:3b:00.0`, or `None` where the machine has only one node or does not say.
pub fn of_pci_device(id: &str) -> Option<Node> {
    of_device(Path::new("/sys"), id)
}

/// As [`of_pci_device`], in a tree laid out as /sys is.
pub fn of_device(system: &Path, id: &str) -> Option<Node> {
    let has_several = system.join("devices/system/node/node1").exists();
    let path = system.join("bus/pci/devices").join(id.to_lowercase()).join("numa_node");
    // A device that is near to none has the node -1.
    let node = fs::read_to_string(path).ok()?.trim().parse().ok().filter(|_| has_several)?;
    tracing::debug!(id, node, "the device's node");
    Some(Node(node))
}

/// Asks that pages which are not there yet come from a node, if it has any left.
pub(crate) fn prefer(memory: &MmapRaw, Node(node): Node) {
    // The mask holds the nodes below 1024, the most that Linux can be built for.
    let mut mask = [0_u64; 16];
    let Some(word) = usize::try_from(node / 64).ok().and_then(|word| mask.get_mut(word)) else { return };
    *word = 1 << (node % 64);
    // SAFETY: the range is a mapping of ours, and the call changes where its pages will lie, not what they hold.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            memory.as_mut_ptr(),
            memory.len(),
            libc::MPOL_PREFERRED,
            mask.as_ptr(),
            // The kernel takes one bit less than it is told.
            u64::BITS as usize * mask.len() + 1,
            0,
        )
    };
    if result != 0 {
        tracing::debug!(node, error = %std::io::Error::last_os_error(), "staging is not on the device's node");
    }
}
