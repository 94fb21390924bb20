//! Views of stored tensors and of tensors that are joined of views. No operation copies elements.

use super::layout::{Layout, numel};
use crate::cast::quantize::{self, Codes};
use crate::cast::quantized::{self, Form};
use crate::cast::scheme::Scheme;
use crate::checkpoint::region::IndexRange;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use std::sync::Arc;

/// Largest number of elements of a tensor: PyTorch counts them, and the bits of 128-bit elements, with 63 bits.
const NUMEL_MAX: u64 = 1 << 56;

/// Tensor of a checkpoint.
#[derive(Clone, Debug)]
pub struct Stored {
    /// Position of the tensor in [`Checkpoint::entries`](crate::checkpoint::Checkpoint::entries).
    pub position: usize,
    /// Stored dtype.
    pub dtype: Dtype,
    /// Shape in PyTorch's elements.
    pub shape: Vec<u64>,
}

/// Views that are copied into one contiguous tensor, side by side.
#[derive(Debug)]
pub struct Joined {
    /// Shape of the tensor.
    pub shape: Vec<u64>,
    /// Views from the first indices of `dim` to the last.
    pub inputs: Vec<View>,
    /// Dimension along which the views lie.
    pub dim: usize,
    /// Whether each view is one index of `dim`, which it lacks.
    pub is_stack: bool,
    /// Dtype to which the elements are rounded before they are cast to the dtype of the output, or `None` to round once.
    pub dtype: Option<Dtype>,
}

/// Tensor in the memory of the caller.
#[derive(Clone, Debug)]
pub struct Held {
    /// Index of the tensor among those that the caller passes.
    pub index: usize,
    /// Shape.
    pub shape: Vec<u64>,
}

/// Numbers of a quantized tensor.
#[derive(Debug)]
pub struct Dequantized {
    /// Shape of the numbers.
    pub shape: Vec<u64>,
    /// Shape of the codes in bytes, with the bytes of a block in no dimension of their own.
    pub code_shape: Vec<u64>,
    /// Way in which codes become numbers.
    pub scheme: Scheme,
    /// Rows and columns of a block, with 0 for all.
    pub block: [u64; 2],
    /// The codes.
    pub codes: Arc<Stored>,
    /// Their scales.
    pub scales: Arc<Stored>,
    /// The global scale.
    pub global_scale: Option<Arc<Stored>>,
    /// Shape of the scales, with a dimension for each one of the codes, or the shape of one scale.
    pub grid: Vec<u64>,
    /// Dtype to which the numbers are rounded before they are cast to the dtype of the output, or `None` to round once.
    pub dtype: Option<Dtype>,
}

/// Numbers that become codes and scales.
#[derive(Debug)]
pub struct Quantized {
    /// The numbers.
    pub input: View,
    /// Dtype of the numbers.
    pub dtype: Dtype,
    /// Kind of codes.
    pub codes: Codes,
    /// Rows and columns that share a scale, with 0 for all.
    pub block: [i64; 2],
    /// Shape of the scales.
    pub scales_shape: Vec<u64>,
}

/// Contiguous tensor that views show.
#[derive(Clone, Debug)]
pub enum Base {
    /// A tensor of the checkpoint.
    Stored(Arc<Stored>),
    /// A tensor in memory.
    Held(Arc<Held>),
    /// Views side by side.
    Joined(Arc<Joined>),
    /// Numbers of a quantized tensor.
    Dequantized(Arc<Dequantized>),
    /// Codes of numbers.
    Codes(Arc<Quantized>),
    /// Scales of codes.
    Scales(Arc<Quantized>),
}

/// View of a tensor.
#[derive(Clone, Debug)]
pub struct View {
    /// Elements of the base.
    pub layout: Layout,
    /// The tensor.
    pub base: Base,
}

/// Result of an operation, or the reason why it is not possible.
type Viewed = std::result::Result<View, String>;

impl Dequantized {
    /// Checks codes and scales against the scheme.
    pub(super) fn new(
        scheme: Scheme,
        block: &[i64],
        codes: Arc<Stored>,
        scales: Arc<Stored>,
        global_scale: Option<Arc<Stored>>,
    ) -> Result<Dequantized> {
        let global_form = global_scale.as_deref().map(Stored::form);
        let quantized = quantized::Quantized {
            scheme,
            codes: codes.form(),
            scales: scales.form(),
            global_scale: global_form,
            block,
            begin: &[],
        };
        let quantized::Layout { code_shape, shape, block, .. } = quantized.layout()?;
        let grid = scales.shape.clone();
        Ok(Dequantized { shape, code_shape, scheme, block, codes, scales, global_scale, grid, dtype: None })
    }

