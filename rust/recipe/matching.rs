//! Tensors of a checkpoint that rules name, and the outputs that follow from them.

use super::instances::Instances;
use super::output::Output;
use super::rules::{Origin, Rule};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::suggest;
use crate::error::{Error, Kind, Result};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Ends of the names of scales, and the ends of the names of their weights.
const SCALES: &[(&str, &[&str])] = &[
    ("_scale", &["", "_packed", "_blocks"]),
    ("_scale_inv", &["", "_packed", "_blocks"]),
    ("_scales", &["", "_packed", "_blocks"]),
    ("_scale_2", &[""]),
    ("_global_scale", &["_packed"]),
    (".scale", &[".weight"]),
    (".qscale_weight", &[".weight"]),
];

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
        let mut readers = Readers { is_read: vec![false; count], outputs: Vec::new() };
        let mut stored = vec![None; count];
        for is_rest in [false, true] {
            // Rules with `else` share the tensors that the others leave.
            let before = readers.is_read.clone();
            for rule in rules.iter().filter(|rule| rule.is_rest == is_rest) {
                let is_excluded = |position| is_rest && before.get(position).copied().unwrap_or(true);
                let mut instances = Instances::new(checkpoint, rule, &is_excluded)?;
                for bindings in std::mem::take(&mut instances.found) {
                    for output in Output::all(&instances, &bindings, &mut stored)? {
                        readers.add(rule, &output);
                        recipe.add(rule, output)?;
                    }
                }
            }
        }
        readers.check_scales(checkpoint)?;
        recipe.unused = (0..count).filter(|&position| !readers.is_read(position)).collect();
        Ok(recipe)
    }

    /// Returns a recipe of outputs that no rule has named.
    pub(super) fn of_outputs(outputs: Vec<Output>) -> Recipe {
        Recipe { outputs, positions: HashMap::new(), unused: Vec::new() }
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
    /// Rules, and the tensors that each output reads.
    outputs: Vec<(Arc<Origin>, bool, Vec<usize>)>,
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
        }
        self.outputs.push((Arc::clone(&rule.origin), rule.is_raw, output.sources.clone()));
    }

    /// Fails for an output of a weight without its scale, unless the scale is read by an output without the weight, too,
    /// or the rule is `raw`.
    fn check_scales(&self, checkpoint: &Checkpoint) -> Result<()> {
        let mut readers: HashMap<usize, BTreeSet<usize>> = HashMap::new();
        for (output, (_, _, sources)) in self.outputs.iter().enumerate() {
            for &position in sources {
                readers.entry(position).or_default().insert(output);
            }
        }
        let none = BTreeSet::new();
        for (position, (source, entry)) in checkpoint.entries().enumerate() {
            let of_scale = readers.get(&position).unwrap_or(&none);
            for (end, weights) in SCALES {
                let Some(base) = entry.name.strip_suffix(end) else { continue };
                for weight in *weights {
                    let name = format!("{base}{weight}");
                    let Some(of_weight) = checkpoint.find_position(&name).and_then(|found| readers.get(&found)) else {
                        continue;
                    };
                    let mut alone = of_weight.difference(of_scale).filter_map(|&output| self.outputs.get(output));
                    let Some((origin, ..)) = alone.find(|(_, is_raw, _)| !is_raw) else { continue };
                    if of_scale.difference(of_weight).next().is_some() {
                        continue;
                    }
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
