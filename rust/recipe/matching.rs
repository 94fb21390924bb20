//! Tensors of a checkpoint that rules name, and the outputs that follow from them.

use super::names::Bindings;
use super::rules::{Expression, Leaf, Operation, Origin, Rule};
use super::view::{Base, Stored, View};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::torch_shape;
use crate::checkpoint::suggest;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::header::Entry;
use crate::num::to_u64;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// Most outputs of one rule.
const OUTPUTS_MAX: usize = 1 << 20;
/// Number of missing numbers or names that errors list.
const LISTED: usize = 8;
/// Ends of the names of scales, and the ends of the names of their weights.
const SCALES: &[(&str, &[&str])] = &[
    ("_scale", &["", "_packed", "_blocks"]),
    ("_scale_inv", &["", "_packed", "_blocks"]),
    ("_scales", &["", "_packed", "_blocks"]),
    (".scale", &[".weight"]),
    (".qscale_weight", &[".weight"]),
];

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

/// Outputs of rules for one checkpoint.
#[derive(Debug)]
pub struct Recipe {
    outputs: Vec<Output>,
    positions: HashMap<Box<str>, usize>,
    unused: Vec<usize>,
}

impl Recipe {
    /// Finds the tensors that rules name. The outputs are in the order of the rules, and then of the tensors that the
    /// rule names first.
    ///
    /// # Errors
    /// `invalid-argument`, with the rule and the column, if a rule is not valid, the shapes or dtypes of its tensors do
    /// not fit its operations, the numbers of a stack have holes, two rules have the same output, or a scale beside a
    /// weight is not read; `tensor-not-found` if no tensor has a name in a rule, or only some of those that belong
    /// together exist; the errors of [`torch_shape`].
    pub fn new(checkpoint: &Checkpoint, rules: &[impl AsRef<str>]) -> Result<Recipe> {
        let parse = |(index, text)| Rule::parse(index + 1, AsRef::<str>::as_ref(text));
        let rules: Vec<Rule> = rules.iter().enumerate().map(parse).collect::<Result<_>>()?;
        let count = checkpoint.count();
        let mut recipe = Recipe { outputs: Vec::new(), positions: HashMap::new(), unused: Vec::new() };
        let mut readers = Readers { is_read: vec![false; count], weights: Vec::new() };
        let mut stored = vec![None; count];
        for is_rest in [false, true] {
            // Rules with `else` share the tensors that the others leave.
            let before = readers.is_read.clone();
            for rule in rules.iter().filter(|rule| rule.is_rest == is_rest) {
                let is_excluded = |position| is_rest && before.get(position).copied().unwrap_or(true);
                let mut instances = Instances::new(checkpoint, rule, &is_excluded)?;
                for bindings in std::mem::take(&mut instances.found) {
                    let output = instances.output(bindings, &mut stored)?;
                    readers.add(rule, &output);
                    recipe.add(rule, output)?;
                }
            }
        }
        readers.check_scales(checkpoint)?;
        recipe.unused = (0..count).filter(|&position| !readers.is_read(position)).collect();
        Ok(recipe)
    }

    /// Returns all outputs.
    pub fn outputs(&self) -> &[Output] {
        &self.outputs
    }

    /// Returns the index of the output with this name.
    ///
    /// # Errors
    /// `tensor-not-found`, with the most similar names.
    pub fn find(&self, name: &str) -> Result<usize> {
        self.positions.get(name).copied().ok_or_else(|| {
            let near = suggest::similar(name, self.outputs.iter().map(|output| &*output.name));
            let hint = suggest::hint("nearest outputs", &near);
            let message = format!("the recipe has no such output among its {}{hint}", self.outputs.len());
            Error::new(Kind::TensorNotFound, message).tensor(name)
        })
    }

    /// Returns the positions of the tensors that no rule reads, in [`Checkpoint::entries`].
    pub fn unused(&self) -> &[usize] {
        &self.unused
    }

    fn add(&mut self, rule: &Rule, output: Output) -> Result<()> {
        let column = rule.outputs.first().map_or(0, |(column, _)| *column);
        if self.positions.insert(output.name.clone(), self.outputs.len()).is_some() {
            let message = "another rule, or the same with other tensors, has this output, too";
            return Err(rule.origin.error(column, message).tensor(output.name));
        }
        self.outputs.push(output);
        Ok(())
    }
}

