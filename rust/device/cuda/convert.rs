//! Casts of whole tensors, writes by position and dequantization, on the caller's stream.

use super::gpu::Gpu;
use super::kernels::Kernels;
use crate::cast::batch::Conversion;
use crate::cast::dequantize_task;
use crate::cast::matrix::Matrix;
use crate::cast::scatter::{StridedCopy, Table};
use crate::error::Result;

/// Queues conversions between addresses of the GPU with this ordinal, on the stream with this native handle.
///
/// Returns false and queues nothing if the library has no kernels for the GPU; the log has the reason. Fails with
/// `device` or `out-of-memory`, from the driver; `invalid-argument` if the stream cannot be used; `internal` for a
/// conversion that does not exist, of which nothing was queued.
pub fn run(conversions: &[Conversion], ordinal: i32, stream: u64) -> Result<bool> {
    let gpu = Gpu::of(ordinal)?;
    let Some(kernels) = Kernels::of(&gpu.context) else { return Ok(false) };
    let mut table = Table::default();
    for conversion in conversions {
        if let Some(put) = conversion.put() {
            table.push_put(put)?;
            continue;
        }
        let Conversion { source, target, elements, from, to, .. } = *conversion;
        let row_elements = if from == to { elements * from.item_bytes() } else { elements };
        table.push(StridedCopy { source, target, row_elements, rows: 1, source_stride_bytes: 0, from, to })?;
    }
    let stream = gpu.context.stream_of_caller(stream)?;
    let _bound = gpu.context.bind()?;
    kernels.keep();
    for batch in table.batches() {
        kernels.scatter_inline(batch, stream)?;
    }
    Ok(true)
}

/// Queues the dequantization of matrices in the memory of the GPU with this ordinal, on the stream with this native
/// handle.
///
/// Returns false and fails as [`run`] does, and with `internal` for a matrix that the kernel cannot read or write, in
/// which case nothing was queued.
pub fn dequantize(matrices: &[Matrix], ordinal: i32, stream: u64) -> Result<bool> {
    let gpu = Gpu::of(ordinal)?;
    let Some(kernels) = Kernels::of(&gpu.context) else { return Ok(false) };
    let batches = dequantize_task::batches(matrices)?;
    let stream = gpu.context.stream_of_caller(stream)?;
    let _bound = gpu.context.bind()?;
    kernels.keep();
    for batch in batches {
        kernels.dequantize(batch, stream)?;
    }
    Ok(true)
}
