//! Pieces of outputs: index regions of stored tensors, and the memory that each of them fills.

use super::layout::{Elements, Layout, Memory};
use super::matching::Recipe;
use super::numbers::Parts;
use super::requests::Request;
use super::view::{Base, Dequantized, Joined, Quantized, View};
use crate::checkpoint::region::IndexRange;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::os::retry::Check;
use std::sync::Arc;

/// Regions that one view may be split into. Beyond, the view is copied out of a temporary tensor.
const PARTS_MAX: u64 = 4096;

/// Index region of a stored tensor, and the memory of the same shape that it fills.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Position of the tensor in [`Checkpoint::entries`](crate::checkpoint::Checkpoint::entries).
    pub position: usize,
    /// Indices of each dimension.
    pub region: Vec<IndexRange>,
    /// Memory for the elements.
    pub target: Elements,
}

/// Index region of a quantized tensor, and the memory that its numbers fill.
#[derive(Clone, Debug)]
pub struct NumbersPiece {
    /// The quantized tensor.
    pub numbers: Arc<Dequantized>,
    /// Indices of its codes, of its scales and of its global scales.
    pub parts: Parts,
    /// Memory of the shape of the numbers.
    pub target: Elements,
}

/// Copy out of a temporary tensor, after all pieces are loaded.
#[derive(Clone, Debug)]
pub struct Copy {
    /// Elements of the temporary tensor.
    pub source: Elements,
    /// Memory of the same shape.
    pub target: Elements,
}

/// Contiguous tensor for views that are no index regions.
#[derive(Clone, Debug)]
pub struct Temporary {
    /// Dtype.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<u64>,
    /// Index of the requested output whose device has the tensor.
    pub output: usize,
    /// Whether a conversion to codes and scales creates the tensor.
    pub is_result: bool,
}

/// Conversion of a temporary tensor to codes and scales.
#[derive(Clone, Debug)]
pub struct Quantization {
    /// Kind of codes, and rows and columns that share a scale.
    pub quantized: Arc<Quantized>,
    /// Index of the temporary tensor with the numbers.
    pub input: usize,
    /// Index of the temporary tensor for the codes. The next one is for the scales.
    pub codes: usize,
    /// Number of copies to make before.
    pub copies_before: usize,
}

/// Loads and copies that fill requested outputs: all pieces and numbers in any order, and then all copies in theirs.
#[derive(Debug, Default)]
pub struct Plan {
    /// Pieces.
    pub pieces: Vec<Piece>,
    /// Numbers of quantized tensors.
    pub numbers: Vec<NumbersPiece>,
    /// Copies.
    pub copies: Vec<Copy>,
    /// Conversions to codes and scales.
    pub quantizations: Vec<Quantization>,
    /// Temporary tensors.
    pub temporaries: Vec<Temporary>,
}

impl Plan {
    /// Plans the loads of outputs, except for codes and scales that the load makes, see [`steps`](super::quantize::steps).
    ///
    /// # Errors
    /// The errors of `check`.
    pub fn new(recipe: &Recipe, requests: &[Request], check: Check<'_>) -> Result<Plan> {
        let mut plan = Plan::default();
        for (index, request) in requests.iter().enumerate() {
            check()?;
            let output = recipe.outputs().get(request.output);
            let output = output.ok_or_else(|| Error::new(Kind::Internal, "no such output"))?;
            let target = Elements { memory: Memory::Output(index), layout: request.layout.clone() };
            if request.view.base.is_quantized() {
                continue;
            }
            let mut planner = Planner { plan: &mut plan, dtype: request.dtype, output: index };
            if output.dtype != request.dtype && (output.is_cast || !request.dtype.is_castable()) {
                // One rounding to the dtype of the rule, and another to that of the tensor.
                planner.dtype = output.dtype;
                planner.copy_whole(&request.view, target);
            } else {
                planner.add(&request.view, target, PARTS_MAX);
            }
        }
        Ok(plan)
    }

