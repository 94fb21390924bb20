//! Frames of a new delta, from the old and the new bytes of tensors.

use super::difference::Difference;
use super::{BLOCK_BYTES, Encoding};
use crate::checkpoint::Checkpoint;
use crate::digest::{Algorithm, Context, Digest};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::os::retry::SharedCheck;
use crate::os::threads;
use crate::reader::{self, Reader, read_ahead};
use std::ops::Range;
use std::sync::Arc;
use zstd_safe::zstd_sys::ZSTD_EndDirective;
use zstd_safe::{CCtx, CParameter, InBuffer, OutBuffer, get_error_name};

/// Level of compression that all writers of the format use: higher ones cost more time than they save in a transfer.
const LEVEL: i32 = 1;

/// Smallest tensor whose frame is compressed by several threads, in bytes: four jobs of zstd.
const SHARED_BYTES_MIN: usize = 8 << 20;

/// Bytes that are read from a file at once. With both versions, they stay in the L2 cache until they are encoded.
const READ_BYTES: usize = 64 << 10;

/// Number of bytes whose changes are marked in one word.
const BITS: usize = 64;

/// Tensor in two versions.
pub struct Pair<'a> {
    /// Name, for errors.
    pub name: &'a str,
    /// Size in bytes.
    pub bytes: usize,
    /// Bytes in the base version.
    pub old: Values<'a>,
    /// Bytes in the new version.
    pub new: Values<'a>,
}

/// Bytes of a tensor in one version.
pub enum Values<'a> {
    /// Bytes in memory.
    Memory(&'a [u8]),
    /// Bytes of a local file, which are read in parts: new memory for all of them would take more time than the reads. An
    /// empty range is a tensor that is stored without data, and consists of zeros.
    Stored(Arc<dyn Reader>, Range<u64>),
}

impl Values<'_> {
    /// Returns the bytes of a range, which are read into the buffer if they are not in memory.
    fn part<'a>(&'a self, range: Range<usize>, buffer: &'a mut Vec<u8>, check: SharedCheck<'_>) -> Result<&'a [u8]> {
        match self {
            Values::Memory(bytes) => Ok(bytes.get(range).unwrap_or_default()),
            Values::Stored(reader, stored) => {
                buffer.resize(range.len(), 0);
                if !stored.is_empty() {
                    reader.read(stored.start + to_u64(range.start), buffer, check)?;
                }
                Ok(buffer)
            }
        }
    }
}

