//! Pieces of recipes: each element of an output is written once, and nothing outside of a tensor is read.

use crate::files;
use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::IndexRange;
use fst::checkpoint::selection::IndexRegions;
use fst::dtype::Dtype;
use fst::error::Kind;
use fst::recipe::layout::{Elements, Layout, Memory, numel};
use fst::recipe::matching::Recipe;
use fst::recipe::pieces::{NumbersPiece, Plan};
use fst::recipe::quantize;
use fst::recipe::rules::Rule;
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::LazyLock;
use tempfile::TempDir;

static CHECKPOINT: LazyLock<(TempDir, Checkpoint)> = LazyLock::new(|| {
    let directory = TempDir::new().unwrap();
    let tensor = |name, dtype, shape: [usize; 2], item_bytes: usize| {
        let bytes = files::pattern(1, shape.iter().product::<usize>() * item_bytes);
        (name, dtype, shape.to_vec(), bytes)
    };
    let tensors = [
        tensor("a.0", safetensors::tensor::Dtype::U8, [4, 6], 1),
        tensor("a.1", safetensors::tensor::Dtype::U8, [4, 6], 1),
        tensor("b", safetensors::tensor::Dtype::U8, [6, 4], 1),
        tensor("q", safetensors::tensor::Dtype::F8_E4M3, [5, 8], 1),
        tensor("s", safetensors::tensor::Dtype::F32, [3, 3], 4),
    ];
    let path = files::written(&directory, "model.safetensors", &tensors);
    let checkpoint = Checkpoint::open(&[path]).unwrap();
    (directory, checkpoint)
});

/// Returns the positions of elements in memory, in the order of the elements.
fn positions(layout: &Layout) -> Vec<u64> {
    let mut positions = vec![layout.offset];
    for (&size, &stride) in layout.sizes.iter().zip(&layout.strides) {
        positions =
            positions.iter().flat_map(|&position| (0..size).map(move |index| position + index * stride)).collect();
    }
    positions
}

fn region(shape: &[u64], ranges: &[IndexRange]) -> Vec<u64> {
    assert!(ranges.iter().zip(shape).all(|(range, size)| {
        range.length > 0 && range.step > 0 && range.start + (range.length - 1) * range.step < *size
    }));
    positions(&Layout::contiguous(shape).index(ranges))
}

/// Values of stored tensors and of memory: a number for each element of the checkpoint.
type Values = HashMap<u64, u64>;

fn run(checkpoint: &Checkpoint, plan: &Plan, outputs: &[u64]) -> Vec<Vec<u64>> {
    let mut memory: HashMap<String, Values> = HashMap::new();
    let write = |target: &Elements, values: Vec<u64>, memory: &mut HashMap<String, Values>| {
        let places = positions(&target.layout);
        assert_eq!(places.len(), values.len());
        let end = match target.memory {
            Memory::Output(index) => outputs[index],
            Memory::Temporary(index) => numel(&plan.temporaries[index].shape),
            Memory::Held(_) => panic!("a tensor of the caller is written"),
        };
        let own = memory.entry(format!("{:?}", target.memory)).or_default();
        for (place, value) in places.into_iter().zip(values) {
            assert!(place < end);
            assert_eq!(own.insert(place, value), None, "an element is written twice");
        }
    };
    for piece in &plan.pieces {
        let (_, entry) = checkpoint.entry(piece.position).unwrap();
        let elements = region(entry.shape, &piece.region);
        let values = elements.into_iter().map(|element| piece.position as u64 * 1000 + element).collect();
        write(&piece.target, values, &mut memory);
    }
    for NumbersPiece { numbers, parts, target } in &plan.numbers {
        let shape = &numbers.codes.shape;
        let values = region(shape, &parts.codes).into_iter().map(|code| numbers.codes.position as u64 * 1000 + code);
        write(target, values.collect(), &mut memory);
        // The scales are those of the blocks.
        region(&numbers.scales.shape, &parts.scales);
        for dim in 0..2 {
            let (codes, scales, block) = (parts.codes[dim], parts.scales[dim], numbers.block[dim]);
            for index in 0..codes.length {
                let scale = scales.start + (parts.begin[dim] + index) / block;
                assert_eq!(scale, (codes.start + index) / block);
                assert!(scale < scales.start + scales.length);
            }
        }
    }
    for copy in &plan.copies {
        let source = &memory[&format!("{:?}", copy.source.memory)];
        let values = positions(&copy.source.layout).iter().map(|position| source[position]).collect();
        write(&copy.target, values, &mut memory);
    }
    let output = |(index, &count): (usize, &u64)| {
        let own = memory.remove(&format!("{:?}", Memory::Output(index))).unwrap_or_default();
        assert_eq!(own.len() as u64, count, "an element is not written");
        (0..count).map(|place| own[&place]).collect()
    };
    outputs.iter().enumerate().map(output).collect()
}