    /// Checks codes and scales of which a program has computed the block, and rounds the numbers to a dtype. `grid` is the
    /// shape of the scales, with a size of 1 in place of dimensions that they lack.
    pub(super) fn recorded(
        scheme: Scheme,
        block: &[i64],
        codes: Arc<Stored>,
        scales: Arc<Stored>,
        grid: &[u64],
        dtype: Dtype,
    ) -> Result<Dequantized> {
        let sizes = |shape: &[u64]| shape.iter().copied().filter(|&size| size != 1).collect::<Vec<_>>();
        if sizes(grid) != sizes(&scales.shape) {
            let message = format!("scales of shape {:?} cannot be viewed as {grid:?}", scales.shape);
            return Err(Error::new(Kind::InvalidArgument, message));
        }
        let [leading @ .., _, _] = grid else { return Dequantized::new(scheme, block, codes, scales, None) };
        // All matrices share the scales of one.
        let mut checked = grid.to_vec();
        if leading.iter().all(|&size| size == 1) && grid.len() == codes.shape.len() {
            checked.iter_mut().zip(&codes.shape).take(leading.len()).for_each(|(size, &own)| *size = own);
        }
        let whole = Arc::new(Stored { shape: checked, ..Stored::clone(&scales) });
        let numbers = Dequantized::new(scheme, block, codes, whole, None)?;
        Ok(Dequantized { scales, grid: grid.to_vec(), dtype: Some(dtype), ..numbers })
    }
}

impl Quantized {
    /// Returns the codes and the scales of numbers.
    pub(super) fn new(
        input: View,
        dtype: Dtype,
        codes: Codes,
        block: [i64; 2],
    ) -> std::result::Result<Quantized, String> {
        let sizes = quantize::block(&block).map_err(|error| error.message().to_owned())?;
        let [leading @ .., rows, columns] = input.shape() else {
            return Err(format!("a tensor of shape {:?} has no rows and columns", input.shape()));
        };
        if !dtype.is_castable() {
            return Err(format!("quant needs F64, F32, F16 or BF16, not {dtype}"));
        }
        let mut scales_shape = leading.to_vec();
        scales_shape.extend(quantize::grid([*rows, *columns], sizes));
        Ok(Quantized { dtype, codes, block, scales_shape, input })
    }
}

impl Stored {
    fn form(&self) -> Form<'_> {
        Form { dtype: self.dtype, shape: &self.shape }
    }
}

impl Base {
    /// Returns whether the tensor has the codes or the scales of numbers that a load converts.
    pub fn is_quantized(&self) -> bool {
        matches!(self, Base::Codes(_) | Base::Scales(_))
    }

    /// Returns the shape of the tensor.
    pub fn shape(&self) -> &[u64] {
        match self {
            Base::Stored(stored) => &stored.shape,
            Base::Held(held) => &held.shape,
            Base::Joined(joined) => &joined.shape,
            Base::Dequantized(numbers) => &numbers.shape,
            Base::Codes(quantized) => quantized.input.shape(),
            Base::Scales(quantized) => &quantized.scales_shape,
        }
    }
}

impl View {
    /// Returns a view of a whole tensor.
    pub fn whole(base: Base) -> View {
        View { layout: Layout::contiguous(base.shape()), base }
    }

    /// Returns the shape.
    pub fn shape(&self) -> &[u64] {
        &self.layout.sizes
    }

    /// Returns the view with another arrangement of the elements of its base.
    pub(super) fn with(&self, layout: Layout) -> View {
        View { layout, base: self.base.clone() }
    }

    /// Returns views along a dimension of one tensor.
    pub(super) fn cat(inputs: Vec<View>, dim: i64, dtype: Option<Dtype>) -> Viewed {
        let first = inputs.first().map(|view| view.shape().to_vec()).unwrap_or_default();
        let dim = resolve(dim, first.len())?;
        let mut shape = first.clone();
        let mut total = 0_u64;
        for view in &inputs {
            let sizes = view.shape();
            let differs = |(index, (one, two)): (usize, (&u64, &u64))| index != dim && one != two;
            if sizes.len() != first.len() || sizes.iter().zip(&first).enumerate().any(differs) {
                return Err(format!(
                    "cat along dimension {dim} of tensors with shapes {first:?} and {sizes:?}, which must be equal in \
                     the other dimensions"
                ));
            }
            total = total.saturating_add(sizes.get(dim).copied().unwrap_or(0));
        }
        if let Some(size) = shape.get_mut(dim) {
            *size = total;
        }
        joined(Joined { shape, inputs, dim, is_stack: false, dtype })
    }

    /// Returns views of one shape along a new dimension.
    pub(super) fn stack(inputs: Vec<View>, dim: i64, dtype: Option<Dtype>) -> Viewed {
        let mut shape = inputs.first().map(|view| view.shape().to_vec()).unwrap_or_default();
        let dim = resolve(dim, shape.len() + 1)?;
        if let Some((index, other)) = inputs.iter().enumerate().find(|(_, view)| view.shape() != shape) {
            return Err(format!(
                "stack of tensors with shapes {shape:?} and, at index {index}, {:?}, which must be equal",
                other.shape()
            ));
        }
        shape.insert(dim, to_u64(inputs.len()));
        joined(Joined { shape, inputs, dim, is_stack: true, dtype })
    }

