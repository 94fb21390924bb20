//! Position in the text of a rule, and what is read there.

use super::names::{Component, NamePattern, Variable};
use super::rules::Origin;
use crate::error::{Error, Result};
use std::sync::Arc;

/// Characters that end a name, or that need quotes in one.
const SPECIAL: &[char] = &[',', '(', ')', '=', ':', '"'];

/// Variable of a rule and the stack to which it belongs.
pub(super) struct Known {
    pub(super) name: String,
    pub(super) is_long: bool,
    /// Whether the variable belongs to a stack.
    pub(super) is_stacked: bool,
    /// Whether names at the current position may contain it.
    pub(super) is_in_scope: bool,
}

/// Position in the text of a rule, and the variables in the names before it.
pub(super) struct Cursor {
    pub(super) origin: Arc<Origin>,
    pub(super) at: usize,
    pub(super) variables: Vec<Known>,
    characters: Vec<char>,
}

impl Cursor {
    pub(super) fn new(origin: Origin) -> Cursor {
        let characters = origin.text.chars().collect();
        Cursor { origin: Arc::new(origin), at: 0, variables: Vec::new(), characters }
    }

    /// Takes a name with or without quotes.
    pub(super) fn name(&mut self, expected: &str) -> Result<NamePattern> {
        let begin = self.at;
        let is_quoted = self.characters.get(self.at) == Some(&'"');
        self.at += usize::from(is_quoted);
        let mut components = vec![Component::default()];
        loop {
            let character = self.characters.get(self.at).copied();
            let ends = |character: char| character.is_whitespace() || SPECIAL.contains(&character);
            match character {
                None if is_quoted => return Err(self.origin.error(begin, "the quoted name has no end")),
                None => break,
                Some('"') if is_quoted => {
                    self.at += 1;
                    break;
                }
                Some(character) if !is_quoted && ends(character) => break,
                Some('.') => {
                    components.push(Component::default());
                    self.at += 1;
                }
                Some('{') if self.characters.get(self.at + 1) != Some(&'{') => {
                    let column = self.at;
                    let variable = self.variable()?;
                    let has_long = variable.is_long && components.iter().any(Component::is_long);
                    let Some(component) = components.last_mut() else { continue };
                    if component.variable.is_some() || component.is_beside(variable) {
                        let message = "a part of a name between dots has one variable at most, and {*...} stands alone";
                        return Err(self.origin.error(column, message));
                    }
                    if has_long {
                        return Err(self.origin.error(column, "a name has one variable {*...} at most"));
                    }
                    component.variable = Some(variable);
                }
                Some(mut character) => {
                    if ['{', '}'].contains(&character) {
                        if self.characters.get(self.at + 1) != Some(&character) {
                            return Err(
                                self.error(format!("`{character}` in a name is written {character}{character}"))
                            );
                        }
                        self.at += 1;
                    } else if character == '\\' && is_quoted {
                        self.at += 1;
                        character = match self.characters.get(self.at) {
                            Some(&escaped @ ('"' | '\\')) => escaped,
                            _ => return Err(self.error("only \\\" and \\\\ are escapes in a quoted name")),
                        };
                    }
                    self.at += 1;
                    let Some(component) = components.last_mut() else { continue };
                    if component.is_long() {
                        return Err(self.error("{*...} stands for whole parts of a name: put dots around it"));
                    }
                    component.push(character);
                }
            }
        }
        if self.at == begin {
            return Err(self.error(format!("expected {expected}")));
        }
        Ok(NamePattern::new(components))
    }

