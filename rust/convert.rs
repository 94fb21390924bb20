//! Conversion of tensors from one dtype to another, on the host and in the device kernel's format.

pub mod batch;
pub mod cast;
#[cfg(target_arch = "x86_64")]
mod f16c;
mod float8;
pub mod scatter;
