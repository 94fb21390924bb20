//! Tensors that match the names in a rule, and the texts of its variables for which it has outputs.

use super::names::Bindings;
use super::rules::{Leaf, Rule};
use crate::checkpoint::Checkpoint;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use std::collections::{HashMap, HashSet};

/// Most outputs of one rule.
const OUTPUTS_MAX: usize = 1 << 20;

/// Tensors that match a leaf.
#[derive(Default)]
pub(super) struct Matches<'a> {
    /// Variables of the leaf that belong to no stack, in ascending order.
    pub(super) variables: Vec<usize>,
    /// Texts of these variables in the order of the file.
    order: Vec<Vec<&'a str>>,
    /// For the texts of these variables, the numbers of each tensor in the stacks of the leaf.
    pub(super) groups: HashMap<Vec<&'a str>, Vec<Vec<u64>>>,
    /// Texts of codes that are plain numbers: floats of 16 bits or more, which have no scales.
    plain: HashSet<Vec<&'a str>>,
}

/// Tensors that match a rule, and all texts of its variables for which it has an output.
pub(super) struct Instances<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) rule: &'a Rule,
    pub(super) matches: Vec<Matches<'a>>,
    pub(super) found: Vec<Bindings<'a>>,
}

impl<'a> Instances<'a> {
    pub(super) fn new(
        checkpoint: &'a Checkpoint,
        rule: &'a Rule,
        is_excluded: &dyn Fn(usize) -> bool,
    ) -> Result<Instances<'a>> {
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
            let Some(texts) =
                matches.order.iter().find(|&texts| !complete.contains(texts) && !matches.plain.contains(texts))
            else {
                continue;
            };
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
    let mut add = |bindings: &Bindings<'a>, dtype: Dtype| {
        let text = |&variable: &usize| bindings.get(variable).copied().flatten();
        let numbers: Option<Vec<u64>> = leaf.stacked.iter().map(|variable| decimal(text(variable)?)).collect();
        let Some(numbers) = numbers else { return };
        let texts: Vec<&str> = matches.variables.iter().filter_map(text).collect();
        let Matches { order, groups, plain, .. } = &mut matches;
        if leaf.is_codes && dtype.is_castable() {
            plain.insert(texts.clone());
        }
        let group = groups.entry(texts).or_insert_with_key(|texts| {
            order.push(texts.clone());
            Vec::new()
        });
        group.push(numbers);
    };
    if leaf.pattern.variables().next().is_none() {
        let name = leaf.pattern.name(&[]);
        match checkpoint.find_position(&name) {
            Some(position) => {
                if let Some((_, entry)) = checkpoint.entry(position).filter(|_| !is_excluded(position)) {
                    add(&bindings, entry.dtype);
                }
            }
            None => return Err(not_found(checkpoint, rule, leaf, &name)),
        }
        return Ok(matches);
    }
    for (position, (_, entry)) in checkpoint.entries().enumerate() {
        if !is_excluded(position) && leaf.pattern.matches(entry.name, &mut bindings) {
            add(&bindings, entry.dtype);
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
pub(super) fn not_found(checkpoint: &Checkpoint, rule: &Rule, leaf: &Leaf, name: &str) -> Error {
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
