//! Copies with stores that bypass the caches, for targets that are larger than the caches.
//!
//! An ordinary store reads the cache line of its target first, so that a large copy moves half as many bytes again.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

/// Copies bytes to a target of the same length.
#[cfg(target_arch = "x86_64")]
pub(super) fn copy(source: &[u8], target: &mut [u8]) {
    const VECTOR_BYTES: usize = size_of::<__m128i>();
    let before = target.as_ptr().align_offset(VECTOR_BYTES).min(target.len()).min(source.len());
    let ((source_head, source), (target_head, target)) = (source.split_at(before), target.split_at_mut(before));
    target_head.copy_from_slice(source_head);
    let (source_vectors, source_tail) = source.as_chunks::<VECTOR_BYTES>();
    let (target_vectors, target_tail) = target.as_chunks_mut::<VECTOR_BYTES>();
    source_vectors.iter().zip(target_vectors).for_each(|(source, target)| {
        // SAFETY: every x86-64 processor has SSE2. The source is readable. The target is writable and aligned, because the
        // bytes before the first aligned address were taken off, and a vector is as large as its alignment.
        unsafe { _mm_stream_si128(target.as_mut_ptr().cast(), _mm_loadu_si128(source.as_ptr().cast())) };
    });
    target_tail.copy_from_slice(source_tail);
    // SAFETY: every x86-64 processor has SSE2. Orders the stores before those that tell other threads of the copy.
    unsafe { _mm_sfence() };
}

/// Copies bytes to a target of the same length.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn copy(source: &[u8], target: &mut [u8]) {
    target.copy_from_slice(source);
}
