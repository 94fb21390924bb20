//! The kernels as the driver loads them.

/// `None` where the library was built without nvcc.
pub const IMAGE: Option<&[u8]> = None;
