//! Casts between dtypes and writes by position on the host, and the task table of the device kernel.

pub mod batch;
pub mod elements;
#[cfg(target_arch = "x86_64")]
mod f16c;
mod float8;
pub mod put;
pub mod scatter;
pub mod streaming_copy;
