//! Elements that differ between two versions of a block.

use crate::num::to_usize;

/// Bytes that are compared at once. A multiple of all sizes of elements.
const COMPARED_BYTES: usize = 64;
/// Elements whose numbers are stored at once: as many as most of the compared bytes have. A branch for each element would
/// be mispredicted. Four take a quarter more time where 2% of the elements change, and as much where 10% do.
const STORED_AT_ONCE: usize = 3;

/// Finds the elements that differ, with memory that is used again.
#[derive(Default)]
pub struct Difference {
    found: Vec<u32>,
}

impl Difference {
    /// Returns the numbers of the elements of `ITEM` bytes that differ, in ascending order. `ITEM` is 1, 2, 4, 8 or 16.
    pub fn find<const ITEM: usize>(&mut self, old: &[u8], new: &[u8]) -> &[u32] {
        let room = new.len() / ITEM + STORED_AT_ONCE;
        if self.found.len() < room {
            self.found.resize(room, 0);
        }
        let count = find_changes::<ITEM>(old, new, &mut self.found);
        self.found.get(..count).unwrap_or_default()
    }

    /// Returns what [`Difference::find`] does, given the offsets of all bytes that may differ, in ascending order.
    pub fn find_among<const ITEM: usize>(&mut self, old: &[u8], new: &[u8], candidates: &[u32]) -> &[u32] {
        let (old, new) = (old.as_chunks::<ITEM>().0, new.as_chunks::<ITEM>().0);
        if self.found.len() < candidates.len() {
            self.found.resize(candidates.len(), 0);
        }
        let (mut next, mut count) = (0, 0);
        for offset in candidates {
            let number = offset >> ITEM.trailing_zeros();
            let index = to_usize(number.into());
            if let Some(found) = self.found.get_mut(count) {
                *found = number;
            }
            // Without a branch for each element.
            count += usize::from((number >= next) & (old.get(index) != new.get(index)));
            next = number + 1;
        }
        self.found.get(..count).unwrap_or_default()
    }
}

/// Writes the numbers of the elements that differ, and returns how many there are.
fn find_changes<const ITEM: usize>(old: &[u8], new: &[u8], found: &mut [u32]) -> usize {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi1") && is_x86_feature_detected!("popcnt") {
        // SAFETY: the processor has these instructions.
        return unsafe {
            match is_x86_feature_detected!("avx512bw") {
                true => find_changes_avx512::<ITEM>(old, new, found),
                false => find_changes_avx2::<ITEM>(old, new, found),
            }
        };
    }
    find_changes_of_parts::<ITEM>(old, new, found, changed_bytes)
}

/// Runs the same loop, with one instruction that compares 64 bytes. It takes a third of the time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bw,bmi1,popcnt")]
fn find_changes_avx512<const ITEM: usize>(old: &[u8], new: &[u8], found: &mut [u32]) -> usize {
    use std::arch::x86_64::{__m512i, _mm512_cmpneq_epi8_mask};
    find_changes_of_parts::<ITEM>(old, new, found, |old, new| {
        let (old, new): (__m512i, __m512i) = (zerocopy::transmute!(*old), zerocopy::transmute!(*new));
        _mm512_cmpneq_epi8_mask(old, new)
    })
}

/// Runs the same loop, with instructions that compare 32 bytes, and that count bits.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,popcnt")]
fn find_changes_avx2<const ITEM: usize>(old: &[u8], new: &[u8], found: &mut [u32]) -> usize {
    use std::arch::x86_64::{__m256i, _mm256_cmpeq_epi8, _mm256_movemask_epi8};
    find_changes_of_parts::<ITEM>(old, new, found, |old, new| {
        let parts = old.as_chunks::<32>().0.iter().zip(new.as_chunks::<32>().0);
        let equal = parts.rev().fold(0, |equal, (&old, &new)| {
            let (old, new): (__m256i, __m256i) = (zerocopy::transmute!(old), zerocopy::transmute!(new));
            equal << 32 | u64::from(_mm256_movemask_epi8(_mm256_cmpeq_epi8(old, new)).cast_unsigned())
        });
        !equal
    })
}

#[inline(always)]
fn find_changes_of_parts<const ITEM: usize>(
    old: &[u8],
    new: &[u8],
    found: &mut [u32],
    changed_bytes: impl Fn(&[u8; COMPARED_BYTES], &[u8; COMPARED_BYTES]) -> u64,
) -> usize {
    let ((old, old_rest), (new, new_rest)) = (old.as_chunks(), new.as_chunks());
    let (mut first, mut count) = (0, 0);
    for (old, new) in old.iter().zip(new) {
        count = store::<ITEM>(changed_items::<ITEM>(changed_bytes(old, new)), first, found, count);
        // One bit for each of the bytes that are compared at once.
        first += u64::BITS >> ITEM.trailing_zeros();
    }
    let rest = changed_bytes(&padded(old_rest), &padded(new_rest));
    store::<ITEM>(changed_items::<ITEM>(rest), first, found, count)
}

/// Writes the numbers of the elements whose bits are set, after the first `count` in `found`. Element `first` has bit 0.
/// Returns how many numbers `found` has then.
#[inline(always)]
fn store<const ITEM: usize>(mut changed: u64, first: u32, found: &mut [u32], count: usize) -> usize {
    let mut end = count;
    let count = count + to_usize(changed.count_ones().into());
    while let Some(stored) = found.get_mut(end..).and_then(<[u32]>::first_chunk_mut::<STORED_AT_ONCE>) {
        for number in stored {
            *number = first + (changed.trailing_zeros() >> ITEM.trailing_zeros());
            changed &= changed.wrapping_sub(1);
        }
        if changed == 0 {
            break;
        }
        end += STORED_AT_ONCE;
    }
    count
}

fn padded(bytes: &[u8]) -> [u8; COMPARED_BYTES] {
    let mut padded = [0; COMPARED_BYTES];
    padded.iter_mut().zip(bytes).for_each(|(padded, &byte)| *padded = byte);
    padded
}

/// Returns a bit for each byte that differs.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
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
#[inline(always)]
fn changed_bytes(old: &[u8; COMPARED_BYTES], new: &[u8; COMPARED_BYTES]) -> u64 {
    /// All bits of each byte but the highest.
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    /// Moves bit 0 of each byte to the highest byte, in their order.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    let parts = old.as_chunks().0.iter().zip(new.as_chunks().0);
    parts.rev().fold(0, |changed, (&old, &new)| {
        let differing = u64::from_le_bytes(old) ^ u64::from_le_bytes(new);
        // The highest bit of each byte that is not zero.
        let marks = (((differing & LOW) + LOW) | differing) & !LOW;
        changed << 8 | (marks >> 7).wrapping_mul(GATHER) >> 56
    })
}

/// Returns, of the bits of bytes, the first one of each element that has any.
#[inline(always)]
fn changed_items<const ITEM: usize>(mut bytes: u64) -> u64 {
    let mut folded = 1;
    while folded < ITEM {
        bytes |= bytes >> folded;
        folded *= 2;
    }
    // A bit in every `ITEM`.
    bytes & (u64::MAX / ((1 << ITEM) - 1))
}
