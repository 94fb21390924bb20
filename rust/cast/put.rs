//! Writes of elements by position, on the CPU.

use crate::num::to_usize;
use std::ptr;

/// Bytes of a position.
pub const POSITION_BYTES: u64 = 4;

/// Elements to write to positions of a target.
#[derive(Clone, Copy, Debug)]
pub struct Put {
    /// Address of the `u32` numbers of the elements of the target.
    pub positions: u64,
    /// Address of the values, one for each position.
    pub values: u64,
    /// Address of the first element of the target.
    pub target: u64,
    /// Number of positions.
    pub elements: u64,
    /// Number of elements of the target. Nothing is written to positions beyond them.
    pub target_elements: u64,
    /// Bytes of an element: 1, 2, 4, 8 or 16.
    pub item_bytes: u64,
}

impl Put {
    /// Returns whether elements of this size can be written.
    pub fn is_possible(item_bytes: u64) -> bool {
        matches!(item_bytes, 1 | 2 | 4 | 8 | 16)
    }

    /// Writes all elements. Does nothing if their size is not possible. Addresses may have any alignment.
    ///
    /// # Safety
    /// Positions and values are readable. The target is writable, and nothing else uses the elements at the positions.
    pub unsafe fn run(&self) {
        // SAFETY: the caller's promise is the same.
        unsafe {
            match self.item_bytes {
                1 => self.run_as::<u8>(),
                2 => self.run_as::<u16>(),
                4 => self.run_as::<u32>(),
                8 => self.run_as::<u64>(),
                16 => self.run_as::<u128>(),
                _ => {}
            }
        }
    }

    /// # Safety
    /// As for [`Put::run`], with elements of the size of `T`.
    unsafe fn run_as<T: Copy>(&self) {
        let positions = ptr::with_exposed_provenance::<u32>(to_usize(self.positions));
        let values = ptr::with_exposed_provenance::<T>(to_usize(self.values));
        let target = ptr::with_exposed_provenance_mut::<T>(to_usize(self.target));
        for index in 0..to_usize(self.elements) {
            // SAFETY: the index is less than the number of positions and values, and the position was compared.
            unsafe {
                let position = u64::from(positions.add(index).read_unaligned());
                if position >= self.target_elements {
                    continue;
                }
                target.add(to_usize(position)).write_unaligned(values.add(index).read_unaligned());
            }
        }
    }
}
