//! Small regions of local files, which one system call copies into memory of the caller.
//!
//! A mapping, or a transfer with its readers and slots, costs several system calls, more than copying such a region.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::TensorRegion;
use crate::device::host::slice_at;
use crate::error::{Error, Kind, Result};
use crate::num::to_usize;
use crate::options::{Options, ReaderChoice};
use crate::os::local_file::LocalFile;
use crate::profile::{self, Count, Stage};
use crate::reader::page_cache::{self, Advice};
use crate::reader::pread::PreadReader;
use crate::reader::{Reader, ReaderKind};
use serde_json::json;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Largest number of bytes from the first to the last one of a region. Copying more takes longer than mapping them.
pub const SPAN_BYTES_MAX: u64 = 32 << 10;
/// Bytes after which the next ones are requested of a file that is read in small regions, one after the other. The kernel
/// itself reads no more than each region, because files are opened for reads at random.
const STEP_BYTES: u64 = 128 << 10;
/// Largest number of rows, which are copied one by one.
const ROWS_MAX: u64 = 1 << 10;

/// Returns whether a region is small.
pub fn is_small(region: &TensorRegion) -> bool {
    let range = &region.range;
    range.row_bytes > 0 && range.rows() <= ROWS_MAX && range.end() - range.begin <= SPAN_BYTES_MAX
}

/// Copies a small region to memory on the host.
///
/// Returns false, and copies nothing, if its bytes must be decrypted or verified, are not in a local file, or if the
/// options request another reader.
///
/// # Safety
/// The bytes of the region from `address` must be memory that nothing else uses meanwhile.
///
/// # Errors
/// `io` if reading fails or the file has become shorter; the errors of [`Checkpoint::check_headers`].
pub unsafe fn read(checkpoint: &Checkpoint, region: &TensorRegion, options: &Options, address: u64) -> Result<bool> {
    let is_read = matches!(options.reader, ReaderChoice::Auto | ReaderChoice::Pread) && !options.drop_cache;
    if !is_read || checkpoint.has_unverified() {
        return Ok(false);
    }
    let Some(file) = checkpoint.source(region.source)?.file() else { return Ok(false) };
    checkpoint.check_headers([region.source].into_iter())?;
    let range = &region.range;
    read_ahead(file, range.begin..range.end());
    // SAFETY: the caller's promise.
    let out = unsafe { slice_at(address, to_usize(range.bytes())) };
    let read = |into: &mut [u8]| read_at(file, range.begin, into).map_err(|error| error.tensor(&*region.name));
    if range.strides.is_empty() {
        read(out)?;
        return Ok(true);
    }
    let mut span = vec![0; to_usize(range.end() - range.begin)];
    read(&mut span)?;
    let misfit = || Error::new(Kind::Internal, "a row exceeds its region");
    for (row, into) in (0..).zip(out.chunks_exact_mut(to_usize(range.row_bytes))) {
        let begin = to_usize(range.row_begin(row) - range.begin);
        into.copy_from_slice(span.get(begin..begin + into.len()).ok_or_else(misfit)?);
    }
    Ok(true)
}

/// Requests the bytes of the next two steps, if the region is the first in its step that follows an earlier one.
fn read_ahead(file: &LocalFile, region: Range<u64>) {
    let last = file.small_end.swap(region.end, Ordering::Relaxed);
    let follows = last > 0 && (last..=last.saturating_add(STEP_BYTES)).contains(&region.start);
    if follows && last / STEP_BYTES != region.end / STEP_BYTES {
        let end = region.end.saturating_add(2 * STEP_BYTES).min(file.length);
        page_cache::advise(file, &(region.end..end), Advice::WillNeed);
    }
}

fn read_at(file: &Arc<LocalFile>, offset: u64, into: &mut [u8]) -> Result<()> {
    let detail = || json!({ "path": file.path.to_string_lossy(), "reader": ReaderKind::Pread.name() }).into();
    let _span = profile::span(Stage::Read).bytes(into.len()).detail(detail);
    profile::count(Count::Reads, 1);
    // One read is too short for a check of Ctrl-C.
    PreadReader::new(Arc::clone(file)).read(offset, into, &|| Ok(()))
}