fn expression() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("a.0"),
        Just("b"),
        Just("stack(0, e, a.{e})"),
        Just("cat(1, a.1, a.0)"),
        Just("dequant(q, s, block=2x3)")
    ];
    let leaf = leaf.prop_map(str::to_owned);
    leaf.prop_recursive(5, 8, 2, |inner| {
        prop_oneof![
            (inner.clone(), 0..2_i64, 0..2_i64).prop_map(|(x, a, b)| format!("transpose({x}, {a}, {b})")),
            (inner.clone(), 0..2_i64, 0..3_u64, 1..3_u64)
                .prop_map(|(x, d, start, step)| format!("slice({x}, {d}, {start}, -1, {step})")),
            (inner.clone(), 0..2_i64).prop_map(|(x, d)| format!("cat({d}, {x}, {x})")),
            (inner.clone(), prop::sample::select(vec!["-1", "2, -1", "-1, 3", "2, 2, -1"]))
                .prop_map(|(x, s)| format!("view({x}, {s})")),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn each_element_is_written_once(text in expression(), seeds in prop::collection::vec((0..6_u64, 0..6_u64, 1..4_u64), 5)) {
        let (_, checkpoint) = &*CHECKPOINT;
        let Ok(recipe) = Recipe::new(checkpoint, &[format!("out = {text}")]) else { return Ok(()) };
        let names = ["out".to_owned()];
        let whole = recipe.requests(&names, None).unwrap();
        let shape = whole[0].view.shape().to_vec();
        let plan = Plan::new(&recipe, &whole, &|| Ok(())).unwrap();
        let [values]: [Vec<u64>; 1] = run(checkpoint, &plan, &[numel(&shape)]).try_into().unwrap();
        let ranges: Vec<IndexRange> = shape.iter().zip(&seeds).map(|(&size, &(start, length, step))| {
            let start = start.min(size);
            IndexRange { start, length: length.min((size - start).div_ceil(step)), step }
        }).collect();
        let numbers = |pick: fn(&IndexRange) -> u64| ranges.iter().map(|range| pick(range) as i64).collect::<Vec<_>>();
        let (starts, lengths, steps) = (numbers(|range| range.start), numbers(|range| range.length), numbers(|range| range.step));
        let regions = IndexRegions { starts: &starts, lengths: &lengths, steps: &steps };
        let part = recipe.requests(&names, Some(regions)).unwrap();
        let plan = Plan::new(&recipe, &part, &|| Ok(())).unwrap();
        let wanted = positions(&Layout::contiguous(&shape).index(&ranges));
        let [found]: [Vec<u64>; 1] = run(checkpoint, &plan, &[wanted.len() as u64]).try_into().unwrap();
        let expected: Vec<u64> = wanted.iter().map(|&position| values[position as usize]).collect();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn any_text_is_a_rule_or_an_error(text in "[a-z{}*.(), =:\"\\\\0-9-]{0,40}") {
        if let Err(error) = Rule::parse(1, &text) {
            prop_assert_eq!(error.kind(), Kind::InvalidArgument);
            prop_assert!(error.to_string().contains("rule 1, column "));
        }
    }
}

#[test]
fn interleaved_rows_take_no_temporary_tensor() {
    let (_, checkpoint) = &*CHECKPOINT;
    let rules = ["out = view(transpose(view(b, 3, 2, 4), 0, 1), 6, 4)"];
    let recipe = Recipe::new(checkpoint, &rules).unwrap();
    let requests = recipe.requests(&["out".to_owned()], None).unwrap();
    let plan = Plan::new(&recipe, &requests, &|| Ok(())).unwrap();
    assert_eq!((plan.pieces.len(), plan.temporaries.len()), (2, 0));
    assert_eq!(recipe.outputs()[0].dtype, Dtype::U8);
}

#[test]
fn codes_are_made_in_steps_of_whole_blocks() {
    let (_, checkpoint) = &*CHECKPOINT;
    let recipe = Recipe::new(checkpoint, &["c, t = quant(dequant(q, s, block=2x3), i8, block=2x3)"]).unwrap();
    let rows = |plans: &[Plan]| -> Vec<(u64, u64)> {
        let codes = plans.iter().map(|plan| plan.numbers[0].parts.codes[0]);
        codes.map(|range| (range.start, range.length)).collect()
    };
    let requests = recipe.requests(&["c".to_owned(), "t".to_owned()], None).unwrap();
    let steps = quantize::steps(&requests, 20, &|| Ok(())).unwrap();
    assert_eq!(rows(&steps), [(0, 2), (2, 2), (4, 1)]);
    for (output, count) in [(0, 5 * 8), (1, 3 * 3)] {
        let copies = steps.iter().flat_map(|plan| &plan.copies);
        let own = copies.filter(|copy| copy.target.memory == Memory::Output(output));
        let mut written: Vec<u64> = own.flat_map(|copy| positions(&copy.target.layout)).collect();
        written.sort_unstable();
        assert_eq!(written, (0..count).collect::<Vec<_>>());
    }
    let regions = IndexRegions { starts: &[1, 0], lengths: &[1, 2], steps: &[1, 2] };
    let part = recipe.requests(&["t".to_owned()], Some(regions)).unwrap();
    assert_eq!(rows(&quantize::steps(&part, u64::MAX, &|| Ok(())).unwrap()), [(2, 2)]);
}
