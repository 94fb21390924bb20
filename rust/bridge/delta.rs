//! Deltas: their changes of tensors, and frames of new ones.

use super::checkpoint::OpenRequest;
use super::ffi;
use super::guard::{guard, guard_with_log, watched};
use super::selection::{Reads, Selection};
use crate::checkpoint::region::{IndexRange, StridedRange};
use crate::checkpoint::selection;
use crate::delta::chain::{Chain, Delta};
use crate::delta::changes::Changes;
use crate::delta::decode::{self, Frame, Tensor};
use crate::delta::encode::{self, NewFrame, Pair};
use crate::delta::{CHECKSUMS, Encoding, checksum_from_name, properties};
use crate::digest::Algorithm;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::os::sigint::Watch;
use crate::source::files::{Files, Listing};
use std::sync::Arc;

/// Open deltas.
pub(super) struct Deltas(Chain);

/// Changes of a tensor.
pub(super) struct ElementChanges(Changes);

/// Frames of several tensors of a new delta.
pub(super) struct NewFrames(Vec<Option<NewFrame>>);

/// Returns the metadata of the index that a path or URL leads to, with the path or URL of the file that it names. Empty if
/// it leads to no index.
pub(super) fn index_metadata(path: &str) -> Result<Vec<ffi::MetadataEntry>> {
    let watch = Watch::begin();
    guard_with_log(|| {
        let files = Files::resolve(&[path], &|| watch.check())?;
        Ok(super::checkpoint::entries(&files.listings.first().map(Listing::metadata_with_paths).unwrap_or_default()))
    })
}

/// Returns what the indices of an update's source state. Each is read once.
pub(super) fn update_source(paths: &[String]) -> Result<ffi::UpdateSource> {
    let watch = Watch::begin();
    guard_with_log(|| {
        let mut sources = Vec::with_capacity(paths.len());
        for path in paths {
            let Files { urls, mut listings, .. } = Files::resolve(&[path], &|| watch.check())?;
            // Without secrets.
            let shown = urls.first().map_or_else(|| path.clone(), ToString::to_string);
            sources.push((shown, listings.pop().unwrap_or_default().metadata));
        }
        let is_delta = sources.iter().any(|(_, metadata)| properties::is_delta(metadata));
        if let Some((shown, _)) = sources.iter().find(|(_, metadata)| is_delta && !properties::is_delta(metadata)) {
            let message = "is no delta, but other paths are; update with a whole checkpoint first, by itself";
            return Err(Error::new(Kind::InvalidArgument, message).at(shown));
        }
        let version = match sources.as_slice() {
            [(_, metadata)] => properties::version(metadata).map(str::to_owned).into_iter().collect(),
            _ => Vec::new(),
        };
        Ok(ffi::UpdateSource { is_delta, version })
    })
}

pub(super) fn open_deltas(paths: &[String], request: &OpenRequest) -> Result<Box<Deltas>> {
    guard_with_log(|| Ok(Box::new(Deltas(Chain::open(paths, request.options())?))))
}

impl Deltas {
    pub(super) fn count(&self) -> usize {
        self.0.deltas().len()
    }

    pub(super) fn base_version(&self) -> String {
        self.0.deltas().first().map(|delta| delta.properties.base_version.clone()).unwrap_or_default()
    }

    pub(super) fn version(&self) -> String {
        self.0.deltas().last().map(|delta| delta.properties.version.clone()).unwrap_or_default()
    }

    /// Checks that tensors have the version that the first delta changes: one, or none.
    pub(super) fn check_base(&self, held: &[String]) -> Result<()> {
        guard(|| self.0.check_base(held.first().map(String::as_str)))
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.0.names().into_iter().map(str::to_owned).collect()
    }

    fn delta(&self, index: usize) -> Result<&Delta> {
        let missing = || Error::new(Kind::Internal, format!("no delta {index} among {}", self.count()));
        self.0.deltas().get(index).ok_or_else(missing)
    }

    /// Selects the frames of tensors in one delta. It has none of tensors that it does not change.
    pub(super) fn select_frames(&self, delta: usize, names: &[String]) -> Result<Box<Selection>> {
        guard(|| {
            let frames = &self.delta(delta)?.frames;
            let changed: Vec<String> = names.iter().filter(|name| frames.find(name).is_ok()).cloned().collect();
            let selection = selection::Selection::named(frames, &changed)?;
            Ok(Box::new(Selection::new(selection, Arc::default(), Reads::Alone)))
        })
    }

    /// Computes the changes of a tensor. `frames` are its frames, of the oldest delta first.
    ///
    /// # Safety
    /// The addresses must be those of memory of these sizes, which nothing writes meanwhile.
    pub(super) unsafe fn changes(
        &self,
        tensor: &ffi::HeldTensor,
        frames: &[ffi::MemoryRange],
    ) -> Result<Box<ElementChanges>> {
        watched(|check| {
            let mut frames = frames.iter();
            let missing = || Error::new(Kind::Internal, "there are fewer frames than the deltas hold");
            let mut stored = Vec::new();
            for delta in self.0.deltas() {
                if let Some(place) = delta.frame(&tensor.name)? {
                    // SAFETY: the caller vouches for the memory.
                    let bytes = unsafe { slice_of(frames.next().ok_or_else(missing)?) };
                    let encoding = delta.properties.encoding;
                    let (checksum, path, begin) = (place.checksum, place.path, place.begin);
                    stored.push(Frame { encoding, bytes, checksum, path, begin });
                }
            }
            // SAFETY: the caller vouches for the memory.
            let old = unsafe { slice_of(&tensor.old) };
            Ok(Box::new(ElementChanges(decode::changes(&held_tensor(tensor, old, stored)?, check)?)))
        })
    }
}

