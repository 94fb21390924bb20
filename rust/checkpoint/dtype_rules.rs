//! Dtypes that a load requests for tensors, by their names and by patterns.

use super::suggest;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use glob::Pattern;
use std::collections::{BTreeSet, HashMap};

/// Pattern that matches every tensor. It stands for the tensors that no other rule decides, so it may decide none.
const REST: &str = "*";

/// Rules of one load, which decide the dtype of each tensor.
///
/// A rule whose text is the name of the tensor decides. Otherwise the first rule decides whose pattern (`*`, `?`,
/// `[...]`) matches the whole name.
#[derive(Debug, Default)]
pub struct DtypeRules {
    rules: Vec<Rule>,
    /// Positions of the rules, by their texts.
    positions: HashMap<Box<str>, usize>,
}

#[derive(Debug)]
struct Rule {
    /// Name of a tensor, or a pattern.
    text: Box<str>,
    /// The text as a pattern, or `None` if it can only be a name.
    pattern: Option<Pattern>,
    /// Dtype to cast to, or `None` to keep the stored one.
    dtype: Option<Dtype>,
}

impl DtypeRules {
    /// Creates rules from pairs of a name or pattern and a dtype, or `None` for the stored dtype.
    pub fn new<'a>(rules: impl IntoIterator<Item = (&'a str, Option<Dtype>)>) -> DtypeRules {
        let mut new = DtypeRules::default();
        for (text, dtype) in rules {
            new.positions.entry(text.into()).or_insert(new.rules.len());
            let pattern = text.contains(['*', '?', '[']).then(|| pattern(text)).flatten();
            new.rules.push(Rule { text: text.into(), pattern, dtype });
        }
        new
    }

    /// Returns the dtype to cast each tensor to, or `None` for those that keep the stored one. `all` returns the names
    /// of all tensors of the checkpoint. Fails with `invalid-argument` if a rule other than `*` decides no tensor of
    /// the checkpoint: it matches no name, in which case the error has the most similar names, or another rule decides
    /// for every tensor that it matches.
    pub fn resolve<'a, All>(
        &self,
        names: impl Iterator<Item = &'a str>,
        all: impl Fn() -> All,
    ) -> Result<Vec<Option<Dtype>>>
    where
        All: Iterator<Item = &'a str>,
    {
        let may_decide = self.rules.iter().enumerate().filter(|(_, rule)| &*rule.text != REST);
        let mut unused: BTreeSet<usize> = may_decide.map(|(position, _)| position).collect();
        let decide = |name| {
            let position = self.position(name)?;
            unused.remove(&position);
            self.rules.get(position)?.dtype
        };
        let dtypes = names.map(decide).collect();
        for name in all() {
            if unused.is_empty() {
                break;
            }
            if let Some(position) = self.position(name) {
                unused.remove(&position);
            }
        }
        match unused.first().and_then(|&position| self.rules.get(position)) {
            Some(rule) => Err(self.decides_nothing(rule, all)),
            None => Ok(dtypes),
        }
    }

    /// Returns the position of the rule that decides the dtype of a tensor.
    fn position(&self, name: &str) -> Option<usize> {
        self.positions.get(name).copied().or_else(|| self.rules.iter().position(|rule| rule.has_pattern_of(name)))
    }

    fn decides_nothing<'a, All: Iterator<Item = &'a str>>(&self, rule: &Rule, all: impl Fn() -> All) -> Error {
        let text = &rule.text;
        let matching = all().find(|&name| name == &**text || rule.has_pattern_of(name));
        let other = matching.and_then(|name| self.rules.get(self.position(name)?));
        let message = match other {
            Some(other) => {
                format!(
                    "dtype: {:?} decides for each tensor that {text:?} matches; put {text:?} before it, or leave it out",
                    other.text
                )
            }
            None => {
                let hint = suggest::hint("nearest", &suggest::similar_to_pattern(text, all()));
                format!("dtype: {text:?} matches no tensor{hint}")
            }
        };
        Error::new(Kind::InvalidArgument, message)
    }
}

impl Rule {
    fn has_pattern_of(&self, name: &str) -> bool {
        self.pattern.as_ref().is_some_and(|pattern| pattern.matches(name))
    }
}

/// Returns a pattern, or `None` for an unclosed bracket.
fn pattern(text: &str) -> Option<Pattern> {
    // In paths, `**` has a meaning of its own.
    let mut text = text.to_owned();
    while text.contains("**") {
        text = text.replace("**", "*");
    }
    Pattern::new(&text).ok()
}
