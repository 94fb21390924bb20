//! Changes of one tensor in a delta, applied to the blocks of a tensor in their order.

use super::elements::{self, Elements};
use super::frame::{self, FrameReader};
use super::{BLOCK_BYTES, Encoding};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};

/// Number of positions that are decoded at once.
const POSITIONS: usize = BLOCK_BYTES / size_of::<u32>();

/// Changes of a tensor.
pub enum Patch<'a> {
    /// Bytes to combine with the old ones.
    Xor(FrameReader<'a>),
    /// Bytes to write.
    Overwrite(Box<Overwrite<'a>>),
    /// Elements to write.
    Elements(Box<Elements<'a>>),
}

/// Returns the memory that applying the changes of a tensor with this number of bytes takes, in bytes. `values_begin` is
/// as for [`Patch::new`].
pub fn memory_bytes(encoding: Encoding, bytes: &[u8], values_begin: usize, tensor_bytes: u64) -> u64 {
    match encoding {
        Encoding::Xor => frame::memory_bytes(bytes, content_bytes(encoding, tensor_bytes)),
        Encoding::Overwrite => frame::pair_memory_bytes(bytes, content_bytes(encoding, tensor_bytes)),
        Encoding::Raw | Encoding::GapDelta => elements::memory_bytes(encoding, bytes, values_begin),
    }
}

/// Returns the number of bytes that the content of a frame has at most.
fn content_bytes(encoding: Encoding, tensor_bytes: u64) -> u64 {
    match encoding {
        Encoding::Overwrite => {
            let change_bytes = to_u64(size_of::<u32>()) + 1;
            tensor_bytes.saturating_mul(change_bytes).saturating_add(to_u64(size_of::<u32>()))
        }
        _ => tensor_bytes,
    }
}

impl<'a> Patch<'a> {
    /// Begins to decode the changes of a tensor with this number of bytes, of which the values of a sparse patch begin at
    /// byte `values_begin`. Fails with `malformed` if they are not valid.
    pub fn new(
        encoding: Encoding,
        bytes: &'a [u8],
        values_begin: usize,
        item_bytes: usize,
        tensor_bytes: u64,
    ) -> Result<Patch<'a>> {
        let content_bytes = content_bytes(encoding, tensor_bytes);
        Ok(match encoding {
            Encoding::Xor => Patch::Xor(FrameReader::new(bytes, content_bytes)?),
            Encoding::Overwrite => {
                let (positions, values) = FrameReader::pair(bytes, content_bytes)?;
                Patch::Overwrite(Box::new(Overwrite::new(positions, values, tensor_bytes)?))
            }
            Encoding::Raw | Encoding::GapDelta => {
                Patch::Elements(Box::new(Elements::new(encoding, bytes, values_begin, item_bytes, tensor_bytes)?))
            }
        })
    }

    /// Returns the number of positions, or 0 if the frame has none.
    pub fn count(&self) -> usize {
        match self {
            Patch::Xor(_) => 0,
            Patch::Overwrite(overwrite) => overwrite.left,
            Patch::Elements(elements) => elements.count(),
        }
    }

    /// Writes the next block, which begins at byte `begin` of the tensor and has at most [`BLOCK_BYTES`], to `new`.
    /// Fails with `malformed` if the frame is not valid.
    pub fn apply(&mut self, begin: u64, old: &[u8], new: &mut Vec<u8>) -> Result<()> {
        match self {
            Patch::Xor(frame) => {
                new.resize(old.len(), 0);
                frame.read(new)?;
                for (byte, old) in new.iter_mut().zip(old) {
                    *byte ^= old;
                }
                Ok(())
            }
            Patch::Overwrite(overwrite) => {
                new.clear();
                new.extend_from_slice(old);
                overwrite.apply(begin, new)
            }
            Patch::Elements(elements) => {
                new.clear();
                new.extend_from_slice(old);
                elements.apply(begin, new);
                Ok(())
            }
        }
    }

    /// Returns the offsets of the bytes that were written to the last block, in ascending order, or `None` if the frame
    /// has no positions: of elements, the first bytes. Written bytes may have their old values.
    pub fn written(&self) -> Option<&[u32]> {
        match self {
            Patch::Xor(_) => None,
            Patch::Overwrite(overwrite) => Some(&overwrite.written),
            Patch::Elements(elements) => Some(elements.written()),
        }
    }

    /// Checks, after the last block, that the frame has no more changes.
    pub fn finish(self) -> Result<()> {
        match self {
            Patch::Xor(frame) => frame.finish(),
            Patch::Overwrite(overwrite) => overwrite.finish(),
            // All positions were inside of the tensor, and so in a block.
            Patch::Elements(_) => Ok(()),
        }
    }
}

/// Positions and values, which follow each other in a frame. Two readers decode them side by side, so that memory is
/// bounded.
pub struct Overwrite<'a> {
    positions: FrameReader<'a>,
    values: FrameReader<'a>,
    tensor_bytes: u64,
    /// Number of changes that were not decoded yet.
    left: usize,
    /// Positions that were decoded last, as stored. Those before `next` were applied.
    decoded_positions: Vec<u8>,
    /// Values for these positions.
    decoded_values: Vec<u8>,
    next: usize,
    /// Last decoded position.
    last: Option<u32>,
    /// Offsets of the bytes that were written to the last block.
    written: Vec<u32>,
}