/// Tensors that rules read.
struct Readers {
    is_read: Vec<bool>,
    /// Tensors that are read as they are by rules without `raw`, with these rules.
    weights: Vec<(usize, Arc<Origin>)>,
}

impl Readers {
    fn is_read(&self, position: usize) -> bool {
        self.is_read.get(position).copied().unwrap_or(false)
    }

    fn add(&mut self, rule: &Rule, output: &Output) {
        for &position in &output.sources {
            if let Some(is_read) = self.is_read.get_mut(position) {
                *is_read = true;
            }
            if !rule.is_raw {
                self.weights.push((position, Arc::clone(&rule.origin)));
            }
        }
    }

    /// Fails for a scale that no rule reads, although a rule reads its weight.
    fn check_scales(&self, checkpoint: &Checkpoint) -> Result<()> {
        let rules: HashMap<usize, &Arc<Origin>> =
            self.weights.iter().map(|(position, rule)| (*position, rule)).collect();
        let unread = checkpoint.entries().enumerate().filter(|(position, _)| !self.is_read(*position));
        for (_, (source, entry)) in unread {
            for (end, weights) in SCALES {
                let Some(base) = entry.name.strip_suffix(end) else { continue };
                for weight in *weights {
                    let name = format!("{base}{weight}");
                    let Some(origin) = checkpoint.find_position(&name).and_then(|position| rules.get(&position)) else {
                        continue;
                    };
                    let message = format!(
                        "a rule reads the weight {name:?} without this scale, so that it would be wrong by this factor; \
                         use dequant, read the scale as an output, too, or put `raw` in front of the rule"
                    );
                    let error = Error::new(Kind::InvalidArgument, origin.describe(0, &message)).tensor(entry.name);
                    return Err(checkpoint.locate(source, error));
                }
            }
        }
        Ok(())
    }
}

/// Tensors that match a leaf.
#[derive(Default)]
struct Matches<'a> {
    /// Variables of the leaf that belong to no stack, in ascending order.
    variables: Vec<usize>,
    /// Texts of these variables in the order of the file.
    order: Vec<Vec<&'a str>>,
    /// For the texts of these variables, the numbers of each tensor in the stacks of the leaf.
    groups: HashMap<Vec<&'a str>, Vec<Vec<u64>>>,
}

/// Tensors that match a rule, and all texts of its variables for which it has an output.
struct Instances<'a> {
    checkpoint: &'a Checkpoint,
    rule: &'a Rule,
    matches: Vec<Matches<'a>>,
    found: Vec<Bindings<'a>>,
}

