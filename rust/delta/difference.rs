//! Elements that differ between two versions of a block.

use crate::num::to_usize;

/// Bytes that are compared at once. A multiple of all sizes of elements.
const COMPARED_BYTES: usize = 64;
/// Elements whose numbers are stored at once: as many as most of the compared bytes have. A branch for each element would
/// be mispredicted.
const STORED_AT_ONCE: usize = 4;

/// Finds the elements that differ, with memory that is used again.
#[derive(Default)]
pub struct Difference {
    found: Vec<u32>,
}

impl Difference {
    /// Returns the numbers of the elements of `ITEM` bytes that differ, in ascending order. `ITEM` is 1, 2, 4, 8 or 16.
    pub fn find<const ITEM: usize>(&mut self, old: &[u8], new: &[u8]) -> &[u32] {
        // One bit for each of the bytes that are compared at once.
        let (item_log, compared) = (ITEM.trailing_zeros(), u64::BITS);
        let room = new.len() / ITEM + STORED_AT_ONCE;
        if self.found.len() < room {
            self.found.resize(room, 0);
        }
        let (old_parts, old_rest) = old.as_chunks();
        let (new_parts, new_rest) = new.as_chunks();
        let rest = (padded(old_rest), padded(new_rest));
        let (mut first, mut count) = (0, 0);
        for (old, new) in old_parts.iter().zip(new_parts).chain([(&rest.0, &rest.1)]) {
            let mut left = changed_items::<ITEM>(changed_bytes(old, new));
            let mut end = count;
            count += to_usize(left.count_ones().into());
            while let Some(stored) = self.found.get_mut(end..).and_then(<[u32]>::first_chunk_mut::<STORED_AT_ONCE>) {
                for number in stored {
                    *number = first + (left.trailing_zeros() >> item_log);
                    left &= left.wrapping_sub(1);
                }
                if left == 0 {
                    break;
                }
                end += STORED_AT_ONCE;
            }
            first += compared >> item_log;
        }
        self.found.get(..count).unwrap_or_default()
    }
}

fn padded(bytes: &[u8]) -> [u8; COMPARED_BYTES] {
    let mut padded = [0; COMPARED_BYTES];
    padded.iter_mut().zip(bytes).for_each(|(padded, &byte)| *padded = byte);
    padded
}

/// Returns a bit for each byte that differs.
#[cfg(target_arch = "x86_64")]
fn changed_bytes(old: &[u8; COMPARED_BYTES], new: &[u8; COMPARED_BYTES]) -> u64 {
    use std::arch::x86_64::{__m128i, _mm_cmpeq_epi8, _mm_movemask_epi8};
    let parts = old.as_chunks::<16>().0.iter().zip(new.as_chunks::<16>().0);
    let equal = parts.rev().fold(0, |equal, (&old, &new)| {
        let (old, new): (__m128i, __m128i) = (zerocopy::transmute!(old), zerocopy::transmute!(new));
        // SAFETY: all processors of this architecture have SSE2.
        let bits = unsafe { _mm_movemask_epi8(_mm_cmpeq_epi8(old, new)) };
        equal << 16 | u64::from(bits.cast_unsigned())
    });
    !equal
}

/// Returns a bit for each byte that differs.
#[cfg(not(target_arch = "x86_64"))]
fn changed_bytes(old: &[u8; COMPARED_BYTES], new: &[u8; COMPARED_BYTES]) -> u64 {
    /// All bits of each byte but the highest.
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    /// Moves bit 0 of each byte to the highest byte, in their order.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    let parts = old.as_chunks().0.iter().zip(new.as_chunks().0);
    parts.rev().fold(0, |changed, (&old, &new)| {
        let differing = u64::from_le_bytes(old) ^ u64::from_le_bytes(new);
        // The highest bit of each byte that is not zero.
        let marks = ((differing & LOW) + LOW | differing) & !LOW;
        changed << 8 | (marks >> 7).wrapping_mul(GATHER) >> 56
    })
}

/// Returns, of the bits of bytes, the first one of each element that has any.
fn changed_items<const ITEM: usize>(mut bytes: u64) -> u64 {
    let mut folded = 1;
    while folded < ITEM {
        bytes |= bytes >> folded;
        folded *= 2;
    }
    // A bit in every `ITEM`.
    bytes & (u64::MAX / ((1 << ITEM) - 1))
}