impl Pair<'_> {
    /// Calls `take` for the old and the new bytes of each block in their order, until it returns false.
    fn for_each_block(&self, check: SharedCheck<'_>, mut take: impl FnMut(&[u8], &[u8]) -> Result<bool>) -> Result<()> {
        let (mut old_buffer, mut new_buffer) = (Vec::new(), Vec::new());
        for begin in (0..self.bytes).step_by(READ_BYTES) {
            check()?;
            let range = begin..self.bytes.min(begin + READ_BYTES);
            let old = self.old.part(range.clone(), &mut old_buffer, check)?;
            let new = self.new.part(range, &mut new_buffer, check)?;
            for (old, new) in old.chunks(BLOCK_BYTES).zip(new.chunks(BLOCK_BYTES)) {
                if !take(old, new)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// Changes of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewFrame {
    /// Bytes of the frame.
    pub bytes: Vec<u8>,
    /// Checksum of the new bytes.
    pub checksum: Digest,
}

/// Returns the values of tensors in local files, and starts to read those that the page cache does not hold.
pub fn stored(checkpoint: &Arc<Checkpoint>, names: &[&str], options: &Options) -> Result<Vec<Values<'static>>> {
    let mut files: Vec<_> =
        checkpoint.sources().map(|source| (source, reader::open_buffered(options, source), Vec::new())).collect();
    let mut values = Vec::with_capacity(names.len());
    for name in names {
        let (source, entry) = checkpoint.find(name)?;
        if let Some((_, reader, ranges)) = files.get_mut(source) {
            ranges.push(entry.begin..entry.end);
            values.push(Values::Stored(Arc::clone(reader), entry.begin..entry.end));
        }
    }
    for (source, _, mut ranges) in files {
        ranges.sort_by_key(|range| range.start);
        if let Some(file) = source.file() {
            read_ahead::start(file, checkpoint, ranges.into_iter(), false);
        }
    }
    Ok(values)
}

/// Encodes the changes of tensors on several threads, in the order of the list. `None` for a tensor without changes.
/// Tensors that are larger than the part of a thread are encoded one after the other, and the others side by side.
/// Fails with `invalid-argument` for a tensor that is too large for the encoding.
pub fn frames(
    threads: usize,
    pairs: &[Pair<'_>],
    encoding: Encoding,
    checksum: Algorithm,
    check: SharedCheck<'_>,
) -> Result<Vec<Option<NewFrame>>> {
    let part_bytes = pairs.iter().map(|pair| pair.bytes).sum::<usize>() / threads.max(1);
    let is_large = |&index: &usize| pairs.get(index).is_some_and(|pair| pair.bytes >= part_bytes.max(SHARED_BYTES_MIN));
    let (large, small): (Vec<usize>, Vec<usize>) = (0..pairs.len()).partition(is_large);
    let missing = || Error::new(Kind::Internal, "no such tensor");
    let encode = |index: usize, threads| {
        let pair = pairs.get(index).ok_or_else(missing)?;
        let frame = frame(pair, encoding, checksum, threads, check).map_err(|error| error.tensor(pair.name))?;
        Ok((index, frame))
    };
    let mut encoded = large.into_iter().map(|index| encode(index, threads)).collect::<Result<Vec<_>>>()?;
    encoded.extend(threads::map(threads, small.len(), |job| encode(*small.get(job).ok_or_else(missing)?, 1))?);
    encoded.sort_by_key(|(index, _)| *index);
    Ok(encoded.into_iter().map(|(_, frame)| frame).collect())
}

/// Encodes the changes of a tensor. Returns `None` if it has none.
fn frame(
    pair: &Pair<'_>,
    encoding: Encoding,
    checksum: Algorithm,
    threads: usize,
    check: SharedCheck<'_>,
) -> Result<Option<NewFrame>> {
    let mut is_changed = false;
    pair.for_each_block(check, |old, new| {
        is_changed = old != new;
        Ok(!is_changed)
    })?;
    if !is_changed {
        return Ok(None);
    }
    let mut context = Context::new(checksum);
    let bytes = match encoding {
        Encoding::Xor => {
            let mut writer = FrameWriter::new(to_u64(pair.bytes), threads)?;
            let mut block = Vec::with_capacity(BLOCK_BYTES);
            pair.for_each_block(check, |old, new| {
                context.update(new);
                block.clear();
                block.extend(old.iter().zip(new).map(|(old, new)| old ^ new));
                writer.write(&block).map(|()| true)
            })?;
            writer.finish()?
        }
        Encoding::Overwrite => {
            let mut difference = Difference::default();
            // A bit for each byte, which tells whether it changes. One pass finds positions and values of the same bytes, even
            // of a file that is written meanwhile.
            let mut changed: Vec<u64> = Vec::with_capacity(pair.bytes.div_ceil(BITS));
            let mut values = Vec::new();
            pair.for_each_block(check, |old, new| {
                context.update(new);
                let first = changed.len();
                changed.resize(first + new.len().div_ceil(BITS), 0);
                for &index in difference.find::<1>(old, new) {
                    let index = to_usize(index.into());
                    if let Some(bits) = changed.get_mut(first + index / BITS) {
                        *bits |= 1 << (index % BITS);
                    }
                    values.extend(new.get(index));
                }
                Ok(true)
            })?;
            let count = u32::try_from(values.len()).ok();
            let Some(count) = count.filter(|_| to_u64(pair.bytes) <= u64::from(u32::MAX) + 1) else {
                let message = "the encoding \"overwrite\" has no positions beyond 4 GiB; use \"xor\"";
                return Err(Error::new(Kind::InvalidArgument, message));
            };
            let position_bytes = to_u64(size_of::<u32>());
            let content_bytes = position_bytes + to_u64(values.len()) * (position_bytes + 1);
            let mut writer = FrameWriter::new(content_bytes, threads)?;
            writer.write(&count.to_le_bytes())?;
            let mut part = Vec::new();
            for (number, several) in changed.chunks(BLOCK_BYTES / BITS).enumerate() {
                check()?;
                part.clear();
                let mut first = u32::try_from(number * BLOCK_BYTES).unwrap_or(u32::MAX);
                for &bits in several {
                    let mut left = bits;
                    while left != 0 {
                        part.extend_from_slice(&(first + left.trailing_zeros()).to_le_bytes());
                        left &= left - 1;
                    }
                    first += u64::BITS;
                }
                writer.write(&part)?;
            }
            for part in values.chunks(BLOCK_BYTES) {
                check()?;
                writer.write(part)?;
            }
            writer.finish()?
        }
        Encoding::Raw | Encoding::GapDelta => {
            let message = format!("the encoding {:?} is read, but not written; use \"overwrite\"", encoding.name());
            return Err(Error::new(Kind::InvalidArgument, message));
        }
    };
    Ok(Some(NewFrame { bytes, checksum: context.finish() }))
}

/// Writer of one frame.
struct FrameWriter {
    context: CCtx<'static>,
    frame: Vec<u8>,
}

impl FrameWriter {
    /// Begins a frame with `bytes` of content, which its header states.
    fn new(bytes: u64, threads: usize) -> Result<FrameWriter> {
        let refused = || Error::new(Kind::OutOfMemory, "no memory for a zstd encoder");
        let mut context = CCtx::try_create().ok_or_else(refused)?;
        context.set_parameter(CParameter::CompressionLevel(LEVEL)).map_err(failed)?;
        if threads > 1 {
            context.set_parameter(CParameter::NbWorkers(u32::try_from(threads).unwrap_or(1))).map_err(failed)?;
        }
        context.set_pledged_src_size(Some(bytes)).map_err(failed)?;
        Ok(FrameWriter { context, frame: Vec::new() })
    }

    fn write(&mut self, content: &[u8]) -> Result<()> {
        self.step(content, ZSTD_EndDirective::ZSTD_e_continue)
    }

    fn finish(mut self) -> Result<Vec<u8>> {
        self.step(&[], ZSTD_EndDirective::ZSTD_e_end)?;
        self.frame.shrink_to_fit();
        Ok(self.frame)
    }

    fn step(&mut self, content: &[u8], directive: ZSTD_EndDirective) -> Result<()> {
        let mut input = InBuffer::around(content);
        loop {
            self.frame.reserve(CCtx::out_size());
            let end = self.frame.len();
            let mut output = OutBuffer::around_pos(&mut self.frame, end);
            let left = self.context.compress_stream2(&mut output, &mut input, directive).map_err(failed)?;
            let is_done = match directive {
                ZSTD_EndDirective::ZSTD_e_end => left == 0,
                _ => input.pos() == content.len(),
            };
            if is_done {
                return Ok(());
            }
        }
    }
}

fn failed(code: usize) -> Error {
    Error::new(Kind::Internal, format!("zstd cannot compress: {}", get_error_name(code)))
}
