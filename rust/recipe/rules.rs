//! Parser of rules.
//!
//! ```text
//! rule       := ["else"] ["raw"] name {"," name} "=" expression [":" dtype]
//! expression := name
//!             | "cat" "(" dim {"," expression} ")"
//!             | "stack" "(" dim "," variable "," expression ")"
//!             | "slice" "(" expression "," dim "," start "," end ["," step] ")"
//!             | "narrow" "(" expression "," dim "," start "," length ")"
//!             | "view" "(" expression {"," size} ")"
//!             | "permute" "(" expression {"," dim} ")"
//!             | "transpose" "(" expression "," dim "," dim ")"
//! ```

use super::names::{Component, NamePattern, Variable};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use std::ops::Range;
use std::sync::Arc;

/// Deepest nesting of expressions.
const DEPTH_MAX: usize = 64;
/// Number of characters of a rule that errors show.
const SHOWN_CHARS: usize = 200;
/// Characters that end a name, or that need quotes in one.
const SPECIAL: &[char] = &[',', '(', ')', '=', ':', '"'];

/// Rule of a recipe.
#[derive(Clone, Debug)]
pub struct Rule {
    pub(super) origin: Arc<Origin>,
    pub(super) outputs: Vec<(usize, NamePattern)>,
    pub(super) expression: Expression,
    pub(super) dtype: Option<Dtype>,
    /// Whether the rule matches only tensors that no rule without `else` reads.
    pub(super) is_rest: bool,
    /// Whether the rule may read codes without their scales.
    pub(super) is_raw: bool,
    /// Number of variables.
    pub(super) variables: usize,
    /// Tensors that the expression reads, from left to right.
    pub(super) leaves: Vec<Leaf>,
}

/// Text of a rule, for errors.
#[derive(Debug)]
pub(super) struct Origin {
    number: usize,
    text: Box<str>,
}

impl Origin {
    /// Returns an error in a column, which counts characters from 0.
    pub(super) fn error(&self, column: usize, message: impl AsRef<str>) -> Error {
        Error::new(Kind::InvalidArgument, self.describe(column, message.as_ref()))
    }

    /// Returns a message with its place, and the rule.
    pub(super) fn describe(&self, column: usize, message: &str) -> String {
        let mut shown: String = self.text.chars().take(SHOWN_CHARS).collect();
        if shown.len() < self.text.len() {
            shown.push_str("...");
        }
        format!("rule {}, column {}: {message}; the rule is {shown:?}", self.number, column + 1)
    }
}

/// Tensors that an expression names.
#[derive(Clone, Debug)]
pub(super) struct Leaf {
    pub(super) column: usize,
    pub(super) pattern: NamePattern,
    /// Variables of the stacks around the leaf that occur in its name, from the outermost to the innermost.
    pub(super) stacked: Vec<usize>,
}

/// Expression, and the column where it begins.
#[derive(Clone, Debug)]
pub(super) struct Expression {
    pub(super) column: usize,
    pub(super) operation: Operation,
}

/// Operation of an expression.
#[derive(Clone, Debug)]
pub(super) enum Operation {
    /// Leaf with this index.
    Tensor(usize),
    Cat {
        dim: i64,
        inputs: Vec<Expression>,
    },
    Stack {
        dim: i64,
        variable: usize,
        /// Leaves of the input.
        leaves: Range<usize>,
        input: Box<Expression>,
    },
    Slice {
        input: Box<Expression>,
        dim: i64,
        start: i64,
        end: i64,
        step: i64,
    },
    Narrow {
        input: Box<Expression>,
        dim: i64,
        start: i64,
        length: i64,
    },
    View {
        input: Box<Expression>,
        sizes: Vec<i64>,
    },
    Permute {
        input: Box<Expression>,
        dims: Vec<i64>,
    },
    Transpose {
        input: Box<Expression>,
        dims: [i64; 2],
    },
}

impl Rule {
    /// Parses the rule with this number, which counts from 1.
    ///
    /// # Errors
    /// `invalid-argument` with the number of the rule and the column.
    pub fn parse(number: usize, text: &str) -> Result<Rule> {
        let origin = Arc::new(Origin { number, text: text.into() });
        let characters = text.chars().collect();
        let mut parser = Parser { origin, characters, at: 0, depth: 0, variables: Vec::new(), leaves: Vec::new() };
        parser.rule()
    }
}

/// Variable of a rule and the stack to which it belongs.
struct Known {
    name: String,
    is_long: bool,
    /// Whether the variable belongs to a stack.
    is_stacked: bool,
    /// Whether names at the current position may contain it.
    is_in_scope: bool,
}

