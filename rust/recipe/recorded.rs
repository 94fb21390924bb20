//! Recorded views: operations that a program has run on tensors without values, in place of the expressions of rules.

use super::layout::Layout;
use super::matching::Recipe;
use super::output::{Output, new_stored};
use super::view::{Base, Dequantized, Held, Stored, View};
use crate::cast::scheme::Scheme;
use crate::checkpoint::Checkpoint;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use serde::Deserialize;
use std::sync::Arc;

/// Recorded views.
#[derive(Deserialize)]
pub struct Recorded {
    /// Tensors that views show, each after the tensors of its inputs.
    bases: Vec<RecordedBase>,
    /// The views.
    views: Vec<RecordedView>,
}

/// Contiguous tensor that views show. Dtypes are numbers of PyTorch's scalar types.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum RecordedBase {
    /// Position of a tensor in [`Checkpoint::entries`].
    Stored(usize),
    /// Index, dtype and shape of a tensor in memory.
    Held(usize, i8, Vec<u64>),
    /// Numbers of a quantized tensor.
    Numbers {
        /// Positions of codes and scales.
        codes: usize,
        scales: usize,
        scheme: String,
        /// Rows and columns of a block, or empty for the scheme's own.
        block: Vec<i64>,
        /// Shape of the scales.
        grid: Vec<u64>,
        dtype: i8,
    },
    /// Views side by side: whether they are stacked, the dimension, the dtype and the views.
    Joined(bool, i64, i8, Vec<RecordedView>),
}

/// View of the base with an index: all of it, or elements from an offset on, with these sizes and strides.
#[derive(Deserialize)]
#[serde(untagged)]
enum RecordedView {
    Whole(usize),
    Part(usize, u64, Vec<u64>, Vec<u64>),
}

/// Bases that were read so far, with their dtypes.
struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    bases: Vec<(Base, Dtype)>,
}

impl Recipe {
    /// Returns the recipe whose outputs are recorded views. The first tensor that each reads names it.
    ///
    /// # Errors
    /// `invalid-argument` if a view does not lie inside its tensor, the views of a joined tensor do not fit each other, or
    /// scales do not fit codes.
    pub fn recorded(checkpoint: &Checkpoint, recorded: &Recorded) -> Result<Recipe> {
        let mut reader = Reader { checkpoint, bases: Vec::with_capacity(recorded.bases.len()) };
        for base in &recorded.bases {
            let read = reader.base(base)?;
            reader.bases.push(read);
        }
        let output = |view: &RecordedView| {
            let (view, dtype) = reader.view(view)?;
            let name = first_stored(&view.base).and_then(|stored| checkpoint.entry(stored.position));
            let name = name.map_or("", |(_, entry)| entry.name).into();
            Ok(Output { name, dtype, is_cast: false, view, sources: Vec::new() })
        };
        Ok(Recipe::of_outputs(recorded.views.iter().map(output).collect::<Result<_>>()?))
    }
}

impl Reader<'_> {
    fn base(&self, base: &RecordedBase) -> Result<(Base, Dtype)> {
        match base {
            RecordedBase::Stored(position) => {
                let stored = self.stored(*position)?;
                let dtype = stored.dtype;
                Ok((Base::Stored(stored), dtype))
            }
            RecordedBase::Held(index, dtype, shape) => {
                Ok((Base::Held(Arc::new(Held { index: *index, shape: shape.clone() })), scalar_type(*dtype)?))
            }
            RecordedBase::Numbers { codes, scales, scheme, block, grid, dtype } => {
                let (codes, scales, dtype) = (self.stored(*codes)?, self.stored(*scales)?, scalar_type(*dtype)?);
                let numbers = Dequantized::recorded(Scheme::parse(scheme)?, block, codes, scales, grid, dtype)?;
                Ok((Base::Dequantized(Arc::new(numbers)), dtype))
            }
            RecordedBase::Joined(is_stack, dim, dtype, inputs) => {
                let dtype = scalar_type(*dtype)?;
                let inputs: Vec<(View, Dtype)> = inputs.iter().map(|input| self.view(input)).collect::<Result<_>>()?;
                let rounded = inputs.iter().any(|(_, own)| *own != dtype).then_some(dtype);
                let inputs = inputs.into_iter().map(|(view, _)| view).collect();
                let joined = if *is_stack { View::stack } else { View::cat };
                Ok((joined(inputs, *dim, rounded).map_err(invalid)?.base, dtype))
            }
        }
    }

    fn view(&self, view: &RecordedView) -> Result<(View, Dtype)> {
        let (index, layout) = match view {
            RecordedView::Whole(index) => (index, None),
            RecordedView::Part(index, offset, sizes, strides) => {
                (index, Some(Layout { offset: *offset, sizes: sizes.clone(), strides: strides.clone() }))
            }
        };
        let (base, dtype) = self.bases.get(*index).ok_or_else(|| invalid(format!("no tensor {index}")))?;
        let whole = View::whole(base.clone());
        let Some(layout) = layout else { return Ok((whole, *dtype)) };
        if layout.sizes.len() != layout.strides.len() || layout.end() > whole.layout.numel() {
            return Err(invalid(format!("{layout:?} does not lie inside a tensor of shape {:?}", whole.shape())));
        }
        Ok((whole.with(layout), *dtype))
    }

    fn stored(&self, position: usize) -> Result<Arc<Stored>> {
        let entry = self.checkpoint.entry(position).ok_or_else(|| invalid(format!("no tensor at {position}")))?;
        new_stored(self.checkpoint, position, entry).map(Arc::new)
    }
}

fn first_stored(base: &Base) -> Option<&Stored> {
    match base {
        Base::Stored(stored) => Some(stored),
        Base::Dequantized(numbers) => Some(&numbers.codes),
        Base::Joined(joined) => joined.inputs.first().and_then(|input| first_stored(&input.base)),
        Base::Codes(quantized) | Base::Scales(quantized) => first_stored(&quantized.input.base),
        Base::Held(_) => None,
    }
}

fn scalar_type(number: i8) -> Result<Dtype> {
    Dtype::from_scalar_type(number).ok_or_else(|| invalid(format!("no dtype has the number {number}")))
}

fn invalid(message: String) -> Error {
    Error::new(Kind::InvalidArgument, message)
}
