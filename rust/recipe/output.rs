//! Outputs of recipes: the expression of a rule for some texts of its variables.

use super::instances::{Instances, not_found};
use super::names::{Bindings, NamePattern};
use super::rules::{Expression, Operation, Rule};
use super::view::{Base, Dequantized, Quantized, Stored, View};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::torch_shape;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::header::Entry;
use crate::num::to_u64;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// Dtype of dequantized numbers, unless a rule states another.
const NUMBERS_DTYPE: Dtype = Dtype::BF16;
/// Number of missing numbers that errors list.
const LISTED: usize = 8;

/// Output of a recipe.
#[derive(Clone, Debug)]
pub struct Output {
    /// Name.
    pub name: Box<str>,
    /// Dtype in the rule, or else the stored one.
    pub dtype: Dtype,
    /// Whether the rule states the dtype.
    pub is_cast: bool,
    /// Elements of the output.
    pub view: View,
    /// Positions of the tensors that the output is made of, in [`Checkpoint::entries`], without duplicates.
    pub sources: Vec<usize>,
}

impl Output {
    /// Returns the outputs for some texts of the variables: two for codes and scales, and otherwise one.
    pub(super) fn all(
        instances: &Instances<'_>,
        bindings: &Bindings<'_>,
        stored: &mut [Option<Arc<Stored>>],
    ) -> Result<Vec<Output>> {
        let Rule { origin, outputs, expression, dtype, .. } = instances.rule;
        let name = outputs.first().map(|(_, pattern)| pattern.name(bindings)).unwrap_or_default();
        let (input, quantized) = match &expression.operation {
            Operation::Quantize { input, codes, block } => (&**input, Some((*codes, *block))),
            _ => (expression, None),
        };
        let numbers_dtype = dtype.unwrap_or(if quantized.is_some() { Dtype::F32 } else { NUMBERS_DTYPE });
        let mut build =
            Build { instances, bindings, numbers_dtype, numbers: HashMap::new(), stored, leaves: Vec::new() };
        let view = build.expression(input).map_err(|error| error.tensor(&*name))?;
        let leaves = std::mem::take(&mut build.leaves);
        let wrong = |message: String| origin.error(expression.column, message).tensor(&*name);
        let Some((_, first)) = leaves.first() else { return Err(wrong("the rule reads no tensor".to_owned())) };
        let output_dtype = dtype.unwrap_or(*first);
        for (_, stored) in &leaves {
            if *stored != output_dtype && dtype.is_none() {
                return Err(wrong(format!(
                    "the tensors have the dtypes {first} and {stored}; state one, such as `: {first}`"
                )));
            }
            if *stored != output_dtype && !stored.is_castable() {
                return Err(wrong(format!(
                    "a tensor of dtype {stored} cannot be cast to {output_dtype}: only F16, BF16, F32 and F64 can; \
                     8-bit and 4-bit numbers need dequant and their scales"
                )));
            }
        }
        let mut sources: Vec<usize> = leaves.iter().map(|(position, _)| *position).collect();
        sources.sort_unstable();
        sources.dedup();
        let Some((codes, block)) = quantized else {
            return Ok(vec![Output {
                name: name.into(),
                dtype: output_dtype,
                is_cast: dtype.is_some(),
                view,
                sources,
            }]);
        };
        let quantized = Arc::new(Quantized::new(view, output_dtype, codes, block).map_err(wrong)?);
        let output = |((_, pattern), (dtype, base)): (&(usize, NamePattern), (Dtype, Base))| Output {
            name: pattern.name(bindings).into(),
            dtype,
            is_cast: true,
            view: View::whole(base),
            sources: sources.clone(),
        };
        let parts = [(codes.dtype(), Base::Codes(Arc::clone(&quantized))), (Dtype::F32, Base::Scales(quantized))];
        Ok(outputs.iter().zip(parts).map(output).collect())
    }
}