impl<'a> Overwrite<'a> {
    fn new(mut positions: FrameReader<'a>, mut values: FrameReader<'a>, tensor_bytes: u64) -> Result<Overwrite<'a>> {
        let mut count = [0; size_of::<u32>()];
        positions.read(&mut count)?;
        let count = u32::from_le_bytes(count);
        if u64::from(count) > tensor_bytes {
            let message = format!("{count} bytes change, but the tensor has {tensor_bytes}");
            return Err(Error::new(Kind::Malformed, message));
        }
        values.skip(to_u64(size_of::<u32>()) * (u64::from(count) + 1))?;
        let left = to_usize(count.into());
        let (decoded_positions, decoded_values) = (Vec::new(), Vec::new());
        Ok(Overwrite {
            positions,
            values,
            tensor_bytes,
            left,
            decoded_positions,
            decoded_values,
            next: 0,
            last: None,
            written: Vec::new(),
        })
    }

    fn apply(&mut self, begin: u64, block: &mut [u8]) -> Result<()> {
        self.written.clear();
        let end = begin + to_u64(block.len());
        loop {
            let positions = self.decoded_positions.as_chunks().0.get(self.next..).unwrap_or_default();
            let values = self.decoded_values.get(self.next..).unwrap_or_default();
            let count = positions.partition_point(|&position| u64::from(u32::from_le_bytes(position)) < end);
            let first = self.written.len();
            // Positions ascend, so none is before the block.
            let block_begin = u32::try_from(begin).unwrap_or(u32::MAX);
            let offset = |&position: &_| u32::from_le_bytes(position).wrapping_sub(block_begin);
            self.written.extend(positions.iter().take(count).map(offset));
            for (&offset, &value) in self.written.get(first..).unwrap_or_default().iter().zip(values) {
                if let Some(byte) = block.get_mut(to_usize(offset.into())) {
                    *byte = value;
                }
            }
            self.next += count;
            if self.left == 0 || count < positions.len() {
                return Ok(());
            }
            self.decode()?;
        }
    }

    /// Decodes the next changes.
    fn decode(&mut self) -> Result<()> {
        let count = self.left.min(POSITIONS);
        self.decoded_positions.resize(count * size_of::<u32>(), 0);
        self.decoded_values.resize(count, 0);
        self.positions.read(&mut self.decoded_positions)?;
        self.values.read(&mut self.decoded_values)?;
        let positions = || self.decoded_positions.as_chunks().0.iter().map(|&position| u32::from_le_bytes(position));
        // Without a branch for each position.
        let mut ascend = true;
        let mut before = self.last.map_or(-1, i64::from);
        for position in positions() {
            ascend &= before < i64::from(position);
            before = position.into();
        }
        if !ascend || before >= i64::try_from(self.tensor_bytes).unwrap_or(i64::MAX) {
            return Err(self.invalid(positions()));
        }
        self.last = u32::try_from(before).ok();
        (self.left, self.next) = (self.left - count, 0);
        Ok(())
    }

    /// Describes the first position that is not valid.
    fn invalid(&self, positions: impl Iterator<Item = u32>) -> Error {
        let mut last = self.last;
        for position in positions {
            if last.is_some_and(|last| last >= position) {
                let message = format!("byte position {position} follows {}; positions must ascend", last.unwrap_or(0));
                return Error::new(Kind::Malformed, message);
            }
            last = Some(position);
            if u64::from(position) >= self.tensor_bytes {
                break;
            }
        }
        let (position, bytes) = (last.unwrap_or(0), self.tensor_bytes);
        let message = format!("byte position {position} is outside of the tensor, which has {bytes} bytes");
        Error::new(Kind::Malformed, message)
    }

    fn finish(self) -> Result<()> {
        // Every position is inside of the tensor, so all blocks together have taken all changes.
        debug_assert!(self.left == 0 && self.next == self.decoded_values.len());
        self.values.finish()
    }
}
