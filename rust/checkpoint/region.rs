//! A tensor or a part of one that a caller wants: its shape, and where its
//! bytes are.
//!
//! A part is a box, a [`Span`] for each dimension. In the file its bytes are
//! rows, which repeat once for each outer dimension that the box does not take
//! whole:
//!
//! ```text
//! [0:4, 1:3] of [4, 6]   .##....##....##....##...   rows of 2, repeated 4 times
//! [::2, 1:3] of [4, 6]   .##.........##.........    rows of 2, repeated twice
//! [0:2]      of [4, 6]   ############............   one row of 12
//! ```

use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::header::Entry;
use std::ops::Range;

/// The indices of one dimension that are wanted: `start`, `start + step`, and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// The first.
    pub start: u64,
    /// How many there are.
    pub length: u64,
    /// From one to the next.
    pub step: u64,
}

impl Span {
    /// All indices of a dimension.
    pub fn whole(size: u64) -> Span {
        Span { start: 0, length: size, step: 1 }
    }

    fn fits(&self, size: u64) -> bool {
        let last = self.length.saturating_sub(1).checked_mul(self.step).and_then(|last| last.checked_add(self.start));
        // Without an index it still has to begin inside, or just behind the end.
        self.step > 0 && self.start <= size && (self.length == 0 || last.is_some_and(|last| last < size))
    }
}

/// Rows of bytes in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// The first byte of the first row, from the start of the file.
    pub begin: u64,
    /// Bytes of one row.
    pub row_bytes: u64,
    /// How the row repeats, from the outermost dimension to the innermost; one row does not.
    pub repeats: Vec<Repeat>,
}

/// What lies inside is there `count` times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repeat {
    /// At least two.
    pub count: u64,
    /// Bytes from the start of one to the start of the next.
    pub stride: u64,
}

impl Region {
    /// The rows of a tensor that begins at byte `begin` of a file. Each span lies inside its dimension.
    pub(crate) fn of(begin: u64, item_bytes: u64, shape: &[u64], spans: &[Span]) -> Region {
        let mut region = Region { begin, row_bytes: item_bytes, repeats: Vec::new() };
        if spans.iter().any(|span| span.length == 0) {
            return Region { row_bytes: 0, ..region };
        }
        // From the innermost dimension outwards. None of these products is more than the tensor's size, which the
        // header's checks have bounded.
        let mut index_bytes = item_bytes;
        for (span, size) in spans.iter().zip(shape).rev() {
            region.begin = region.begin.saturating_add(span.start.saturating_mul(index_bytes));
            let stride = span.step.saturating_mul(index_bytes);
            match region.repeats.last_mut() {
                _ if span.length == 1 => {}
                // Rows that stand one behind the other are one row.
                None if stride == region.row_bytes => region.row_bytes = region.row_bytes.saturating_mul(span.length),
                // Rows go on with the same stride.
                Some(last) if stride == last.count.saturating_mul(last.stride) => {
                    last.count = last.count.saturating_mul(span.length);
                }
                _ => region.repeats.push(Repeat { count: span.length, stride }),
            }
            index_bytes = index_bytes.saturating_mul(*size);
        }
        region.repeats.reverse();
        region
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> u64 {
        self.row_bytes.saturating_mul(self.rows())
    }

    /// How many bytes of the rows stand before this byte of the file. They are also the first ones of the result, since
    /// it keeps the order of the file.
    pub fn bytes_before(&self, offset: u64) -> u64 {
        let mut left = offset.saturating_sub(self.begin);
        let mut inner_bytes = self.bytes();
        let mut before = 0;
        for repeat in &self.repeats {
            inner_bytes /= repeat.count;
            let whole = left / repeat.stride;
            if whole >= repeat.count {
                return before + inner_bytes * repeat.count;
            }
            before += whole * inner_bytes;
            left -= whole * repeat.stride;
        }
        before + left.min(self.row_bytes)
    }

    /// How many rows there are.
    pub fn rows(&self) -> u64 {
        self.repeats.iter().fold(1, |rows, repeat| rows.saturating_mul(repeat.count))
    }

    /// The byte of the file behind the last row.
    pub fn end(&self) -> u64 {
        self.row_begin(self.rows().saturating_sub(1)).saturating_add(self.row_bytes)
    }

    /// The first byte of a row, from the start of the file.
    pub fn row_begin(&self, row: u64) -> u64 {
        let step = |(begin, row): (u64, u64), repeat: &Repeat| {
            (begin.saturating_add(row % repeat.count * repeat.stride), row / repeat.count)
        };
        self.repeats.iter().rev().fold((self.begin, row), step).0
    }
}

/// A tensor, or a part of one, that the caller wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The tensor's name.
    pub name: Box<str>,
    /// Which file of the checkpoint holds it.
    pub source: usize,
    /// The stored dtype.
    pub dtype: Dtype,
    /// The shape of the result, in PyTorch's elements.
    pub shape: Vec<u64>,
    /// Where its bytes are.
    pub region: Region,
}