    /// Returns the piece that alone fills each of some requested outputs from its first element to its last, as a load
    /// into a new tensor does, or `None`.
    pub fn whole_pieces(&self, requests: &[Request]) -> Vec<Option<usize>> {
        let mut pieces = vec![None; requests.len()];
        let mut has_others = vec![false; requests.len()];
        for (index, piece) in self.pieces.iter().enumerate() {
            let Memory::Output(output) = piece.target.memory else { continue };
            let (Some(request), Some(found)) = (requests.get(output), pieces.get_mut(output)) else { continue };
            let is_whole = piece.target.layout.numel() == request.layout.numel() && piece.target.layout.is_contiguous();
            match found {
                None if is_whole => *found = Some(index),
                _ => has_others.iter_mut().skip(output).take(1).for_each(|others| *others = true),
            }
        }
        pieces.into_iter().zip(has_others).map(|(piece, has_others)| piece.filter(|_| !has_others)).collect()
    }
}

/// Planner of one output.
pub(super) struct Planner<'a> {
    pub(super) plan: &'a mut Plan,
    /// Dtype of the pieces of the output.
    pub(super) dtype: Dtype,
    pub(super) output: usize,
}

impl Planner<'_> {
    /// Adds what fills memory with the elements of a view of the same shape.
    fn add(&mut self, view: &View, target: Elements, parts_max: u64) {
        if view.layout.numel() == 0 {
            return;
        }
        match &view.base {
            Base::Held(held) => {
                let source = Elements { memory: Memory::Held(held.index), layout: view.layout.clone() };
                self.plan.copies.push(Copy { source, target });
                return;
            }
            // Elements are rounded to one dtype, and then to another.
            Base::Joined(joined) if joined.dtype.is_some_and(|dtype| dtype != self.dtype) => {
                return self.copy_base(view, target);
            }
            Base::Dequantized(numbers) if numbers.dtype.is_some_and(|dtype| dtype != self.dtype) => {
                return self.copy_base(view, target);
            }
            _ => {}
        }
        let order = view.layout.stride_order();
        let view = view.with(view.layout.permute(&order));
        let target = Elements { layout: target.layout.permute(&order), ..target };
        let region = view.layout.region(view.base.shape());
        let fitting = region.and_then(|region| {
            let lengths: Vec<u64> = region.iter().map(|range| range.length).collect();
            Some((region, target.layout.view(&lengths)?))
        });
        match (fitting, &view.base) {
            (None, _) => self.split(&view, target, parts_max),
            (Some((region, layout)), Base::Stored(stored)) => {
                let target = Elements { layout, ..target };
                self.plan.pieces.push(Piece { position: stored.position, region, target });
            }
            (Some((region, layout)), Base::Joined(joined)) => {
                self.add_inputs(joined, &region, &Elements { layout, ..target }, parts_max);
            }
            (Some((region, layout)), Base::Dequantized(numbers)) => {
                self.add_numbers(numbers, &region, Elements { layout, ..target });
            }
            // Tensors in memory are copied above. Rules with codes and scales have no other operation, and own steps.
            (Some(_), Base::Held(_) | Base::Codes(_) | Base::Scales(_)) => {}
        }
    }

    /// Adds the parts of the inputs of a joined tensor that lie in a region.
    fn add_inputs(&mut self, joined: &Joined, region: &[IndexRange], target: &Elements, parts_max: u64) {
        let Joined { inputs, dim, is_stack, .. } = joined;
        let Some(&IndexRange { start, length, step }) = region.get(*dim) else { return };
        let mut begin = 0_u64;
        for view in inputs {
            let count = if *is_stack { 1 } else { view.shape().get(*dim).copied().unwrap_or(0) };
            // Requested indices before the input, and before its end.
            let before = |index: u64| index.saturating_sub(start).div_ceil(step).min(length);
            let (first, end) = (before(begin), before(begin.saturating_add(count)));
            if first < end {
                let layout = if *is_stack { view.layout.unsqueeze(*dim) } else { view.layout.clone() };
                let own = IndexRange { start: (start + first * step).saturating_sub(begin), length: end - first, step };
                let mut ranges = region.to_vec();
                ranges.iter_mut().skip(*dim).take(1).for_each(|range| *range = own);
                let part = IndexRange { start: first, length: end - first, step: 1 };
                let target = Elements { layout: target.layout.index_dim(*dim, part), ..target.clone() };
                self.add(&view.with(layout.index(&ranges)), target, parts_max);
            }
            begin = begin.saturating_add(count);
        }
    }

    /// Adds an index region of a quantized tensor.
    fn add_numbers(&mut self, numbers: &Arc<Dequantized>, region: &[IndexRange], target: Elements) {
        let covering = numbers.covering(region);
        if covering == region {
            let numbers = Arc::clone(numbers);
            for (region, target) in numbers.split(covering, target) {
                let parts = numbers.parts(&region);
                self.plan.numbers.push(NumbersPiece { numbers: Arc::clone(&numbers), parts, target });
            }
            return;
        }
        // Numbers beside those of the region are computed, too, and not copied.
        let shape: Vec<u64> = covering.iter().map(|range| range.length).collect();
        let own = |(range, outer): (&IndexRange, &IndexRange)| match outer.step {
            1 => IndexRange { start: range.start.saturating_sub(outer.start), ..*range },
            _ => IndexRange::whole(range.length),
        };
        let own: Vec<IndexRange> = region.iter().zip(&covering).map(own).collect();
        let memory = self.new_temporary(&shape);
        let layout = Layout::contiguous(&shape);
        let source = Elements { memory, layout: layout.index(&own) };
        self.add_numbers(numbers, &covering, Elements { memory, layout });
        self.plan.copies.push(Copy { source, target });
    }

    /// Adds a view index by index of its shortest dimension.
    fn split(&mut self, view: &View, target: Elements, parts_max: u64) {
        let sizes = view.shape().iter().copied().enumerate().filter(|(_, size)| *size > 1);
        let lengths: Vec<(u64, usize)> = sizes.map(|(dim, size)| (size, dim)).collect();
        match lengths.iter().min() {
            Some(&(length, dim)) if length <= parts_max && lengths.len() > 1 => {
                for index in 0..length {
                    let target = Elements { layout: target.layout.select(dim, index), ..target.clone() };
                    self.add(&view.with(view.layout.select(dim, index)), target, parts_max / length);
                }
            }
            _ => self.copy_base(view, target),
        }
    }

    /// Adds a view by way of a temporary tensor with all of its base.
    fn copy_base(&mut self, view: &View, target: Elements) {
        let whole = View::whole(view.base.clone());
        let own = self.dtype;
        match &view.base {
            Base::Joined(joined) => self.dtype = joined.dtype.unwrap_or(own),
            Base::Dequantized(numbers) => self.dtype = numbers.dtype.unwrap_or(own),
            _ => {}
        }
        let memory = self.load_temporary(&whole);
        self.dtype = own;
        let source = Elements { memory, layout: view.layout.clone() };
        self.plan.copies.push(Copy { source, target });
    }

    /// Adds a view by way of a temporary tensor of its shape.
    fn copy_whole(&mut self, view: &View, target: Elements) {
        let memory = self.load_temporary(view);
        let source = Elements { memory, layout: Layout::contiguous(view.shape()) };
        self.plan.copies.push(Copy { source, target });
    }

    fn new_temporary(&mut self, shape: &[u64]) -> Memory {
        let Planner { dtype, output, .. } = *self;
        self.plan.temporaries.push(Temporary { dtype, shape: shape.to_vec(), output, is_result: false });
        Memory::Temporary(self.plan.temporaries.len() - 1)
    }

    /// Adds a temporary tensor with the elements of a view.
    pub(super) fn load_temporary(&mut self, view: &View) -> Memory {
        let memory = self.new_temporary(view.shape());
        self.add(view, Elements { memory, layout: Layout::contiguous(view.shape()) }, PARTS_MAX);
        memory
    }
}
