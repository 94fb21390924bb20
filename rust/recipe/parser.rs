//! Parser of rules.
//!
//! ```text
//! rule       := ["else"] ["raw"] name "=" expression [":" dtype]
//!             | ["else"] ["raw"] name "," name "=" quantized
//! quantized  := "quant" "(" expression "," codes "," ("row" | "tensor" | "block" "=" rows "x" columns) ")"
//! expression := name
//!             | "cat" "(" dim {"," expression} ")"
//!             | "stack" "(" dim "," variable "," expression ")"
//!             | "slice" "(" expression "," dim "," start "," end ["," step] ")"
//!             | "narrow" "(" expression "," dim "," start "," length ")"
//!             | "view" "(" expression {"," size} ")"
//!             | "permute" "(" expression {"," dim} ")"
//!             | "transpose" "(" expression "," dim "," dim ")"
//!             | "dequant" "(" name "," name ["," name] ["," scheme] ["," "block" "=" rows "x" columns] ")"
//! ```

use super::cursor::{Cursor, Known, is_identifier};
use super::names::NamePattern;
use super::rules::{Expression, Leaf, Operation, Origin, Rule};
use crate::cast::quantize::Codes;
use crate::cast::scheme::Scheme;
use crate::dtype::Dtype;
use crate::error::Result;
use std::sync::Arc;

/// Deepest nesting of expressions.
const DEPTH_MAX: usize = 64;

impl Rule {
    /// Parses the rule with this number, which counts from 1.
    ///
    /// # Errors
    /// `invalid-argument` with the number of the rule and the column.
    pub fn parse(number: usize, text: &str) -> Result<Rule> {
        let text = Cursor::new(Origin { number, text: text.into() });
        Parser { text, depth: 0, leaves: Vec::new() }.rule()
    }
}

struct Parser {
    text: Cursor,
    depth: usize,
    leaves: Vec<Leaf>,
}

impl Parser {
    fn rule(&mut self) -> Result<Rule> {
        let is_rest = self.keyword("else");
        let is_raw = self.keyword("raw");
        let mut outputs = vec![self.output()?];
        while self.text.take(',') {
            outputs.push(self.output()?);
        }
        let known = self.text.variables.len();
        self.text.expect('=', "after the name of the output")?;
        let expression = self.expression()?;
        let dtype = if self.text.take(':') { Some(self.dtype()?) } else { None };
        if self.text.peek().is_some() {
            return Err(self.text.error("expected the end of the rule, or `: dtype`"));
        }
        let is_quantized = matches!(expression.operation, Operation::Quantize { .. });
        let (needed, results) = if is_quantized {
            (2, "codes and scales, so the rule has two outputs")
        } else {
            (1, "one result, so the rule has one output")
        };
        if outputs.len() != needed {
            let column = outputs.get(1).map_or(0, |(column, _)| *column);
            return Err(self.text.origin.error(column, format!("the expression has {results}")));
        }
        if is_quantized && dtype.is_some() {
            return Err(self.text.origin.error(expression.column, "quant decides the dtypes of its outputs"));
        }
        for (index, variable) in self.text.variables.iter().take(known).enumerate() {
            let mut read = self.leaves.iter().flat_map(|leaf| leaf.pattern.variables());
            if !read.any(|own| own.index == index) {
                let message = format!("the variable {{{}}} of the output does not occur on the right", variable.name);
                return Err(self.text.origin.error(0, message));
            }
        }
        Ok(Rule {
            origin: Arc::clone(&self.text.origin),
            outputs,
            expression,
            dtype,
            is_rest,
            is_raw,
            variables: self.text.variables.len(),
            leaves: std::mem::take(&mut self.leaves),
        })
    }

    /// Takes a word before the outputs.
    fn keyword(&mut self, word: &str) -> bool {
        let begin = self.text.at;
        self.text.skip_space();
        let found = self.text.word();
        if found == word && self.text.peek().is_some_and(|next| !['=', ','].contains(&next)) {
            return true;
        }
        self.text.at = begin;
        false
    }

    fn output(&mut self) -> Result<(usize, NamePattern)> {
        self.text.skip_space();
        Ok((self.text.at, self.text.name("the name of an output")?))
    }