/// Evaluation of an expression for some texts of the variables.
struct Build<'b, 'a> {
    instances: &'b Instances<'a>,
    bindings: &'b Bindings<'a>,
    /// Dtype of dequantized numbers.
    numbers_dtype: Dtype,
    /// Numbers of the variables of stacks around the current expression.
    numbers: HashMap<usize, (u64, String)>,
    /// Tensors of the checkpoint that were used before.
    stored: &'b mut [Option<Arc<Stored>>],
    /// Positions and dtypes of the leaves.
    leaves: Vec<(usize, Dtype)>,
}

impl Build<'_, '_> {
    fn expression(&mut self, expression: &Expression) -> Result<View> {
        let viewed = match &expression.operation {
            Operation::Tensor(leaf) => return self.tensor(*leaf),
            Operation::Cat { dim, inputs } => {
                let inputs = inputs.iter().map(|input| self.expression(input)).collect::<Result<_>>()?;
                View::cat(inputs, *dim, None)
            }
            Operation::Stack { dim, variable, leaves, input } => {
                let count = self.count(expression.column, *variable, leaves)?;
                let mut inputs = Vec::new();
                for number in 0..count {
                    self.numbers.insert(*variable, (number, number.to_string()));
                    inputs.push(self.expression(input)?);
                }
                self.numbers.remove(variable);
                View::stack(inputs, *dim, None)
            }
            Operation::Slice { input, dim, start, end, step } => {
                self.expression(input)?.slice(*dim, *start, *end, *step)
            }
            Operation::Narrow { input, dim, start, length } => self.expression(input)?.narrow(*dim, *start, *length),
            Operation::View { input, sizes } => self.expression(input)?.view(sizes),
            Operation::Permute { input, dims } => self.expression(input)?.permute(dims),
            Operation::Transpose { input, dims } => self.expression(input)?.transpose(*dims),
            Operation::Dequantize { .. } => return self.numbers_of(expression),
            Operation::Quantize { .. } => Err("quant is the outermost operation of a rule".to_owned()),
        };
        viewed.map_err(|message| self.instances.rule.origin.error(expression.column, message))
    }

    /// Returns the numbers of a quantized tensor.
    fn numbers_of(&mut self, expression: &Expression) -> Result<View> {
        let Operation::Dequantize { codes, scales, global_scale, scheme, block } = &expression.operation else {
            return Err(Error::new(Kind::Internal, "not a quantized tensor"));
        };
        let Instances { checkpoint, rule, .. } = self.instances;
        let dtype = self.numbers_dtype;
        let codes = self.stored(*codes)?;
        let scales = self.stored(*scales)?;
        let global_scale = global_scale.map(|leaf| self.stored(leaf)).transpose()?;
        for stored in [Some(&codes), Some(&scales), global_scale.as_ref()].into_iter().flatten() {
            self.leaves.push((stored.position, dtype));
        }
        let name = |stored: &Stored| checkpoint.entry(stored.position).map_or("", |(_, entry)| entry.name);
        let (codes_name, scales_name) = (name(&codes), name(&scales));
        let source = checkpoint.entry(codes.position).map_or(0, |(source, _)| source);
        let wrong = |text: &str| {
            let error = rule
                .origin
                .error(expression.column, format!("codes {codes_name:?} and scales {scales_name:?}: {text}"));
            checkpoint.locate(source, error)
        };
        if !dtype.is_castable() {
            return Err(wrong(&format!("the numbers can be F64, F32, F16 or BF16, not {dtype}")));
        }
        let numbers = Dequantized::new(*scheme, block, codes, scales, global_scale);
        Ok(View::whole(Base::Dequantized(Arc::new(numbers.map_err(|error| wrong(error.message()))?))))
    }

    fn tensor(&mut self, index: usize) -> Result<View> {
        let stored = self.stored(index)?;
        self.leaves.push((stored.position, stored.dtype));
        Ok(View::whole(Base::Stored(stored)))
    }

