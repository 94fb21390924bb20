//! Dtypes that a load requests by names and patterns.

use fst::checkpoint::dtype_rules::DtypeRules;
use fst::dtype::Dtype;
use fst::error::{Error, Kind};
use proptest::prelude::*;
use std::collections::BTreeSet;

const BF16: Option<Dtype> = Some(Dtype::BF16);
const F16: Option<Dtype> = Some(Dtype::F16);
const NAMES: [&str; 5] =
    ["layers.0.attn.weight", "layers.0.attn.weight_scale", "layers.1.mlp.bias", "head.weight", "x"];

fn resolve(rules: &[(&str, Option<Dtype>)]) -> Result<Vec<Option<Dtype>>, Error> {
    DtypeRules::new(rules.iter().copied()).resolve(NAMES.into_iter(), || NAMES.into_iter())
}

fn message(rules: &[(&str, Option<Dtype>)]) -> String {
    let error = resolve(rules).unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidArgument);
    error.to_string()
}

#[test]
fn the_first_pattern_decides_unless_the_name_has_a_rule() {
    assert_eq!(resolve(&[("head*", F16), ("*.weight", BF16)]).unwrap(), [BF16, None, None, F16, None]);
    assert_eq!(resolve(&[("*", BF16), ("head.weight", F16), ("x", None)]).unwrap(), [BF16, BF16, BF16, F16, None]);
    assert_eq!(resolve(&[("layers.[0].*.weight*", F16), ("?", BF16)]).unwrap(), [F16, F16, None, None, BF16]);
}

#[test]
fn every_rule_must_decide_for_a_tensor() {
    // The typos would leave all weights as they are.
    for (pattern, nearest) in [
        ("*.wieght", "layers.0.attn.weight"),
        ("layers.*.atn.weight", "layers.0.attn.weight"),
        ("head.wieght", "head.weight"),
    ] {
        let text = message(&[(pattern, BF16)]);
        assert!(text.contains(&format!("{pattern:?} matches no tensor; the nearest are {nearest:?}")), "{text}");
    }
    assert!(message(&[("[", BF16)]).ends_with(r#""[" matches no tensor"#));
    // The scales would be cast.
    let text = message(&[("*", BF16), ("*_scale", None)]);
    assert!(text.contains(r#""*" decides for each tensor that "*_scale" matches; put "*_scale" before it"#), "{text}");
    // All others may be none.
    assert!(resolve(&[("?*", BF16), ("*", F16)]).is_ok());
}

/// Independent matcher of `*` and `?`.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern, name) {
        ([], _) => name.is_empty(),
        ([b'*', rest @ ..], _) => (0..=name.len()).any(|skipped| matches(rest, &name[skipped..])),
        ([b'?', rest @ ..], [_, others @ ..]) => matches(rest, others),
        ([first, rest @ ..], [other, others @ ..]) => first == other && matches(rest, others),
        _ => false,
    }
}

proptest! {
    #[test]
    fn rules_are_those_of_their_description(
        names in proptest::collection::btree_set("[ab.]{1,6}", 0..8),
        rules in proptest::collection::vec(("[ab.*?]{1,5}", proptest::option::of(Just(Dtype::F16))), 0..4),
    ) {
        let decide = |name: &str| {
            let named = rules.iter().position(|(text, _)| text == name);
            named.or_else(|| rules.iter().position(|(text, _)| matches(text.as_bytes(), name.as_bytes())))
        };
        let deciding: BTreeSet<usize> = names.iter().filter_map(|name| decide(name)).collect();
        let all_decide = (0..rules.len()).all(|rule| deciding.contains(&rule) || rules[rule].0 == "*");
        let expected: Vec<_> = names.iter().map(|name| decide(name).and_then(|rule| rules[rule].1)).collect();
        let dtype_rules = DtypeRules::new(rules.iter().map(|(text, dtype)| (&**text, *dtype)));
        let all = || names.iter().map(|name| &**name);
        prop_assert_eq!(dtype_rules.resolve(all(), all).ok(), all_decide.then_some(expected));
    }
}
