//! Copies with stores that bypass the caches, for targets that are larger than the caches.
//!
//! An ordinary store reads the cache line of its target first, so that a large copy moves half as many bytes again.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

/// Bytes of a cache line. Targets that begin and end at a line are the fastest.
pub const LINE_BYTES: usize = 64;

/// Copies bytes to targets of the same lengths. Does what `copy_from_slice` does on processors without AVX.
pub fn copy_all<'a>(copies: impl Iterator<Item = (&'a [u8], &'a mut [u8])>) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx") {
        // SAFETY: the processor has AVX.
        copies.for_each(|(source, target)| unsafe { copy(source, target) });
        // SAFETY: every x86-64 processor has SSE2. Orders the stores before those that tell other threads of the copies.
        return unsafe { _mm_sfence() };
    }
    copies.for_each(|(source, target)| target.copy_from_slice(source));
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
fn copy(source: &[u8], target: &mut [u8]) {
    const VECTOR_BYTES: usize = size_of::<__m256i>();
    let before = target.as_ptr().align_offset(VECTOR_BYTES).min(target.len()).min(source.len());
    let ((source_head, source), (target_head, target)) = (source.split_at(before), target.split_at_mut(before));
    target_head.copy_from_slice(source_head);
    let (source_vectors, source_tail) = source.as_chunks::<VECTOR_BYTES>();
    let (target_vectors, target_tail) = target.as_chunks_mut::<VECTOR_BYTES>();
    source_vectors.iter().zip(target_vectors).for_each(|(source, target)| {
        // SAFETY: the source is readable. The target is writable and aligned, because the bytes before the first aligned
        // address were taken off, and a vector is as large as its alignment.
        unsafe { _mm256_stream_si256(target.as_mut_ptr().cast(), _mm256_loadu_si256(source.as_ptr().cast())) };
    });
    target_tail.copy_from_slice(source_tail);
}
