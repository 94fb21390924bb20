//! Steps that convert numbers to codes and scales, each for a range of rows or of matrices, so that no step holds more
//! than some of the numbers, unless all rows share a scale.

use super::layout::{Elements, Layout, Memory};
use super::pieces::{Copy, Plan, Planner, Quantization, Temporary};
use super::requests::Request;
use super::view::{Base, Quantized};
use crate::cast::quantize;
use crate::checkpoint::region::IndexRange;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::os::retry::Check;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Request for the codes or the scales of numbers, and the index region that it names.
struct Part<'a> {
    index: usize,
    request: &'a Request,
    region: Vec<IndexRange>,
    is_codes: bool,
}

/// Plans the conversions to requested codes and scales, in steps that follow each other. Each has its own temporary
/// tensors, with about `numbers_max` numbers at most, or those that share a scale. Only rows of requests are read.
///
/// # Errors
/// The errors of `check`.
pub fn steps(requests: &[Request], numbers_max: u64, check: Check<'_>) -> Result<Vec<Plan>> {
    let mut groups: Vec<(&Arc<Quantized>, Vec<Part<'_>>)> = Vec::new();
    let mut known = HashMap::new();
    for (index, request) in requests.iter().enumerate() {
        let (quantized, is_codes) = match &request.view.base {
            Base::Codes(quantized) => (quantized, true),
            Base::Scales(quantized) => (quantized, false),
            _ => continue,
        };
        if request.view.layout.numel() == 0 {
            continue;
        }
        let region = request.view.layout.region(request.view.base.shape());
        let region = region.ok_or_else(|| Error::new(Kind::Internal, "codes that are no index region"))?;
        let group = *known.entry(Arc::as_ptr(quantized)).or_insert(groups.len());
        if group == groups.len() {
            groups.push((quantized, Vec::new()));
        }
        if let Some((_, parts)) = groups.get_mut(group) {
            parts.push(Part { index, request, region, is_codes });
        }
    }
    let mut steps = Vec::new();
    for (quantized, parts) in groups {
        let (unit, length) = range_of_step(quantized, numbers_max)?;
        let size = quantized.input.shape().first().copied().unwrap_or(0);
        let covered = parts.iter().filter_map(|part| part.covered(unit));
        let all = covered.fold(size..0, |all, part| all.start.min(part.start)..all.end.max(part.end));
        // Rows that share a scale are all read.
        let (mut begin, end) = (all.start / unit * unit, all.end.div_ceil(unit).saturating_mul(unit).min(size));
        while begin < end {
            check()?;
            let next = begin.saturating_add(length).min(end);
            steps.extend(step(quantized, &parts, begin..next, begin / unit..next.div_ceil(unit)));
            begin = next;
        }
    }
    Ok(steps)
}

impl Part<'_> {
    /// Returns the indices of the first dimension of the numbers that the region needs.
    fn covered(&self, unit: u64) -> Option<Range<u64>> {
        let IndexRange { start, length, step } = *self.region.first()?;
        let end = start + length.checked_sub(1)? * step + 1;
        let unit = if self.is_codes { 1 } else { unit };
        Some(start * unit..end * unit)
    }
}

/// Returns how many indices of the first dimension share scales, and how many a step has. These are rows of one matrix,
/// or the first of several dimensions before rows and columns.
fn range_of_step(quantized: &Quantized, numbers_max: u64) -> Result<(u64, u64)> {
    let shape = quantized.input.shape();
    let unit = match (shape, quantize::block(&quantized.block)?) {
        (&[rows, _], [0, _]) => rows.max(1),
        (&[_, _], [rows, _]) => rows,
        _ => 1,
    };
    let unit_numbers = shape.iter().skip(1).fold(unit, |product, &size| product.saturating_mul(size));
    Ok((unit, (numbers_max / unit_numbers.max(1)).max(1).saturating_mul(unit)))
}

/// Returns the plan for these indices of numbers and of scales, or `None` if no part has some.
fn step(quantized: &Arc<Quantized>, parts: &[Part<'_>], rows: Range<u64>, scale_rows: Range<u64>) -> Option<Plan> {
    let range = |rows: &Range<u64>| IndexRange { start: rows.start, length: rows.end - rows.start, step: 1 };
    let numbers = quantized.input.with(quantized.input.layout.index_dim(0, range(&rows)));
    let scales = Layout::contiguous(&quantized.scales_shape).index_dim(0, range(&scale_rows)).sizes;
    let output = parts.first()?.index;

    let mut plan = Plan::default();
    let input = plan.temporaries.len();
    Planner { plan: &mut plan, dtype: quantized.dtype, output }.load_temporary(&numbers);
    let codes = plan.temporaries.len();
    for (dtype, shape) in [(quantized.codes.dtype(), numbers.shape()), (Dtype::F32, &*scales)] {
        plan.temporaries.push(Temporary { dtype, shape: shape.to_vec(), output, is_result: true });
    }
    let copies_before = plan.copies.len();
    plan.quantizations.push(Quantization { quantized: Arc::clone(quantized), input, codes, copies_before });
    for Part { index, request, region, is_codes } in parts {
        let (rows, memory, shape) =
            if *is_codes { (&rows, codes, numbers.shape()) } else { (&scale_rows, codes + 1, &*scales) };
        let mut region = region.clone();
        let Some(own) = region.first_mut() else { continue };
        // Indices of the region before the range, and before its end.
        let before = |index: u64| index.saturating_sub(own.start).div_ceil(own.step).min(own.length);
        let (first, end) = (before(rows.start), before(rows.end));
        if first < end {
            let start = (own.start + first * own.step) - rows.start;
            *own = IndexRange { start, length: end - first, step: own.step };
            let source =
                Elements { memory: Memory::Temporary(memory), layout: Layout::contiguous(shape).index(&region) };
            let layout = request.layout.index_dim(0, IndexRange { start: first, length: end - first, step: 1 });
            plan.copies.push(Copy { source, target: Elements { memory: Memory::Output(*index), layout } });
        }
    }
    (plan.copies.len() > copies_before).then_some(plan)
}
