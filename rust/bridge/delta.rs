//! Sources of updates: changes of tensors by deltas, and frames of new deltas.

use super::calls::{answer, encode, parse, unknown};
use super::checkpoint::{Checkpoint, OpenRequest};
use super::ffi;
use super::guard::{guard, guard_with_log};
use crate::checkpoint::region::{IndexRange, StridedRange};
use crate::delta::chain::Chain;
use crate::delta::changes::Changes;
use crate::delta::encode::{self, Pair, Values};
use crate::delta::properties::Properties;
use crate::delta::update_source;
use crate::delta::work::{self, Held, Old};
use crate::delta::{CHECKSUMS, Encoding, checksum_from_name};
use crate::digest::Algorithm;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::os::sigint::Watch;
use crate::source::Source;
use std::collections::HashSet;

/// Open source of an update.
pub(super) struct UpdateSource(update_source::UpdateSource);

/// Tensors whose changes are computed, batch by batch.
pub(super) struct DeltaWork {
    work: work::Work,
    /// Whether the old values of each tensor are in a mapped file.
    are_mapped: Vec<bool>,
    /// Batches whose changes were not computed yet.
    batches: Vec<Vec<usize>>,
}

/// Opens one checkpoint, or a chain of deltas.
pub(super) fn open_update(paths: &[String], request: &OpenRequest) -> Result<ffi::OpenedUpdate> {
    guard_with_log(|| {
        let source = update_source::UpdateSource::open(paths, request.options(), &Options::from_env()?)?;
        Ok(opened(UpdateSource(source)))
    })
}

/// Joins two chains of deltas.
pub(super) fn join_deltas(older: &UpdateSource, newer: &UpdateSource) -> Result<ffi::OpenedUpdate> {
    guard(|| {
        let chain = Chain::new([older.0.deltas()?.deltas(), newer.0.deltas()?.deltas()].concat())?;
        Ok(opened(UpdateSource(update_source::UpdateSource::Deltas(chain))))
    })
}

fn opened(source: UpdateSource) -> ffi::OpenedUpdate {
    let (is_delta, version) = source.state();
    let version = version.into_iter().cloned().collect();
    ffi::OpenedUpdate { is_delta, version, source: Box::new(source) }
}

impl UpdateSource {
    /// Calls a method without tensors.
    pub(super) fn call(&self, method: &str, request: &str) -> Result<String> {
        answer(|_| match method {
            // Returns the version that the first delta changes.
            "base_version" => {
                let first = self.0.deltas()?.deltas().first();
                encode(&first.and_then(|first| first.properties.base_version.as_ref()))
            }
            // Checks that tensors have the version that the first delta changes: one, or none.
            "check_base" => encode(&self.0.deltas()?.check_base(parse::<Option<String>>(request)?.as_deref())?),
            // Returns whether the first delta may change tensors that have a version, if any.
            "fits" => {
                let held = parse::<Option<String>>(request)?;
                let mut first = self.0.deltas()?.deltas().iter().take(1);
                encode(&first.all(|first| first.properties.fits(held.as_deref())))
            }
            "is_delta" => encode(&self.state().0),
            "is_encrypted" => encode(&self.0.files().any(Source::is_encrypted)),
            // Lists the tensors that deltas change, in the order of the deltas and of the bytes in their files.
            "names" => encode(&self.0.deltas()?.names()),
            // Lists the encoding and the checksum of each delta, if it has one.
            "encodings" => {
                let properties = self.0.deltas()?.deltas().iter().map(|delta| &delta.properties);
                let named = |each: &Properties| (each.encoding.name(), each.checksum.map(Algorithm::name));
                encode(&properties.map(named).collect::<Vec<_>>())
            }
            // Lists the tensors whose last change has no checksum.
            "unverified" => encode(&self.0.deltas()?.unverified()),
            // Returns the version that the index of a checkpoint states, if any, or in which the last delta results.
            "version" => encode(&self.state().1),
            _ => Err(unknown(method)),
        })
    }

    /// Returns whether the source is a chain of deltas, and the version of the tensors after the update, if there is one.
    fn state(&self) -> (bool, Option<&String>) {
        match &self.0 {
            update_source::UpdateSource::Whole(_, version) => (false, version.as_ref()),
            update_source::UpdateSource::Deltas(chain) => {
                (true, chain.deltas().last().map(|last| &last.properties.version))
            }
        }
    }

    /// Checks that tensors have the version that the first delta changes: one, or none. Returns the indices of the names
    /// of tensors that deltas change.
    pub(super) fn changing(&self, names: &[String], held: &[String]) -> Result<Vec<usize>> {
        guard(|| {
            let chain = self.0.deltas()?;
            chain.check_base(held.first().map(String::as_str))?;
            let changing: HashSet<&str> = chain.names().into_iter().collect();
            let found = names.iter().enumerate().filter(|(_, name)| changing.contains(name.as_str()));
            Ok(found.map(|(index, _)| index).collect())
        })
    }

    /// Returns the whole checkpoint.
    pub(super) fn checkpoint(&self) -> Result<Box<Checkpoint>> {
        guard(|| match &self.0 {
            update_source::UpdateSource::Whole(checkpoint, _) => Ok(Box::new(Checkpoint::new(checkpoint))),
            update_source::UpdateSource::Deltas(_) => Err(Error::new(Kind::Internal, "deltas are no whole checkpoint")),
        })
    }

