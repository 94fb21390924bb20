//! Casts between dtypes, dequantization and writes by position on the host, and the tasks of the device kernels.

pub mod batch;
mod cut;
mod decoder;
pub mod dequantize;
pub mod dequantize_task;
pub mod elements;
#[cfg(target_arch = "x86_64")]
mod f16c;
mod float8;
pub mod matrix;
pub mod put;
pub mod quantize;
pub mod quantized;
pub mod scatter;
pub mod scheme;
pub mod streaming_copy;
