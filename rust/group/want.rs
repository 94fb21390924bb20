//! What a rank wants of a tensor.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::{Span, Wanted, position_of, torch_shape};
use crate::error::{Error, Kind, Result};
use std::fmt;

/// A share of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Want {
    /// Its place in the checkpoint.
    pub tensor: usize,
    /// What of it.
    pub share: Share,
}

/// What a rank has of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Share {
    /// All of it.
    Whole,
    /// One of as many chunks as there are ranks. All have the same size, but for the last that are not empty.
    Chunk {
        /// The dimension that is cut.
        dim: usize,
    },
    /// A box.
    Part {
        /// The indices of each dimension.
        spans: Vec<Span>,
    },
}

impl Want {
    /// Reads wants from numbers: for each the place of its tensor, then 0 for all of it; 1 and a dimension, which may be
    /// negative, for a chunk; or 2, the first indices and the numbers of indices, one of each for every dimension, for
    /// a box.
    ///
    /// # Errors
    /// `invalid-argument` where the numbers do not fit the tensors; `unsupported-dtype` where PyTorch cannot hold one.
    pub fn decode(mut numbers: &[i64], checkpoint: &Checkpoint) -> Result<Vec<Want>> {
        let mut wants = Vec::new();
        while let [tensor, kind, rest @ ..] = numbers {
            let missing = || Error::new(Kind::InvalidArgument, format!("the checkpoint has no tensor {tensor}"));
            let tensor = usize::try_from(*tensor).map_err(|_| missing())?;
            let (source, entry) = checkpoint.entry(tensor).ok_or_else(missing)?;
            let decoded = torch_shape(entry).and_then(|shape| {
                let refused = |message| Error::new(Kind::InvalidArgument, message).tensor(entry.name);
                let (share, used) = Share::decode(*kind, rest, &shape).map_err(refused)?;
                if let Share::Part { spans } = &share {
                    Wanted::part(source, entry, spans)?;
                }
                Ok((share, used))
            });
            let (share, used) = decoded.map_err(|error| match checkpoint.source(source) {
                Ok(source) => error.at(&source.path),
                Err(_) => error,
            })?;
            wants.push(Want { tensor, share });
            numbers = rest.get(used..).unwrap_or_default();
        }
        if !numbers.is_empty() {
            return Err(Error::new(Kind::InvalidArgument, "the last want is cut off"));
        }
        Ok(wants)
    }
}

impl Share {
    /// And how many of the numbers it takes.
    fn decode(kind: i64, numbers: &[i64], shape: &[u64]) -> std::result::Result<(Share, usize), String> {
        match (kind, numbers) {
            (0, _) => Ok((Share::Whole, 0)),
            (1, [dim, ..]) => match position_of(*dim, shape.len()) {
                Some(dim) => Ok((Share::Chunk { dim }, 1)),
                None => Err(format!("dimension {dim} of a tensor with shape {shape:?} is to be cut into chunks")),
            },
            (2, _) => {
                let count = shape.len();
                let (starts, lengths) = (numbers.get(..count), numbers.get(count..2 * count));
                let (starts, lengths) = starts.zip(lengths).ok_or("a part of it has too few numbers")?;
                let span = |(&start, &length): (&i64, &i64)| {
                    let (start, length) = (u64::try_from(start).ok()?, u64::try_from(length).ok()?);
                    Some(Span { start, length, step: 1 })
                };
                let spans: Option<Vec<Span>> = starts.iter().zip(lengths).map(span).collect();
                let spans = spans.ok_or("a part of it has negative numbers")?;
                Ok((Share::Part { spans }, 2 * count))
            }
            _ => Err(format!("{kind} is no kind of share")),
        }
    }

    /// The indices of each dimension that one of `ranks` ranks has.
    pub fn spans(&self, shape: &[u64], rank: usize, ranks: usize) -> Vec<Span> {
        match self {
            Share::Whole => shape.iter().map(|&size| Span::whole(size)).collect(),
            Share::Part { spans } => spans.clone(),
            Share::Chunk { dim } => {
                let number = |value: usize| u64::try_from(value).unwrap_or(u64::MAX);
                let chunk = |(position, &size): (usize, &u64)| {
                    if position != *dim {
                        return Span::whole(size);
                    }
                    let length = size.div_ceil(number(ranks).max(1));
                    let start = number(rank).saturating_mul(length).min(size);
                    Span { start, length: length.min(size - start), step: 1 }
                };
                shape.iter().enumerate().map(chunk).collect()
            }
        }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Share::Whole => write!(f, "all of it"),
            Share::Chunk { dim } => write!(f, "a chunk of dimension {dim}"),
            Share::Part { spans } => {
                let ranges: Vec<String> =
                    spans.iter().map(|span| format!("{}:{}", span.start, span.start + span.length)).collect();
                write!(f, "[{}]", ranges.join(", "))
            }
        }
    }
}
