//! Frames of a new delta, from the old and the new bytes of tensors.

use super::difference::Difference;
use super::{BLOCK_BYTES, Encoding};
use crate::digest::{Algorithm, Context, Digest};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::os::retry::SharedCheck;
use crate::os::threads;
use zstd_safe::zstd_sys::ZSTD_EndDirective;
use zstd_safe::{CCtx, CParameter, InBuffer, OutBuffer, get_error_name};

/// Level of compression that all writers of the format use: higher ones cost more time than they save in a transfer.
const LEVEL: i32 = 1;

/// Smallest tensor whose frame is compressed by several threads, in bytes: four jobs of zstd.
const SHARED_BYTES_MIN: usize = 8 << 20;

/// Bytes of a tensor in two versions.
pub struct Pair<'a> {
    /// Name, for errors.
    pub name: &'a str,
    /// Bytes in the base version.
    pub old: &'a [u8],
    /// Bytes in the new version, of the same number.
    pub new: &'a [u8],
}

/// Changes of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewFrame {
    /// Bytes of the frame.
    pub bytes: Vec<u8>,
    /// Checksum of the new bytes.
    pub checksum: Digest,
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
    let part_bytes = pairs.iter().map(|pair| pair.new.len()).sum::<usize>() / threads.max(1);
    let is_large =
        |&index: &usize| pairs.get(index).is_some_and(|pair| pair.new.len() >= part_bytes.max(SHARED_BYTES_MIN));
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
    if pair.old == pair.new {
        return Ok(None);
    }
    let mut context = Context::new(checksum);
    let bytes = match encoding {
        Encoding::Xor => {
            let mut writer = FrameWriter::new(to_u64(pair.new.len()), threads)?;
            let mut block = Vec::with_capacity(BLOCK_BYTES);
            for (old, new) in blocks(pair) {
                check()?;
                context.update(new);
                block.clear();
                block.extend(old.iter().zip(new).map(|(old, new)| old ^ new));
                writer.write(&block)?;
            }
            writer.finish()?
        }
        Encoding::Overwrite => {
            let (mut difference, mut count) = (Difference::default(), 0_usize);
            for (old, new) in blocks(pair) {
                check()?;
                context.update(new);
                count += difference.find::<1>(old, new).len();
            }
            let changed = u32::try_from(count).ok().filter(|_| to_u64(pair.new.len()) <= u64::from(u32::MAX) + 1);
            let Some(changed) = changed else {
                let message = "the encoding \"overwrite\" has no positions beyond 4 GiB; use \"xor\"";
                return Err(Error::new(Kind::InvalidArgument, message));
            };
            let mut writer = FrameWriter::new(to_u64(size_of::<u32>()) + to_u64(count) * 5, threads)?;
            writer.write(&changed.to_le_bytes())?;
            let mut part = Vec::new();
            for (number, (old, new)) in blocks(pair).enumerate() {
                check()?;
                part.clear();
                let begin = u32::try_from(number * BLOCK_BYTES).unwrap_or(u32::MAX);
                for index in difference.find::<1>(old, new) {
                    part.extend_from_slice(&(begin + index).to_le_bytes());
                }
                writer.write(&part)?;
            }
            for (old, new) in blocks(pair) {
                check()?;
                part.clear();
                let changed = difference.find::<1>(old, new).iter().map(|&index| to_usize(index.into()));
                part.extend(changed.filter_map(|index| new.get(index)));
                writer.write(&part)?;
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

fn blocks<'a>(pair: &Pair<'a>) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
    pair.old.chunks(BLOCK_BYTES).zip(pair.new.chunks(BLOCK_BYTES))
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
