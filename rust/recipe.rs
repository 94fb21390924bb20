//! Recipes: rules that say how the tensors of a load come from the tensors of a checkpoint.
//!
//! A rule names an output and an expression: a renamed tensor, a slice, a view, or several tensors that are stacked or
//! concatenated. [`rules`] parses the text. [`matching`] finds the tensors of a checkpoint that the rules name, and
//! returns the outputs, each with a [`view`] of stored tensors. [`pieces`] turns requested outputs into pieces: an index
//! region of a stored tensor, and the part of the output that it fills. [`recorded`] takes views that a program has
//! recorded in place of rules. Nothing here reads data.

mod cursor;
mod instances;
pub mod layout;
pub mod matching;
mod names;
pub mod numbers;
pub mod output;
mod parser;
pub mod pieces;
pub mod quantize;
pub mod recorded;
pub mod requests;
pub mod rules;
pub mod view;
