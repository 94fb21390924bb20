//! Rules: outputs and the expressions that make them of stored tensors.

use super::names::NamePattern;
use crate::cast::quantize::Codes;
use crate::cast::scheme::Scheme;
use crate::dtype::Dtype;
use crate::error::{Error, Kind};
use std::ops::Range;
use std::sync::Arc;

/// Number of characters of a rule that errors show.
const SHOWN_CHARS: usize = 200;

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
    pub(super) number: usize,
    pub(super) text: Box<str>,
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
    /// Whether the leaf has the codes of quantized tensors.
    pub(super) is_codes: bool,
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
    /// Codes and scales of an expression, the outermost of a rule with two outputs.
    Quantize {
        input: Box<Expression>,
        codes: Codes,
        /// Rows and columns, with 0 for all.
        block: [i64; 2],
    },
    /// Numbers of quantized tensors, whose codes and scales are leaves.
    Dequantize {
        codes: usize,
        scales: usize,
        global_scale: Option<usize>,
        scheme: Scheme,
        /// Rows and columns, or empty for the block that scheme and scales imply.
        block: Vec<i64>,
    },
}
