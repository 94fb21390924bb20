//! Elements that deltas change, from the old bytes of a tensor and its frames.
//!
//! All deltas of a chain are applied to one block after the other, so a tensor takes the memory of its changes and of one
//! block, however many deltas there are.

use super::changes::{Changes, Collector};
use super::patch::Patch;
use super::{BLOCK_BYTES, Encoding};
use crate::checkpoint::region::StridedRange;
use crate::digest::{Context, Digest};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::os::retry::Check;
use std::mem;
use std::path::Path;

/// Tensor and its changes.
pub struct Tensor<'a> {
    /// Name in the deltas.
    pub name: &'a str,
    /// Old bytes of the tensor, or of a region of it.
    pub old: &'a [u8],
    /// Size of an element in bytes: 1, 2, 4, 8 or 16.
    pub item_bytes: usize,
    /// Size of the whole tensor in bytes.
    pub tensor_bytes: u64,
    /// Place of the old bytes in the whole tensor, which begins at byte 0. `None` if the old bytes are all of it.
    pub region: Option<StridedRange>,
    /// Frames, of the oldest delta first.
    pub frames: Vec<Frame<'a>>,
}

/// Changes of a tensor in one delta.
pub struct Frame<'a> {
    /// Encoding of the delta.
    pub encoding: Encoding,
    /// Bytes of the frame, or the positions and values of a sparse patch.
    pub bytes: &'a [u8],
    /// Number of the bytes before the values of a sparse patch.
    pub values_begin: usize,
    /// Checksum of the tensor after these changes, if there is one.
    pub checksum: Option<Digest>,
    /// File of the frame, for errors.
    pub path: &'a Path,
    /// First byte of the frame in its file, for errors.
    pub begin: u64,
}

/// Computes the changes of a tensor. Fails with `malformed` for a frame that is not valid or does not fit its tensor;
/// `integrity` for a whole tensor whose new bytes differ from the checksum.
pub fn changes(tensor: &Tensor<'_>, check: Check<'_>) -> Result<Changes> {
    let Tensor { old, tensor_bytes, region, frames, .. } = tensor;
    let mut collector = Collector::new(old, tensor.item_bytes);
    let at = |frame: &Frame<'_>, error: Error| error.at(frame.path).tensor(tensor.name).offset(frame.begin);
    let mut patches = Vec::with_capacity(frames.len());
    for frame in frames {
        let &Frame { encoding, bytes, values_begin, .. } = frame;
        let patch = Patch::new(encoding, bytes, values_begin, tensor.item_bytes, *tensor_bytes);
        let patch = patch.map_err(|error| at(frame, error))?;
        patches.push((frame, patch));
    }
    if let ([(_, patch)], None) = (patches.as_slice(), region) {
        collector.reserve(patch.count());
    }
    // The last checksum implies those before it. Sparse patches, which may follow, have none.
    let expected = |frame: &Frame<'_>| frame.checksum.filter(|_| region.is_none());
    let checksum = frames.iter().enumerate().rev().find_map(|(index, frame)| Some((index, expected(frame)?)));
    let mut context = checksum.map(|(_, expected)| Context::new(expected.algorithm));
    let (mut block, mut next) = (Vec::new(), Vec::new());
    let mut begin = 0;
    while begin < *tensor_bytes {
        check()?;
        let end = tensor_bytes.min(&(begin + to_u64(BLOCK_BYTES))).to_owned();
        let mut in_place = None;
        match region {
            None => in_place = old.get(to_usize(begin)..to_usize(end)),
            Some(region) => {
                block.clear();
                block.resize(to_usize(end - begin), 0);
                copy_rows(region, begin, &mut block, |offset, row| {
                    if let Some(old) = old.get(offset..offset + row.len()) {
                        row.copy_from_slice(old);
                    }
                });
            }
        }
        for (index, (frame, patch)) in patches.iter_mut().enumerate() {
            let before = in_place.take().unwrap_or(&block);
            patch.apply(begin, before, &mut next).map_err(|error| at(frame, error))?;
            mem::swap(&mut block, &mut next);
            if let Some(context) = context.as_mut().filter(|_| checksum.is_some_and(|(last, _)| last == index)) {
                context.update(&block);
            }
        }
        match region {
            None => match patches.as_slice() {
                [(_, patch)] => collector.add(to_usize(begin), &block, patch.written()),
                _ => collector.add(to_usize(begin), &block, None),
            },
            Some(region) => {
                let first = to_usize(region.bytes_before(begin));
                next.clear();
                copy_rows(region, begin, &mut block, |_, row| next.extend_from_slice(row));
                collector.add(first, &next, None);
            }
        }
        begin = end;
    }
    for (frame, patch) in patches {
        patch.finish().map_err(|error| at(frame, error))?;
    }
    if let (Some((index, expected)), Some(context)) = (checksum, context) {
        let computed = context.finish();
        if computed != expected {
            let message = format!(
                "the new bytes have {computed}; {expected} was expected. The delta is damaged, or the tensor does not \
                 have the values of the base version; load the newest full checkpoint, and apply the deltas after it"
            );
            let error = Error::new(Kind::Integrity, message);
            return Err(frames.get(index).map_or(error.clone(), |frame| at(frame, error)));
        }
    }
    Ok(collector.finish())
}

/// Calls `copy` for the bytes of each row of a region in the block that begins at byte `begin` of the tensor, with the
/// offset of these bytes in the region.
fn copy_rows(region: &StridedRange, begin: u64, block: &mut [u8], mut copy: impl FnMut(usize, &mut [u8])) {
    let end = begin + to_u64(block.len());
    let (mut offset, last) = (region.bytes_before(begin), region.bytes_before(end));
    while offset < last {
        let (row, inside) = (offset / region.row_bytes, offset % region.row_bytes);
        let from = region.row_begin(row) + inside;
        let length = (region.row_bytes - inside).min(last - offset);
        if let Some(bytes) = block.get_mut(to_usize(from - begin)..to_usize(from - begin + length)) {
            copy(to_usize(offset), bytes);
        }
        offset += length;
    }
}