impl<'a> Instances<'a> {
    fn new(checkpoint: &'a Checkpoint, rule: &'a Rule, is_excluded: &dyn Fn(usize) -> bool) -> Result<Instances<'a>> {
        let found = rule.leaves.iter().map(|leaf| find(checkpoint, rule, leaf, is_excluded));
        let matches: Vec<Matches<'a>> = found.collect::<Result<_>>()?;
        let mut instances = Instances { checkpoint, rule, matches, found: Vec::new() };
        if rule.is_rest && instances.matches.iter().all(|matches| matches.order.is_empty()) {
            return Ok(instances);
        }
        instances.join()?;
        instances.check_complete()?;
        Ok(instances)
    }

    /// Finds all texts of the variables for which each leaf has a tensor.
    fn join(&mut self) -> Result<()> {
        let mut found: Vec<Bindings<'a>> = vec![vec![None; self.rule.variables]];
        for matches in &self.matches {
            let known = found.first().cloned().unwrap_or_default();
            let is_known = |variable: &usize| known.get(*variable).is_some_and(Option::is_some);
            let shared: Vec<usize> = (0..matches.variables.len())
                .filter(|&index| matches.variables.get(index).is_some_and(is_known))
                .collect();
            let mut by_shared: HashMap<Vec<&str>, Vec<&Vec<&'a str>>> = HashMap::new();
            for texts in &matches.order {
                let key = shared.iter().filter_map(|&index| texts.get(index).copied()).collect();
                by_shared.entry(key).or_default().push(texts);
            }
            let mut joined = Vec::new();
            for bindings in &found {
                let text = |&index: &usize| bindings.get(*matches.variables.get(index)?).copied().flatten();
                let key: Vec<&str> = shared.iter().filter_map(text).collect();
                for texts in by_shared.get(&key).into_iter().flatten() {
                    let mut bindings = bindings.clone();
                    for (&variable, &text) in matches.variables.iter().zip(*texts) {
                        if let Some(bound) = bindings.get_mut(variable) {
                            *bound = Some(text);
                        }
                    }
                    joined.push(bindings);
                    if joined.len() > OUTPUTS_MAX {
                        let message = format!("the rule matches more than {OUTPUTS_MAX} combinations of tensors");
                        return Err(self.rule.origin.error(self.rule.expression.column, message));
                    }
                }
            }
            found = joined;
        }
        self.found = found;
        Ok(())
    }

    /// Fails for a tensor that matches a leaf, while no tensor matches another leaf for the same texts.
    fn check_complete(&self) -> Result<()> {
        for (index, matches) in self.matches.iter().enumerate() {
            let text = |bindings: &Bindings<'a>, variable: &usize| bindings.get(*variable).copied().flatten();
            let complete: HashSet<Vec<&str>> = self
                .found
                .iter()
                .map(|bindings| matches.variables.iter().filter_map(|variable| text(bindings, variable)).collect())
                .collect();
            let Some(texts) = matches.order.iter().find(|texts| !complete.contains(*texts)) else { continue };
            let mut bindings: Bindings<'a> = vec![None; self.rule.variables];
            for (&variable, &text) in matches.variables.iter().zip(texts) {
                if let Some(bound) = bindings.get_mut(variable) {
                    *bound = Some(text);
                }
            }
            return Err(self.incomplete(index, &bindings));
        }
        Ok(())
    }

    /// Returns the error for the texts of a leaf for which the rule is not complete.
    fn incomplete(&self, present: usize, bindings: &Bindings<'a>) -> Error {
        let lacks = |(index, (leaf, matches)): (usize, (&'a Leaf, &Matches<'a>))| {
            let texts: Vec<_> =
                matches.variables.iter().map(|&variable| bindings.get(variable).copied().flatten()).collect();
            let agrees =
                |found: &Vec<&str>| found.iter().zip(&texts).all(|(one, two)| two.is_none_or(|two| *one == two));
            (index != present && !matches.order.iter().any(agrees)).then_some(leaf)
        };
        let shown = |leaf: &Leaf| {
            let known: Vec<Option<&str>> = bindings.iter().map(|text| text.or(Some("*"))).collect();
            leaf.pattern.name(&known)
        };
        let missing = self.rule.leaves.iter().zip(&self.matches).enumerate().find_map(lacks);
        let present = self.rule.leaves.get(present);
        let (column, missing) = match missing {
            Some(leaf) => (leaf.column, shown(leaf)),
            None => (self.rule.expression.column, "the other tensors of the rule".to_owned()),
        };
        let message = format!(
            "there is {:?}, but not {missing:?}, which the rule needs beside it",
            present.map(shown).unwrap_or_default()
        );
        let error = Error::new(Kind::TensorNotFound, self.rule.origin.describe(column, &message));
        self.checkpoint.locate(0, error)
    }

    /// Returns the output for some texts of the variables.
    fn output(&self, bindings: Bindings<'a>, stored: &mut [Option<Arc<Stored>>]) -> Result<Output> {
        let Rule { origin, outputs, expression, dtype, .. } = self.rule;
        let name = outputs.first().map(|(_, pattern)| pattern.name(&bindings)).unwrap_or_default();
        let mut build =
            Build { instances: self, bindings: &bindings, numbers: HashMap::new(), stored, leaves: Vec::new() };
        let view = build.expression(expression).map_err(|error| error.tensor(&*name))?;
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
        Ok(Output { name: name.into(), dtype: output_dtype, is_cast: dtype.is_some(), view, sources })
    }
}