    /// Takes a variable in braces.
    fn variable(&mut self) -> Result<Variable> {
        let column = self.at;
        self.at += 1;
        let is_long = self.characters.get(self.at) == Some(&'*');
        self.at += usize::from(is_long);
        let rest = self.characters.get(self.at..).unwrap_or_default();
        let name: String = rest.iter().take_while(|character| is_word(**character)).collect();
        self.at += name.chars().count();
        if !is_identifier(&name) || self.characters.get(self.at) != Some(&'}') {
            let message = "expected a variable, such as {k} or {*k}; a brace in a name is written {{ or }}";
            return Err(self.origin.error(column, message));
        }
        self.at += 1;
        let known = self.variables.iter().enumerate().rev();
        let mut known = known.filter(|(_, known)| known.name == name && (known.is_in_scope || !known.is_stacked));
        match known.next() {
            Some((index, known)) if known.is_long == is_long => Ok(Variable { index, is_long }),
            Some(_) => Err(self.origin.error(column, format!("{name} is both {{{name}}} and {{*{name}}} in the rule"))),
            None => {
                self.variables.push(Known { name, is_long, is_stacked: false, is_in_scope: true });
                Ok(Variable { index: self.variables.len() - 1, is_long })
            }
        }
    }

    /// Takes commas with a number after each.
    pub(super) fn list(&mut self, what: &str) -> Result<Vec<i64>> {
        let mut numbers = Vec::new();
        while self.peek() == Some(',') {
            numbers.push(self.next_number(what)?);
        }
        Ok(numbers)
    }

    /// Takes as many numbers, each after a comma.
    pub(super) fn numbers<const COUNT: usize>(&mut self, usage: &str) -> Result<[i64; COUNT]> {
        let mut numbers = [0; COUNT];
        for number in &mut numbers {
            *number = self.next_number(&format!("a number: {usage}"))?;
        }
        Ok(numbers)
    }

    pub(super) fn next_number(&mut self, what: &str) -> Result<i64> {
        self.expect(',', &format!("and {what}"))?;
        self.number(what)
    }

    pub(super) fn number(&mut self, what: &str) -> Result<i64> {
        self.skip_space();
        let column = self.at;
        let word = self.word();
        word.parse().map_err(|_| self.origin.error(column, format!("expected {what}, not {word:?}")))
    }

    /// Takes the characters up to the next special one or space.
    pub(super) fn word(&mut self) -> String {
        let rest = self.characters.get(self.at..).unwrap_or_default();
        let is_end = |character: char| character.is_whitespace() || SPECIAL.contains(&character);
        let word: String = rest.iter().take_while(|character| !is_end(**character)).collect();
        self.at += word.chars().count();
        word
    }

    pub(super) fn skip_space(&mut self) {
        while self.characters.get(self.at).is_some_and(|character| character.is_whitespace()) {
            self.at += 1;
        }
    }

    /// Returns the next character that is not a space.
    pub(super) fn peek(&mut self) -> Option<char> {
        self.skip_space();
        self.characters.get(self.at).copied()
    }

    pub(super) fn take(&mut self, character: char) -> bool {
        let is_next = self.peek() == Some(character);
        self.at += usize::from(is_next);
        is_next
    }

    pub(super) fn expect(&mut self, character: char, context: &str) -> Result<()> {
        if self.take(character) {
            return Ok(());
        }
        let found = self.characters.get(self.at).map_or_else(|| "the end".to_owned(), |found| format!("{found:?}"));
        Err(self.error(format!("expected `{character}` {context}, not {found}")))
    }

    pub(super) fn error(&self, message: impl AsRef<str>) -> Error {
        self.origin.error(self.at, message)
    }
}

impl Component {
    fn is_long(&self) -> bool {
        self.variable.is_some_and(|variable| variable.is_long)
    }

    /// Returns whether text is beside a variable that stands for whole components.
    fn is_beside(&self, variable: Variable) -> bool {
        variable.is_long && !self.prefix.is_empty()
    }

    fn push(&mut self, character: char) {
        let text = if self.variable.is_some() { &mut self.suffix } else { &mut self.prefix };
        text.push(character);
    }
}

fn is_word(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '_'
}

pub(super) fn is_identifier(word: &str) -> bool {
    word.chars().all(is_word) && word.chars().next().is_some_and(|first| !first.is_ascii_digit())
}