    /// Returns the tensor of a leaf.
    fn stored(&mut self, index: usize) -> Result<Arc<Stored>> {
        let Instances { checkpoint, rule, .. } = self.instances;
        let Some(leaf) = rule.leaves.get(index) else { return Err(Error::new(Kind::Internal, "no such leaf")) };
        let number = |index: usize| self.numbers.get(&index).map(|(_, text)| &**text);
        let texts: Vec<Option<&str>> =
            self.bindings.iter().enumerate().map(|(index, text)| text.or_else(|| number(index))).collect();
        let name = leaf.pattern.name(&texts);
        let Some(position) = checkpoint.find_position(&name) else {
            return Err(not_found(checkpoint, rule, leaf, &name));
        };
        let known = self.stored.get(position).and_then(Clone::clone);
        let stored = match known {
            Some(stored) => stored,
            None => {
                let entry = checkpoint.entry(position).ok_or_else(|| Error::new(Kind::Internal, "no such tensor"))?;
                let stored = Arc::new(new_stored(checkpoint, position, entry)?);
                if let Some(slot) = self.stored.get_mut(position) {
                    *slot = Some(Arc::clone(&stored));
                }
                stored
            }
        };
        Ok(stored)
    }

    /// Returns the number of tensors of a stack. Fails if their numbers have holes.
    fn count(&self, column: usize, variable: usize, leaves: &Range<usize>) -> Result<u64> {
        let Instances { checkpoint, rule, matches, .. } = self.instances;
        let mut numbers = BTreeSet::new();
        for (leaf, matches) in rule.leaves.iter().zip(matches).take(leaves.end).skip(leaves.start) {
            let Some(own) = leaf.stacked.iter().position(|&stacked| stacked == variable) else { continue };
            let text = |&variable: &usize| self.bindings.get(variable).copied().flatten();
            let texts: Vec<&str> = matches.variables.iter().filter_map(text).collect();
            let outer: Vec<Option<u64>> =
                leaf.stacked.iter().map(|variable| self.numbers.get(variable).map(|(number, _)| *number)).collect();
            for found in matches.groups.get(&texts).into_iter().flatten() {
                let agrees = outer.iter().zip(found).all(|(outer, number)| outer.is_none_or(|outer| outer == *number));
                if let Some(&number) = found.get(own).filter(|_| agrees) {
                    numbers.insert(number);
                }
            }
        }
        let end = numbers.last().map_or(0, |last| last.saturating_add(1));
        let count = to_u64(numbers.len());
        if count == end && count > 0 {
            return Ok(count);
        }
        if numbers.is_empty() {
            let error =
                Error::new(Kind::TensorNotFound, rule.origin.describe(column, "no tensor belongs to the stack"));
            return Err(checkpoint.locate(0, error));
        }
        let mut holes = Vec::new();
        let mut next = 0;
        for &number in &numbers {
            holes.extend((next..number).take(LISTED.saturating_sub(holes.len())));
            next = number.saturating_add(1);
        }
        let listed: Vec<_> = holes.iter().map(u64::to_string).collect();
        let more = if end - count > to_u64(holes.len()) { ", ..." } else { "" };
        let message = format!(
            "the numbers of the stack run from 0 to {}, but {} of them are missing: {}{more}",
            end - 1,
            end - count,
            listed.join(", ")
        );
        let error = Error::new(Kind::TensorNotFound, rule.origin.describe(column, &message));
        Err(checkpoint.locate(0, error))
    }
}

pub(super) fn new_stored(
    checkpoint: &Checkpoint,
    position: usize,
    (source, entry): (usize, Entry<'_>),
) -> Result<Stored> {
    let shape = torch_shape(entry).map_err(|error| checkpoint.locate(source, error))?;
    Ok(Stored { position, dtype: entry.dtype, shape })
}