struct Parser {
    origin: Arc<Origin>,
    characters: Vec<char>,
    at: usize,
    depth: usize,
    variables: Vec<Known>,
    leaves: Vec<Leaf>,
}

impl Parser {
    fn rule(&mut self) -> Result<Rule> {
        let is_rest = self.keyword("else");
        let is_raw = self.keyword("raw");
        let mut outputs = vec![self.output()?];
        while self.take(',') {
            outputs.push(self.output()?);
        }
        let known = self.variables.len();
        self.expect('=', "after the name of the output")?;
        let expression = self.expression()?;
        let dtype = if self.take(':') { Some(self.dtype()?) } else { None };
        if self.peek().is_some() {
            return Err(self.error("expected the end of the rule, or `: dtype`"));
        }
        if let Some((column, _)) = outputs.get(1) {
            return Err(self.origin.error(*column, "the expression has one result, so the rule has one output"));
        }
        for (index, variable) in self.variables.iter().take(known).enumerate() {
            let mut read = self.leaves.iter().flat_map(|leaf| leaf.pattern.variables());
            if !read.any(|own| own.index == index) {
                let message = format!("the variable {{{}}} of the output does not occur on the right", variable.name);
                return Err(self.origin.error(0, message));
            }
        }
        Ok(Rule {
            origin: Arc::clone(&self.origin),
            outputs,
            expression,
            dtype,
            is_rest,
            is_raw,
            variables: self.variables.len(),
            leaves: std::mem::take(&mut self.leaves),
        })
    }

    /// Takes a word before the outputs.
    fn keyword(&mut self, word: &str) -> bool {
        let begin = self.at;
        self.skip_space();
        let found = self.word();
        if found == word && self.peek().is_some_and(|next| !['=', ','].contains(&next)) {
            return true;
        }
        self.at = begin;
        false
    }

    fn output(&mut self) -> Result<(usize, NamePattern)> {
        self.skip_space();
        Ok((self.at, self.name("the name of an output")?))
    }