    fn expression(&mut self) -> Result<Expression> {
        self.text.skip_space();
        let column = self.text.at;
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(self.text.error(format!("more than {DEPTH_MAX} nested operations")));
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
        let begin = self.text.at;
        let word = self.text.word();
        if !word.is_empty() && self.text.take('(') {
            return Some(word);
        }
        self.text.at = begin;
        None
    }

    fn operation(&mut self, column: usize, name: &str) -> Result<Operation> {
        let operation = match name {
            "cat" => {
                let dim = self.text.number("a dimension")?;
                let mut inputs = Vec::new();
                while self.text.take(',') {
                    inputs.push(self.expression()?);
                }
                if inputs.is_empty() {
                    return Err(self.text.origin.error(column, "cat needs a tensor: cat(dim, x, ...)"));
                }
                Operation::Cat { dim, inputs }
            }
            "stack" => self.stack(column)?,
            "slice" => {
                let input = self.input()?;
                let [dim, start, end] = self.text.numbers("slice(x, dim, start, end)")?;
                let step = if self.text.peek() == Some(',') { self.text.next_number("a step")? } else { 1 };
                Operation::Slice { input, dim, start, end, step }
            }
            "narrow" => {
                let input = self.input()?;
                let [dim, start, length] = self.text.numbers("narrow(x, dim, start, length)")?;
                Operation::Narrow { input, dim, start, length }
            }
            "view" => Operation::View { input: self.input()?, sizes: self.text.list("a size")? },
            "permute" => Operation::Permute { input: self.input()?, dims: self.text.list("a dimension")? },
            "transpose" => {
                let input = self.input()?;
                Operation::Transpose { input, dims: self.text.numbers("transpose(x, dim, dim)")? }
            }
            "dequant" => self.dequantize()?,
            "quant" if self.depth == 1 => self.quantize()?,
            "quant" => return Err(self.text.origin.error(column, "quant is the outermost operation of a rule")),
            _ => {
                let message = format!(
                    "there is no operation {name:?}; the operations are cat, stack, slice, narrow, view, permute, \
                     transpose, dequant and quant"
                );
                return Err(self.text.origin.error(column, message));
            }
        };
        self.text.expect(')', &format!("or `,` in {name}(...)"))?;
        Ok(operation)
    }

    fn stack(&mut self, column: usize) -> Result<Operation> {
        let dim = self.text.number("a dimension")?;
        self.text.expect(',', "and a variable: stack(dim, e, x)")?;
        self.text.skip_space();
        let name = self.text.word();
        if !is_identifier(&name) {
            return Err(self.text.error("expected a variable of the stack, such as `e`"));
        }
        if self.text.variables.iter().any(|known| known.name == name && known.is_in_scope) {
            return Err(self
                .text
                .error(format!("the variable {name} is also used outside of the stack; name it apart")));
        }
        self.text.expect(',', "and the tensors: stack(dim, e, x)")?;
        let variable = self.text.variables.len();
        self.text.variables.push(Known { name: name.clone(), is_long: false, is_stacked: true, is_in_scope: true });
        let first = self.leaves.len();
        let input = Box::new(self.expression()?);
        let leaves = first..self.leaves.len();
        if let Some(known) = self.text.variables.get_mut(variable) {
            known.is_in_scope = false;
        }
        let mut own = self.leaves.get(leaves.clone()).unwrap_or_default().iter();
        if !own.any(|leaf| leaf.stacked.contains(&variable)) {
            return Err(self.text.origin.error(column, format!("no name inside of the stack contains {{{name}}}")));
        }
        Ok(Operation::Stack { dim, variable, leaves, input })
    }

    fn input(&mut self) -> Result<Box<Expression>> {
        Ok(Box::new(self.expression()?))
    }