    /// Begins to read the frames of tensors. `limit_bytes` is the limit for staged values, or negative for none.
    pub(super) fn changes(&self, tensors: &[ffi::HeldTensor], limit_bytes: i64) -> Result<Box<DeltaWork>> {
        guard(|| {
            let held = tensors.iter().map(held).collect::<Result<_>>()?;
            let limit = u64::try_from(limit_bytes).ok();
            let work = work::Work::begin(self.0.deltas()?, held, limit, &Options::from_env()?)?;
            let are_mapped = tensors.iter().map(|tensor| tensor.is_mapped).collect();
            Ok(Box::new(DeltaWork { work, are_mapped, batches: Vec::new() }))
        })
    }
}

impl DeltaWork {
    /// Returns the indices of the tensors of the next batch. Empty after the last.
    pub(super) fn next_batch(&mut self) -> Vec<usize> {
        let batch = self.work.next_batch();
        self.batches.insert(0, batch.clone());
        batch
    }

    /// Computes the changes of the oldest batch that [`DeltaWork::next_batch`] has returned, whose old values `old` are.
    /// They come in any order.
    ///
    /// # Safety
    /// The addresses must belong to memory of these sizes, which nothing writes meanwhile.
    pub(super) unsafe fn compute(
        &mut self,
        old: &[ffi::MemoryRange],
        threads: usize,
    ) -> Result<Vec<ffi::ElementChanges>> {
        let watch = Watch::begin();
        guard(|| {
            let batch = self.batches.pop().unwrap_or_default();
            let mut values = Vec::with_capacity(old.len());
            for (index, memory) in batch.iter().zip(old) {
                values.push(match self.are_mapped.get(*index) {
                    Some(true) => Old::Mapped(memory.address),
                    // SAFETY: the caller vouches for the memory.
                    _ => Old::Memory(unsafe { slice_of(memory) }),
                });
            }
            let changes = self.work.compute(threads, &values, &|| watch.check())?;
            let converted = |(tensor, Changes { positions, values })| {
                let is_whole = positions.is_none();
                ffi::ElementChanges { tensor, is_whole, positions: positions.unwrap_or_default(), values }
            };
            Ok(changes.into_iter().map(converted).collect())
        })
    }
}

fn held(tensor: &ffi::HeldTensor) -> Result<Held> {
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
    let held = Held {
        name: name.to_owned(),
        dtype: Dtype::from_scalar_type(tensor.scalar_type),
        item_bytes: to_usize(item_bytes),
        tensor_bytes,
        region,
        is_copied: tensor.is_copied,
    };
    if held.bytes() != tensor.bytes {
        let message = format!("has {} bytes; its shape and index region have {}", tensor.bytes, held.bytes());
        return Err(invalid(&message));
    }
    Ok(held)
}

/// Encodes the changes of tensors.
///
/// # Safety
/// The addresses must belong to memory of these sizes, which nothing writes meanwhile.
pub(super) unsafe fn encode_changes(
    names: &[String],
    old: &ffi::VersionValues<'_>,
    changed: &ffi::VersionValues<'_>,
    encoding: &str,
    checksum: &str,
    threads: usize,
) -> Result<Vec<ffi::NewFrame>> {
    let watch = Watch::begin();
    guard_with_log(|| {
        let unknown = |kind: &str, name: &str, known: &[&str]| {
            let message = format!("{kind} {name:?} is unknown; choose one of {}", known.join(", "));
            Error::new(Kind::InvalidArgument, message)
        };
        let (known, is) = (Encoding::OF_FRAMES, encoding);
        let named = Encoding::from_name(is, &known);
        let encoding = named.ok_or_else(|| unknown("the encoding", is, &known.map(Encoding::name)))?;
        let known = CHECKSUMS.map(Algorithm::name);
        let checksum = checksum_from_name(checksum).ok_or_else(|| unknown("the checksum", checksum, &known))?;
        // SAFETY: the caller vouches for the memory.
        let (old, new) = unsafe { (values(names, old)?, values(names, changed)?) };
        let named = names.iter().zip(changed.memory).map(|(name, memory)| (name, to_usize(memory.bytes)));
        let pairs = named.zip(old.into_iter().zip(new));
        let pairs: Vec<_> = pairs.map(|((name, bytes), (old, new))| Pair { name, bytes, old, new }).collect();
        let frames = encode::frames(threads, &pairs, encoding, checksum, &|| watch.check())?;
        let frame = |frame: encode::NewFrame| ffi::NewFrame { checksum: frame.checksum.hex(), bytes: frame.bytes };
        let absent = || ffi::NewFrame { checksum: String::new(), bytes: Vec::new() };
        Ok(frames.into_iter().map(|found| found.map_or_else(absent, frame)).collect())
    })
}

/// Returns the values of tensors in memory and in files.
///
/// # Safety
/// As for [`slice_of`].
unsafe fn values<'a>(names: &[String], version: &ffi::VersionValues<'_>) -> Result<Vec<Values<'a>>> {
    let ffi::VersionValues { memory, files } = version;
    let is_stored = |range: &ffi::MemoryRange| range.address == 0 && range.bytes > 0;
    let stored = names.iter().zip(*memory).filter(|(_, range)| is_stored(range));
    let stored: Vec<&str> = stored.map(|(name, _)| name.as_str()).collect();
    let mut stored = encode::stored(files.files()?, &stored, &Options::from_env()?)?.into_iter();
    let missing = || Error::new(Kind::Internal, "no such stored tensor");
    let value = |range: &ffi::MemoryRange| match is_stored(range) {
        true => stored.next().ok_or_else(missing),
        // SAFETY: the caller vouches for the memory.
        false => Ok(Values::Memory(unsafe { slice_of(range) })),
    };
    memory.iter().map(value).collect()
}

/// # Safety
/// The address must belong to memory of this size, which nothing writes while the slice is used.
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
