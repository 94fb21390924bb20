//! Fields of a `.tensors` file, read one after the other.

use super::{TensorKind, dtype};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::header::DIMENSIONS_MAX;
use crate::num::to_u64;

/// Unread bytes of a part of a file, and their place. Every error has the offset of its field.
pub(in crate::format) struct Fields<'a> {
    rest: &'a [u8],
    offset: u64,
}

impl<'a> Fields<'a> {
    /// Reads fields from bytes that begin at `offset` of their file.
    pub(in crate::format) fn new(bytes: &'a [u8], offset: u64) -> Fields<'a> {
        Fields { rest: bytes, offset }
    }

    /// Returns the offset of the next field in the file.
    pub(in crate::format) fn offset(&self) -> u64 {
        self.offset
    }

    pub(in crate::format) fn left(&self) -> usize {
        self.rest.len()
    }

    /// Returns the next `count` bytes. Fails with `malformed` if there are fewer; `what` names the field.
    pub(in crate::format) fn take(&mut self, count: usize, what: &str) -> Result<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or_else(|| {
            let message = format!("{what} takes {count} bytes, but only {} are left; the file is cut off", self.left());
            Error::new(Kind::Malformed, message).offset(self.offset)
        })?;
        self.rest = rest;
        self.offset = self.offset.saturating_add(to_u64(count));
        Ok(taken)
    }

    /// Returns the next number, which has `BYTES` bytes.
    pub(in crate::format) fn number<const BYTES: usize>(&mut self, what: &str) -> Result<u64> {
        let bytes = self.take(BYTES, what)?;
        Ok(bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    /// Returns bytes whose number precedes them in `LENGTH` bytes.
    pub(in crate::format) fn counted<const LENGTH: usize>(&mut self, what: &str) -> Result<&'a [u8]> {
        let length = self.number::<LENGTH>(what)?;
        let count = usize::try_from(length).unwrap_or(usize::MAX);
        self.take(count, what)
    }

    fn text<const LENGTH: usize>(&mut self, what: &str) -> Result<&'a str> {
        let begin = self.offset;
        let bytes = self.counted::<LENGTH>(what)?;
        std::str::from_utf8(bytes).map_err(|_| malformed(begin, format!("{what} is not UTF-8")))
    }

    pub(in crate::format) fn name(&mut self) -> Result<&'a str> {
        self.text::<2>("the name of a tensor")
    }

    pub(in crate::format) fn kind(&mut self) -> Result<TensorKind> {
        let begin = self.offset;
        let number = self.number::<1>("the kind of a tensor")?;
        let kind = u8::try_from(number).ok().and_then(TensorKind::from_number);
        kind.ok_or_else(|| malformed(begin, format!("the kind is {number}, but must be 0, 1 or 2")))
    }

    pub(in crate::format) fn dtype(&mut self) -> Result<Dtype> {
        let begin = self.offset;
        dtype::parse(self.text::<1>("the dtype")?).map_err(|error| error.offset(begin))
    }

    /// Returns the shape of a tensor, with dimensions of 8 bytes or else of 4, in elements of the file.
    pub(in crate::format) fn shape(&mut self, dtype: Dtype, is_long: bool) -> Result<Vec<u64>> {
        let begin = self.offset;
        let count = usize::try_from(self.number::<1>("the shape")?).unwrap_or(usize::MAX);
        if count > DIMENSIONS_MAX {
            return Err(malformed(begin, format!("{count} dimensions; at most {DIMENSIONS_MAX} are accepted")));
        }
        let mut shape = Vec::with_capacity(count);
        for _ in 0..count {
            shape.push(if is_long { self.number::<8>("the shape")? } else { self.number::<4>("the shape")? });
        }
        if dtype.packed_elements() > 1 {
            // The file has PyTorch's shape.
            let last = shape.last_mut().and_then(|last| {
                *last = last.checked_mul(dtype.packed_elements())?;
                Some(())
            });
            let refused = || malformed(begin, format!("the shape {shape:?} does not suit {dtype}"));
            last.ok_or_else(refused)?;
        }
        Ok(shape)
    }
}

fn malformed(offset: u64, message: String) -> Error {
    Error::new(Kind::Malformed, message).offset(offset)
}
