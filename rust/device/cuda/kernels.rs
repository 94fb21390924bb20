//! The device kernels: their machine code, names and parameters.
//!
//! | kernel | parameters |
//! |---|---|
//! | [`SCATTER`] | address of the tasks (`u64`), their number (`u32`), number of tiles (`u32`) |
//! | [`SCATTER_INLINE`] | a [`Batch`](crate::scatter::Batch) |
//!
//! Both take one-dimensional blocks of [`BLOCK_THREADS`] and any number of them, at most one a tile; no shared memory.

use std::ffi::CStr;

/// A fatbin for compute capability 7.5 and up, for `cuModuleLoadData`; `None` in a build without nvcc.
pub const IMAGE: Option<&[u8]> = image();

/// Scatters and casts what the tasks in device memory say.
pub const SCATTER: &CStr = c"fst_scatter";

/// The same, with the tasks in the parameters.
pub const SCATTER_INLINE: &CStr = c"fst_scatter_inline";

/// Threads of a block.
pub const BLOCK_THREADS: u32 = 256;

#[cfg(fst_kernels)]
const fn image() -> Option<&'static [u8]> {
    // The driver reads the image in words.
    #[repr(align(16))]
    struct Aligned<T: ?Sized>(T);
    static IMAGE: &Aligned<[u8]> = &Aligned(*include_bytes!(env!("FST_KERNELS")));
    Some(&IMAGE.0)
}

#[cfg(not(fst_kernels))]
const fn image() -> Option<&'static [u8]> {
    None
}
