//! Names of tensors with variables.
//!
//! `{k}` stands for one component of a name, or for a part of one beside fixed text, and `{*p}` for one or more whole
//! components. Components lie between dots. A component has one variable at most, and a name has one `{*p}` at most, so
//! that a name matches in one way only.

/// Name of tensors, with variables.
#[derive(Clone, Debug)]
pub(super) struct NamePattern {
    components: Vec<Component>,
}

/// Part of a name between dots.
#[derive(Clone, Debug, Default)]
pub(super) struct Component {
    pub(super) prefix: String,
    pub(super) variable: Option<Variable>,
    pub(super) suffix: String,
}

/// Variable of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Variable {
    /// Index among the variables of the rule.
    pub(super) index: usize,
    /// Whether it stands for one or more components.
    pub(super) is_long: bool,
}

/// Texts of the variables of a rule, as far as they are known.
pub(super) type Bindings<'a> = Vec<Option<&'a str>>;

impl NamePattern {
    pub(super) fn new(components: Vec<Component>) -> NamePattern {
        NamePattern { components }
    }

    /// Iterates over the variables. One may occur several times.
    pub(super) fn variables(&self) -> impl Iterator<Item = Variable> + '_ {
        self.components.iter().filter_map(|component| component.variable)
    }

    /// Returns the name that the pattern stands for. Every variable has a text.
    pub(super) fn name(&self, bindings: &[Option<&str>]) -> String {
        let mut name = String::new();
        for (index, component) in self.components.iter().enumerate() {
            if index > 0 {
                name.push('.');
            }
            name.push_str(&component.prefix);
            let text = component.variable.and_then(|variable| bindings.get(variable.index).copied().flatten());
            name.push_str(text.unwrap_or_default());
            name.push_str(&component.suffix);
        }
        name
    }

    /// Sets the texts of the variables of this pattern, and returns whether the name matches.
    pub(super) fn matches<'a>(&self, name: &'a str, bindings: &mut Bindings<'a>) -> bool {
        for variable in self.variables() {
            if let Some(text) = bindings.get_mut(variable.index) {
                *text = None;
            }
        }
        let is_long = |component: &Component| component.variable.is_some_and(|variable| variable.is_long);
        let Some(position) = self.components.iter().position(is_long) else {
            return match_all(&self.components, name, bindings);
        };
        let (before, rest) = self.components.split_at(position);
        let Some((long, after)) = rest.split_first() else { return false };
        let Some((first, name)) = split_components(name, before.len()) else { return false };
        let Some((middle, last)) = split_last_components(name, after.len()) else { return false };
        (before.is_empty() || match_all(before, first, bindings))
            && (after.is_empty() || match_all(after, last, bindings))
            && match_component(long, middle, bindings)
    }
}

/// Splits a name after some components. Returns `None` if no others follow.
fn split_components(name: &str, count: usize) -> Option<(&str, &str)> {
    match count.checked_sub(1) {
        None => Some(("", name)),
        Some(index) => name.match_indices('.').nth(index).and_then(|(dot, _)| split_at_dot(name, dot)),
    }
}

/// Splits a name before its last components. Returns `None` if it has no others.
fn split_last_components(name: &str, count: usize) -> Option<(&str, &str)> {
    match count.checked_sub(1) {
        None => Some((name, "")),
        Some(index) => name.rmatch_indices('.').nth(index).and_then(|(dot, _)| split_at_dot(name, dot)),
    }
}

fn split_at_dot(name: &str, dot: usize) -> Option<(&str, &str)> {
    Some((name.get(..dot)?, name.get(dot + 1..)?))
}

/// Matches components of equal number.
fn match_all<'a>(components: &[Component], name: &'a str, bindings: &mut Bindings<'a>) -> bool {
    let mut texts = name.split('.');
    components.iter().all(|component| texts.next().is_some_and(|text| match_component(component, text, bindings)))
        && texts.next().is_none()
}

fn match_component<'a>(component: &Component, text: &'a str, bindings: &mut Bindings<'a>) -> bool {
    let Some(variable) = component.variable else { return component.prefix == text };
    let inner = text.strip_prefix(&*component.prefix).and_then(|text| text.strip_suffix(&*component.suffix));
    let Some(inner) = inner.filter(|inner| !inner.is_empty()) else { return false };
    match bindings.get_mut(variable.index) {
        Some(Some(known)) => *known == inner,
        Some(unknown) => {
            *unknown = Some(inner);
            true
        }
        None => false,
    }
}