impl Wanted {
    /// A whole tensor.
    ///
    /// # Errors
    /// `unsupported-dtype` where PyTorch cannot hold it.
    pub fn whole(source: usize, entry: Entry<'_>) -> Result<Wanted> {
        let shape = torch_shape(entry)?;
        let row_bytes = entry.end.saturating_sub(entry.begin);
        let region = Region { begin: entry.begin, row_bytes, repeats: Vec::new() };
        Ok(Wanted { name: entry.name.into(), source, dtype: entry.dtype, shape, region })
    }

    /// The part of a tensor with indices `start..start + length` of dimension `dim`, which may be negative.
    ///
    /// # Errors
    /// `invalid-argument` where the slice does not lie inside the tensor, and those of [`Wanted::whole`].
    pub fn slice(source: usize, entry: Entry<'_>, dim: i64, start: i64, length: i64) -> Result<Wanted> {
        let shape = torch_shape(entry)?;
        let position = position_of(dim, shape.len()).ok_or_else(|| {
            let message =
                format!("dimension {dim} of a tensor with shape {shape:?}; it has {} dimensions", shape.len());
            outside(entry, message)
        })?;
        let size = shape.get(position).copied().unwrap_or(0);
        let span = match (u64::try_from(start), u64::try_from(length)) {
            (Ok(start), Ok(length)) => Some(Span { start, length, step: 1 }),
            _ => None,
        };
        let span = span.filter(|span| span.fits(size)).ok_or_else(|| {
            let message =
                format!("the slice of {length} from {start} does not lie inside dimension {dim}, whose size is {size}");
            outside(entry, message)
        })?;
        let mut spans: Vec<Span> = shape.iter().map(|&size| Span::whole(size)).collect();
        if let Some(place) = spans.get_mut(position) {
            *place = span;
        }
        Wanted::part(source, entry, &spans)
    }

    /// The part of a tensor that has these indices of each of its dimensions, as PyTorch has them.
    ///
    /// # Errors
    /// `invalid-argument` where there is not one span for each dimension, or one does not lie inside, and those of
    /// [`Wanted::whole`].
    pub fn part(source: usize, entry: Entry<'_>, spans: &[Span]) -> Result<Wanted> {
        let whole = Wanted::whole(source, entry)?;
        let shape: Vec<u64> = spans.iter().map(|span| span.length).collect();
        if whole.shape.len() != spans.len() {
            let message =
                format!("{} spans for a tensor with shape {:?}; give one for each dimension", spans.len(), whole.shape);
            return Err(outside(entry, message));
        }
        for (dim, (span, &size)) in spans.iter().zip(&whole.shape).enumerate() {
            if !span.fits(size) {
                let Span { start, length, step } = span;
                let message = format!(
                    "{length} indices from {start} with step {step} do not lie inside dimension {dim}, whose size is \
                     {size}"
                );
                return Err(outside(entry, message));
            }
        }
        let region = Region::of(entry.begin, entry.dtype.item_bytes(), &whole.shape, spans);
        Ok(Wanted { shape, region, ..whole })
    }

    /// Bytes of the result.
    pub fn bytes(&self) -> u64 {
        self.region.bytes()
    }

    /// The file's bytes in one piece, where the result lies in the file as it will lie in memory.
    pub fn contiguous(&self) -> Option<Range<u64>> {
        let Region { begin, row_bytes, repeats } = &self.region;
        repeats.is_empty().then(|| *begin..begin.saturating_add(*row_bytes))
    }
}

fn outside(entry: Entry<'_>, message: String) -> Error {
    Error::new(Kind::InvalidArgument, message).tensor(entry.name).offset(entry.begin)
}

/// The shape in PyTorch's elements.
///
/// # Errors
/// `unsupported-dtype` where PyTorch cannot hold it.
pub(crate) fn torch_shape(entry: Entry<'_>) -> Result<Vec<u64>> {
    let unsupported =
        |message: String| Error::new(Kind::UnsupportedDtype, message).tensor(entry.name).offset(entry.begin);
    if entry.dtype.scalar_type().is_none() {
        return Err(unsupported(format!("PyTorch has no dtype for {}; load the other tensors by name", entry.dtype)));
    }
    let mut shape = entry.shape.to_vec();
    let packed = entry.dtype.packed_elements();
    if packed > 1 {
        let last = shape.last_mut().filter(|size| **size % packed == 0);
        let last = last.ok_or_else(|| {
            unsupported(format!(
                "PyTorch packs {packed} elements of {} into one, so the last dimension of {:?} must be a multiple of it",
                entry.dtype, entry.shape
            ))
        })?;
        *last /= packed;
    }
    Ok(shape)
}

/// The place of a dimension that may be negative.
pub(crate) fn position_of(dim: i64, count: usize) -> Option<usize> {
    let count_signed = i64::try_from(count).ok()?;
    let position = if dim < 0 { dim.checked_add(count_signed)? } else { dim };
    usize::try_from(position).ok().filter(|&position| position < count)
}
