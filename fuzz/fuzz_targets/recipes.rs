//! Parses arbitrary text as a rule of a recipe.
#![no_main]

use fst::recipe::rules::Rule;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let _ = Rule::parse(1, text);
});