    fn expression(&mut self) -> Result<Expression> {
        self.skip_space();
        let column = self.at;
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(self.error(format!("more than {DEPTH_MAX} nested operations")));
        }
        let operation = match self.function() {
            Some(name) => self.operation(column, &name)?,
            None => self.tensor()?,
        };
        self.depth -= 1;
        Ok(Expression { column, operation })
    }

    /// Takes a word and the opening parenthesis after it.
    fn function(&mut self) -> Option<String> {
        let begin = self.at;
        let word = self.word();
        if !word.is_empty() && self.take('(') {
            return Some(word);
        }
        self.at = begin;
        None
    }

    fn operation(&mut self, column: usize, name: &str) -> Result<Operation> {
        let operation = match name {
            "cat" => {
                let dim = self.number("a dimension")?;
                let mut inputs = Vec::new();
                while self.take(',') {
                    inputs.push(self.expression()?);
                }
                if inputs.is_empty() {
                    return Err(self.origin.error(column, "cat needs a tensor: cat(dim, x, ...)"));
                }
                Operation::Cat { dim, inputs }
            }
            "stack" => self.stack(column)?,
            "slice" => {
                let input = self.input()?;
                let [dim, start, end] = self.numbers("slice(x, dim, start, end)")?;
                let step = if self.peek() == Some(',') { self.next_number("a step")? } else { 1 };
                Operation::Slice { input, dim, start, end, step }
            }
            "narrow" => {
                let input = self.input()?;
                let [dim, start, length] = self.numbers("narrow(x, dim, start, length)")?;
                Operation::Narrow { input, dim, start, length }
            }
            "view" => Operation::View { input: self.input()?, sizes: self.list("a size")? },
            "permute" => Operation::Permute { input: self.input()?, dims: self.list("a dimension")? },
            "transpose" => {
                let input = self.input()?;
                Operation::Transpose { input, dims: self.numbers("transpose(x, dim, dim)")? }
            }
            _ => {
                let message = format!(
                    "there is no operation {name:?}; the operations are cat, stack, slice, narrow, view, permute and \
                     transpose"
                );
                return Err(self.origin.error(column, message));
            }
        };
        self.expect(')', &format!("or `,` in {name}(...)"))?;
        Ok(operation)
    }

    fn stack(&mut self, column: usize) -> Result<Operation> {
        let dim = self.number("a dimension")?;
        self.expect(',', "and a variable: stack(dim, e, x)")?;
        self.skip_space();
        let name = self.word();
        if !is_identifier(&name) {
            return Err(self.error("expected a variable of the stack, such as `e`"));
        }
        if self.variables.iter().any(|known| known.name == name && known.is_in_scope) {
            return Err(self.error(format!("the variable {name} is also used outside of the stack; name it apart")));
        }
        self.expect(',', "and the tensors: stack(dim, e, x)")?;
        let variable = self.variables.len();
        self.variables.push(Known { name: name.clone(), is_long: false, is_stacked: true, is_in_scope: true });
        let first = self.leaves.len();
        let input = Box::new(self.expression()?);
        let leaves = first..self.leaves.len();
        if let Some(known) = self.variables.get_mut(variable) {
            known.is_in_scope = false;
        }
        let mut own = self.leaves.get(leaves.clone()).unwrap_or_default().iter();
        if !own.any(|leaf| leaf.stacked.contains(&variable)) {
            return Err(self.origin.error(column, format!("no name inside of the stack contains {{{name}}}")));
        }
        Ok(Operation::Stack { dim, variable, leaves, input })
    }

    fn input(&mut self) -> Result<Box<Expression>> {
        Ok(Box::new(self.expression()?))
    }

    fn tensor(&mut self) -> Result<Operation> {
        let column = self.at;
        let pattern = self.name("the name of a tensor, or an operation")?;
        let is_stacked = |index: &usize| self.variables.get(*index).is_some_and(|known| known.is_stacked);
        let mut stacked: Vec<usize> = pattern.variables().map(|variable| variable.index).filter(is_stacked).collect();
        stacked.sort_unstable();
        stacked.dedup();
        self.leaves.push(Leaf { column, pattern, stacked });
        Ok(Operation::Tensor(self.leaves.len() - 1))
    }

    /// Takes a name with or without quotes.
    fn name(&mut self, expected: &str) -> Result<NamePattern> {
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

    fn dtype(&mut self) -> Result<Dtype> {
        self.skip_space();
        let column = self.at;
        let word = self.word();
        let plain = |name: &str| name.replace('_', "").to_ascii_lowercase();
        let found = Dtype::all().find(|dtype| plain(dtype.name()) == plain(&word) && dtype.is_float());
        found.ok_or_else(|| {
            let names: Vec<_> = Dtype::all().filter(|dtype| dtype.is_float()).map(Dtype::name).collect();
            self.origin.error(column, format!("{word:?} is not a dtype to cast to; those are {}", names.join(", ")))
        })
    }

    /// Takes commas with a number after each.
    fn list(&mut self, what: &str) -> Result<Vec<i64>> {
        let mut numbers = Vec::new();
        while self.peek() == Some(',') {
            numbers.push(self.next_number(what)?);
        }
        Ok(numbers)
    }

    /// Takes as many numbers, each after a comma.
    fn numbers<const COUNT: usize>(&mut self, usage: &str) -> Result<[i64; COUNT]> {
        let mut numbers = [0; COUNT];
        for number in &mut numbers {
            *number = self.next_number(&format!("a number: {usage}"))?;
        }
        Ok(numbers)
    }

    fn next_number(&mut self, what: &str) -> Result<i64> {
        self.expect(',', &format!("and {what}"))?;
        self.number(what)
    }

    fn number(&mut self, what: &str) -> Result<i64> {
        self.skip_space();
        let column = self.at;
        let word = self.word();
        word.parse().map_err(|_| self.origin.error(column, format!("expected {what}, not {word:?}")))
    }

    /// Takes the characters up to the next special one or space.
    fn word(&mut self) -> String {
        let rest = self.characters.get(self.at..).unwrap_or_default();
        let is_end = |character: char| character.is_whitespace() || SPECIAL.contains(&character);
        let word: String = rest.iter().take_while(|character| !is_end(**character)).collect();
        self.at += word.chars().count();
        word
    }

    fn skip_space(&mut self) {
        while self.characters.get(self.at).is_some_and(|character| character.is_whitespace()) {
            self.at += 1;
        }
    }

    /// Returns the next character that is not a space.
    fn peek(&mut self) -> Option<char> {
        self.skip_space();
        self.characters.get(self.at).copied()
    }

    fn take(&mut self, character: char) -> bool {
        let is_next = self.peek() == Some(character);
        self.at += usize::from(is_next);
        is_next
    }

    fn expect(&mut self, character: char, context: &str) -> Result<()> {
        if self.take(character) {
            return Ok(());
        }
        let found = self.characters.get(self.at).map_or_else(|| "the end".to_owned(), |found| format!("{found:?}"));
        Err(self.error(format!("expected `{character}` {context}, not {found}")))
    }

    fn error(&self, message: impl AsRef<str>) -> Error {
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

fn is_identifier(word: &str) -> bool {
    word.chars().all(is_word) && word.chars().next().is_some_and(|first| !first.is_ascii_digit())
}