fn held_tensor<'a>(tensor: &'a ffi::HeldTensor, old: &'a [u8], frames: Vec<Frame<'a>>) -> Result<Tensor<'a>> {
    let name = tensor.name.as_str();
    let invalid = |message: &str| Error::new(Kind::InvalidArgument, message).tensor(name);
    let unsigned = |values: &[i64]| {
        let values = values.iter().map(|&value| u64::try_from(value)).collect::<std::result::Result<Vec<_>, _>>();
        values.map_err(|_| invalid("a shape or index region has negative numbers"))
    };
    let (shape, ranges) = (unsigned(&tensor.shape)?, unsigned(&tensor.ranges)?);
    let item_bytes = to_u64(tensor.item_bytes);
    let tensor_bytes = shape.iter().try_fold(item_bytes, |bytes, &size| bytes.checked_mul(size));
    let tensor_bytes = tensor_bytes.ok_or_else(|| invalid("the shape has more than 64 bits of bytes"))?;
    let ranges: Vec<IndexRange> =
        ranges.as_chunks().0.iter().map(|&[start, length, step]| IndexRange { start, length, step }).collect();
    let is_whole = ranges.iter().zip(&shape).all(|(range, &size)| *range == IndexRange::whole(size));
    if !ranges.is_empty()
        && (ranges.len() != shape.len() || ranges.iter().zip(&shape).any(|(range, &size)| !range.fits(size)))
    {
        return Err(invalid("the index region does not lie inside the shape"));
    }
    let region = (!is_whole).then(|| StridedRange::of(0, item_bytes, &shape, &ranges));
    let expected = region.as_ref().map_or(tensor_bytes, StridedRange::bytes);
    if expected != to_u64(old.len()) {
        let message = format!("has {} bytes; its shape and index region have {expected}", old.len());
        return Err(invalid(&message));
    }
    Ok(Tensor { name, old, item_bytes: to_usize(item_bytes), tensor_bytes, region, frames })
}

impl ElementChanges {
    /// Returns whether the values are those of all elements.
    pub(super) fn is_whole(&self) -> bool {
        self.0.positions.is_none()
    }

    pub(super) fn positions(&self) -> &[u32] {
        self.0.positions.as_deref().unwrap_or_default()
    }

    pub(super) fn values(&self) -> &[u8] {
        &self.0.values
    }
}

/// Encodes the changes of tensors.
///
/// # Safety
/// The addresses must be those of memory of these sizes, which nothing writes meanwhile.
pub(super) unsafe fn encode_changes(
    names: &[String],
    old: &[ffi::MemoryRange],
    changed: &[ffi::MemoryRange],
    encoding: &str,
    checksum: &str,
    threads: usize,
) -> Result<Box<NewFrames>> {
    let watch = Watch::begin();
    guard_with_log(|| {
        let unknown = |kind: &str, name: &str, known: &[&str]| {
            let message = format!("{kind} {name:?} is unknown; choose one of {}", known.join(", "));
            Error::new(Kind::InvalidArgument, message)
        };
        let encodings: Vec<_> = Encoding::ALL.iter().map(|encoding| encoding.name()).collect();
        let encoding = Encoding::from_name(encoding).ok_or_else(|| unknown("the encoding", encoding, &encodings))?;
        let known = CHECKSUMS.map(Algorithm::name);
        let checksum = checksum_from_name(checksum).ok_or_else(|| unknown("the checksum", checksum, &known))?;
        let mut pairs = Vec::with_capacity(names.len());
        for ((name, old), new) in names.iter().zip(old).zip(changed) {
            // SAFETY: the caller vouches for the memory.
            let (old, new) = unsafe { (slice_of(old), slice_of(new)) };
            pairs.push(Pair { name, old, new });
        }
        Ok(Box::new(NewFrames(encode::frames(threads, &pairs, encoding, checksum, &|| watch.check())?)))
    })
}

impl NewFrames {
    fn get(&self, tensor: usize) -> Option<&NewFrame> {
        self.0.get(tensor)?.as_ref()
    }

    /// Returns the frame of a tensor. Empty if the tensor does not change.
    pub(super) fn frame(&self, tensor: usize) -> &[u8] {
        self.get(tensor).map(|frame| frame.bytes.as_slice()).unwrap_or_default()
    }

    /// Returns the checksum of the new bytes in hexadecimal digits. Empty if the tensor does not change.
    pub(super) fn checksum(&self, tensor: usize) -> String {
        self.get(tensor).map(|frame| frame.checksum.hex()).unwrap_or_default()
    }
}

/// # Safety
/// The address must be that of memory of this size, which nothing writes while the slice is used.
unsafe fn slice_of<'a>(memory: &ffi::MemoryRange) -> &'a [u8] {
    match to_usize(memory.bytes) {
        0 => &[],
        length => {
            let address = std::ptr::with_exposed_provenance(to_usize(memory.address));
            // SAFETY: the caller vouches for the memory.
            unsafe { std::slice::from_raw_parts(address, length) }
        }
    }
}