    /// Returns some indices of a dimension, as `x[start:end:step]` does. Indices must lie inside the dimension.
    pub(super) fn slice(&self, dim: i64, start: i64, end: i64, step: i64) -> Viewed {
        let (dim, size) = self.dim(dim)?;
        let index = |index: i64| if index < 0 { size.checked_add_signed(index) } else { u64::try_from(index).ok() };
        let bounds = index(start).zip(index(end)).filter(|&(start, end)| start <= end && end <= size);
        let step = u64::try_from(step).ok().filter(|&step| step > 0);
        let ((start, end), step) = bounds.zip(step).ok_or_else(|| {
            format!(
                "indices {start} to {end} with step {step} do not lie inside dimension {dim}, whose size is {size}",
                step = step.map_or_else(|| "0 or less".to_owned(), |step| step.to_string())
            )
        })?;
        let range = IndexRange { start, length: (end - start).div_ceil(step), step };
        Ok(self.with(self.layout.index_dim(dim, range)))
    }

    /// Returns `length` indices of a dimension.
    pub(super) fn narrow(&self, dim: i64, start: i64, length: i64) -> Viewed {
        let (index, size) = self.dim(dim)?;
        let first = if start < 0 { size.checked_add_signed(start) } else { u64::try_from(start).ok() };
        let end = first.and_then(|first| first.checked_add(u64::try_from(length).ok()?));
        match (first, end) {
            (Some(first), Some(end)) if end <= size => {
                Ok(self.with(self.layout.index_dim(index, IndexRange { start: first, length: end - first, step: 1 })))
            }
            _ => Err(format!("{length} indices from {start} do not lie inside dimension {dim}, whose size is {size}")),
        }
    }

    /// Returns the elements in another shape. If they do not allow that, the result is a view of a copy.
    pub(super) fn view(&self, sizes: &[i64]) -> Viewed {
        let wrong = || format!("a tensor of shape {:?} cannot be viewed as {sizes:?}", self.shape());
        let known = sizes.iter().filter(|&&size| size != -1).map(|&size| u64::try_from(size).ok());
        let known: Vec<u64> = known.collect::<Option<_>>().ok_or_else(wrong)?;
        let elements = self.layout.numel();
        let free = match sizes.len() - known.len() {
            0 => None,
            1 => Some(elements.checked_div(numel(&known)).ok_or_else(wrong)?),
            _ => return Err(wrong()),
        };
        let size = |&size: &i64| u64::try_from(size).ok().or(free);
        let shape: Vec<u64> = sizes.iter().map(size).collect::<Option<_>>().ok_or_else(wrong)?;
        if numel(&shape) != elements {
            return Err(wrong());
        }
        if let Some(layout) = self.layout.view(&shape) {
            return Ok(self.with(layout));
        }
        let copy = self.contiguous()?;
        let layout = copy.layout.view(&shape).ok_or_else(wrong)?;
        Ok(copy.with(layout))
    }

    /// Returns the dimensions in another order.
    pub(super) fn permute(&self, dims: &[i64]) -> Viewed {
        let rank = self.shape().len();
        let order: Vec<usize> = dims.iter().map(|&dim| resolve(dim, rank)).collect::<std::result::Result<_, _>>()?;
        let mut sorted = order.clone();
        sorted.sort_unstable();
        if !sorted.iter().copied().eq(0..rank) {
            return Err(format!("permute of a tensor with {rank} dimensions needs each of them once, not {dims:?}"));
        }
        Ok(self.with(self.layout.permute(&order)))
    }

    /// Returns the tensor with two dimensions exchanged.
    pub(super) fn transpose(&self, dims: [i64; 2]) -> Viewed {
        let rank = self.shape().len();
        let mut order: Vec<usize> = (0..rank).collect();
        let [first, second] = dims;
        order.swap(resolve(first, rank)?, resolve(second, rank)?);
        Ok(self.with(self.layout.permute(&order)))
    }

    /// Returns a view of a contiguous copy.
    fn contiguous(&self) -> Viewed {
        let input = self.with(self.layout.unsqueeze(0));
        let copy = Joined { shape: input.shape().to_vec(), inputs: vec![input], dim: 0, is_stack: false, dtype: None };
        let copy = joined(copy)?;
        let layout = copy.layout.select(0, 0);
        Ok(copy.with(layout))
    }

    /// Returns the index of a dimension, and its size.
    fn dim(&self, dim: i64) -> std::result::Result<(usize, u64), String> {
        let index = resolve(dim, self.shape().len())?;
        Ok((index, self.shape().get(index).copied().unwrap_or(0)))
    }
}

fn joined(joined: Joined) -> Viewed {
    if numel(&joined.shape) > NUMEL_MAX {
        return Err(format!("a tensor of shape {:?} has too many elements", joined.shape));
    }
    Ok(View::whole(Base::Joined(Arc::new(joined))))
}

/// Returns the dimension with an index, which counts from the last if it is negative.
fn resolve(dim: i64, rank: usize) -> std::result::Result<usize, String> {
    let index = if dim < 0 { to_u64(rank).checked_add_signed(dim) } else { u64::try_from(dim).ok() };
    let index = index.map(to_usize).filter(|&index| index < rank);
    index.ok_or_else(|| format!("dimension {dim} of a tensor with {rank} dimensions"))
}