/// Finds all tensors that match a leaf.
fn find<'a>(
    checkpoint: &'a Checkpoint,
    rule: &Rule,
    leaf: &Leaf,
    is_excluded: &dyn Fn(usize) -> bool,
) -> Result<Matches<'a>> {
    let mut variables: Vec<usize> = leaf.pattern.variables().map(|variable| variable.index).collect();
    variables.retain(|variable| !leaf.stacked.contains(variable));
    variables.sort_unstable();
    variables.dedup();
    let mut matches = Matches { variables, ..Matches::default() };
    let mut bindings: Bindings<'a> = vec![None; rule.variables];
    let mut add = |bindings: &Bindings<'a>| {
        let text = |&variable: &usize| bindings.get(variable).copied().flatten();
        let numbers: Option<Vec<u64>> = leaf.stacked.iter().map(|variable| decimal(text(variable)?)).collect();
        let Some(numbers) = numbers else { return };
        let texts: Vec<&str> = matches.variables.iter().filter_map(text).collect();
        let Matches { order, groups, .. } = &mut matches;
        let group = groups.entry(texts).or_insert_with_key(|texts| {
            order.push(texts.clone());
            Vec::new()
        });
        group.push(numbers);
    };
    if leaf.pattern.variables().next().is_none() {
        let name = leaf.pattern.name(&[]);
        match checkpoint.find_position(&name) {
            Some(position) if !is_excluded(position) => add(&bindings),
            Some(_) => {}
            None => return Err(not_found(checkpoint, rule, leaf, &name)),
        }
        return Ok(matches);
    }
    for (position, (_, entry)) in checkpoint.entries().enumerate() {
        if !is_excluded(position) && leaf.pattern.matches(entry.name, &mut bindings) {
            add(&bindings);
        }
    }
    if matches.order.is_empty() && !rule.is_rest {
        let message = format!(
            "no tensor has a name like {:?}; {{k}} stands for one part of a name between dots, and {{*k}} for one or more",
            leaf.pattern.name(&vec![Some("*"); rule.variables])
        );
        let error = Error::new(Kind::TensorNotFound, rule.origin.describe(leaf.column, &message));
        return Err(checkpoint.locate(0, error));
    }
    Ok(matches)
}

/// Returns the error for a tensor that does not exist.
fn not_found(checkpoint: &Checkpoint, rule: &Rule, leaf: &Leaf, name: &str) -> Error {
    match checkpoint.find(name) {
        Err(error) => error.note(&rule.origin.describe(leaf.column, "a rule reads the tensor")),
        Ok(_) => Error::new(Kind::Internal, "a tensor is in the checkpoint, and is not"),
    }
}

/// Returns a number in decimal digits without leading zeros.
fn decimal(text: &str) -> Option<u64> {
    let is_plain = text == "0" || !text.starts_with('0');
    (is_plain && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok()).flatten()
}

/// Evaluation of an expression for some texts of the variables.
struct Build<'b, 'a> {
    instances: &'b Instances<'a>,
    bindings: &'b Bindings<'a>,
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
                View::cat(inputs, *dim)
            }
            Operation::Stack { dim, variable, leaves, input } => {
                let count = self.count(expression.column, *variable, leaves)?;
                let mut inputs = Vec::new();
                for number in 0..count {
                    self.numbers.insert(*variable, (number, number.to_string()));
                    inputs.push(self.expression(input)?);
                }
                self.numbers.remove(variable);
                View::stack(inputs, *dim)
            }
            Operation::Slice { input, dim, start, end, step } => {
                self.expression(input)?.slice(*dim, *start, *end, *step)
            }
            Operation::Narrow { input, dim, start, length } => self.expression(input)?.narrow(*dim, *start, *length),
            Operation::View { input, sizes } => self.expression(input)?.view(sizes),
            Operation::Permute { input, dims } => self.expression(input)?.permute(dims),
            Operation::Transpose { input, dims } => self.expression(input)?.transpose(*dims),
        };
        viewed.map_err(|message| self.instances.rule.origin.error(expression.column, message))
    }

    fn tensor(&mut self, index: usize) -> Result<View> {
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
        self.leaves.push((position, stored.dtype));
        Ok(View::whole(Base::Stored(stored)))
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

fn new_stored(checkpoint: &Checkpoint, position: usize, (source, entry): (usize, Entry<'_>)) -> Result<Stored> {
    let shape = torch_shape(entry).map_err(|error| checkpoint.locate(source, error))?;
    Ok(Stored { position, dtype: entry.dtype, shape })
}
