//! Conversions of whole tensors on the caller's stream.

use super::driver::Context;
use super::kernels::Kernels;
use crate::convert::batch::Conversion;
use crate::convert::scatter::{StridedCopy, Table};
use crate::error::{Error, Kind, Result};
use std::ptr;

/// Queues all conversions, whose addresses are those of memory on the GPU with this ordinal, on the stream with this
/// native handle. Returns false, and queues nothing, where the library has no kernels for the GPU; the log says why.
///
/// # Errors
/// `device` or `out-of-memory`, from the driver.
pub fn run(conversions: &[Conversion], ordinal: i32, stream: u64) -> Result<bool> {
    let context = Context::retain(ordinal)?;
    let Some(kernels) = Kernels::of(&context)? else { return Ok(false) };
    let mut table = Table::default();
    for &Conversion { source, target, elements, from, to } in conversions {
        let row_elements = if from == to { elements * from.item_bytes() } else { elements };
        table.push(StridedCopy { source, target, row_elements, rows: 1, source_stride_bytes: 0, from, to })?;
    }
    let stream = usize::try_from(stream)
        .map_err(|_| Error::new(Kind::Internal, format!("{stream:#x} is not the handle of a stream")))?;
    let _bound = context.bind()?;
    kernels.keep();
    for batch in table.batches() {
        kernels.scatter_inline(batch, ptr::with_exposed_provenance_mut(stream))?;
    }
    Ok(true)
}