    fn dequantize(&mut self) -> Result<Operation> {
        let codes = self.leaf()?;
        if let Some(leaf) = self.leaves.get_mut(codes) {
            leaf.is_codes = true;
        }
        self.text.expect(',', "and the scales: dequant(codes, scales, ...)")?;
        let scales = self.leaf()?;
        let (mut global_scale, mut scheme, mut block) = (None, None, Vec::new());
        while self.text.take(',') {
            self.text.skip_space();
            let column = self.text.at;
            let word = self.text.word();
            let next = self.text.peek();
            if word == "block" && next == Some('=') && block.is_empty() {
                self.text.expect('=', "after block")?;
                block = self.block()?;
            } else if scheme.is_none()
                && let Some(known) = Scheme::ALL.iter().find(|known| known.name() == word)
            {
                scheme = Some(*known);
            } else if global_scale.is_none() && next != Some('=') {
                self.text.at = column;
                global_scale = Some(self.leaf()?);
            } else {
                let names: Vec<_> = Scheme::ALL.iter().map(|scheme| scheme.name()).collect();
                let message = format!(
                    "expected the name of a global scale, one of the schemes {}, or block=ROWSxCOLUMNS",
                    names.join(", ")
                );
                return Err(self.text.origin.error(column, message));
            }
        }
        let scheme = scheme.unwrap_or(Scheme::Scale);
        Ok(Operation::Dequantize { codes, scales, global_scale, scheme, block })
    }

    fn quantize(&mut self) -> Result<Operation> {
        let input = self.input()?;
        self.text.expect(',', "and the kind of codes: quant(x, codes, row)")?;
        self.text.skip_space();
        let column = self.text.at;
        let word = self.text.word();
        let codes = Codes::parse(&word).map_err(|error| self.text.origin.error(column, error.message()))?;
        self.text.expect(',', "and what shares a scale: quant(x, codes, row)")?;
        self.text.skip_space();
        let column = self.text.at;
        let block = match &*self.text.word() {
            "row" => [1, 0],
            "tensor" => [0, 0],
            "block" if self.text.take('=') => <[i64; 2]>::try_from(self.block()?).unwrap_or_default(),
            word => {
                let message = format!("expected row, tensor or block=ROWSxCOLUMNS, not {word:?}");
                return Err(self.text.origin.error(column, message));
            }
        };
        Ok(Operation::Quantize { input, codes, block })
    }

    /// Takes rows and columns of a block.
    fn block(&mut self) -> Result<Vec<i64>> {
        self.text.skip_space();
        let column = self.text.at;
        let word = self.text.word();
        let size = |text: &str| text.parse::<u32>().ok().filter(|size| *size > 0).map(i64::from);
        let sizes = word.split_once('x').and_then(|(rows, columns)| Some(vec![size(rows)?, size(columns)?]));
        let message = format!("expected rows and columns of a block, such as 128x128, not {word:?}");
        sizes.ok_or_else(|| self.text.origin.error(column, message))
    }

    fn tensor(&mut self) -> Result<Operation> {
        Ok(Operation::Tensor(self.leaf()?))
    }

    /// Takes the name of stored tensors, and returns the index of the leaf.
    fn leaf(&mut self) -> Result<usize> {
        self.text.skip_space();
        let column = self.text.at;
        let pattern = self.text.name("the name of a tensor, or an operation")?;
        let is_stacked = |index: &usize| self.text.variables.get(*index).is_some_and(|known| known.is_stacked);
        let mut stacked: Vec<usize> = pattern.variables().map(|variable| variable.index).filter(is_stacked).collect();
        stacked.sort_unstable();
        stacked.dedup();
        self.leaves.push(Leaf { column, pattern, stacked, is_codes: false });
        Ok(self.leaves.len() - 1)
    }

    fn dtype(&mut self) -> Result<Dtype> {
        self.text.skip_space();
        let column = self.text.at;
        let word = self.text.word();
        let plain = |name: &str| name.replace('_', "").to_ascii_lowercase();
        let found = Dtype::all().find(|dtype| plain(dtype.name()) == plain(&word) && dtype.is_float());
        found.ok_or_else(|| {
            let names: Vec<_> = Dtype::all().filter(|dtype| dtype.is_float()).map(Dtype::name).collect();
            self.text
                .origin
                .error(column, format!("{word:?} is not a dtype to cast to; those are {}", names.join(", ")))
        })
    }
}
