//! Properties of all casts. The Python tests compare each cast with PyTorch, bit by bit.

use fst::cast::elements::Cast;
use fst::dtype::Dtype;
use half::{bf16, f16};
use proptest::prelude::*;

/// Dtypes to which numbers can be cast.
pub const FLOATS: [Dtype; 9] = [
    Dtype::F16,
    Dtype::BF16,
    Dtype::F32,
    Dtype::F64,
    Dtype::F8E4M3,
    Dtype::F8E5M2,
    Dtype::F8E4M3Fnuz,
    Dtype::F8E5M2Fnuz,
    Dtype::F8E8M0,
];
const INTEGERS: [Dtype; 9] =
    [Dtype::Bool, Dtype::U8, Dtype::I8, Dtype::U16, Dtype::I16, Dtype::U32, Dtype::I32, Dtype::U64, Dtype::I64];

fn convert(from: Dtype, to: Dtype, source: &[u8]) -> Vec<u8> {
    let mut target = vec![0xa5; source.len() / from.item_bytes() as usize * to.item_bytes() as usize];
    Cast::new(from, to).unwrap().run(source, &mut target);
    target
}

fn as_f64(from: Dtype, source: &[u8]) -> Vec<f64> {
    let bytes = if from == Dtype::F64 { source.to_vec() } else { convert(from, Dtype::F64, source) };
    bytes.as_chunks().0.iter().map(|&bytes| f64::from_le_bytes(bytes)).collect()
}

fn bytes_of_f32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Returns every bit pattern of a dtype of 8 or 16 bits.
fn every_pattern(dtype: Dtype) -> Vec<u8> {
    match dtype.bits() {
        8 => (0..=u8::MAX).collect(),
        _ => (0..=u16::MAX).flat_map(u16::to_le_bytes).collect(),
    }
}

#[test]
fn numbers_cast_to_floats_only() {
    for from in Dtype::all() {
        for to in Dtype::all() {
            let is_number = FLOATS.contains(&from) || INTEGERS.contains(&from);
            let is_cast = from != to && is_number && FLOATS.contains(&to);
            assert_eq!(Cast::new(from, to).is_some(), is_cast, "{from} to {to}");
        }
    }
}

#[test]
fn widening_and_narrowing_preserves_values() {
    let narrow_floats = FLOATS.into_iter().filter(|dtype| dtype.bits() <= 16);
    for from in narrow_floats {
        let source = every_pattern(from);
        for to in [Dtype::F32, Dtype::F64] {
            let back = convert(to, from, &convert(from, to, &source));
            let (before, after) = (as_f64(from, &source), as_f64(from, &back));
            for (index, (before, after)) in before.into_iter().zip(after).enumerate() {
                // The smallest E8M0 number is a subnormal f32. The cast uses its exponent, so the number is preserved.
                let same = before.to_bits() == after.to_bits() || before.is_nan() && after.is_nan();
                assert!(same, "{from} to {to} and back: pattern {index:#x} was {before}, is {after}");
            }
        }
    }
}

#[test]
fn nan_stays_nan() {
    for from in FLOATS {
        let source = match from.bits() {
            32 => bytes_of_f32(&[f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)]),
            64 => [f64::NAN, -f64::NAN, f64::from_bits(0x7ff0_0000_0000_0001), f64::from_bits(u64::MAX)]
                .into_iter()
                .flat_map(f64::to_le_bytes)
                .collect(),
            _ => every_pattern(from),
        };
        let before = as_f64(from, &source);
        for to in FLOATS.into_iter().filter(|&to| to != from) {
            let after = as_f64(to, &convert(from, to, &source));
            for (before, after) in before.iter().zip(after).filter(|(before, _)| before.is_nan()) {
                assert!(after.is_nan(), "{from} to {to}: {before} became {after}");
            }
        }
    }
}

#[test]
fn f16_and_bf16_match_the_half_crate() {
    for (index, value) in as_f64(Dtype::F16, &every_pattern(Dtype::F16)).into_iter().enumerate() {
        let expected = f16::from_bits(index as u16);
        assert!(value == f64::from(expected) || value.is_nan() && expected.is_nan(), "{index:#x}");
    }
    for (index, value) in as_f64(Dtype::BF16, &every_pattern(Dtype::BF16)).into_iter().enumerate() {
        let expected = bf16::from_bits(index as u16);
        assert!(value == f64::from(expected) || value.is_nan() && expected.is_nan(), "{index:#x}");
    }
}

#[test]
fn integers_round_to_the_nearest_double() {
    let values = [0, 1, -1, i64::MAX, i64::MIN, (1 << 53) + 1, (1 << 24) + 1];
    let source: Vec<u8> = values.into_iter().flat_map(i64::to_le_bytes).collect();
    let expected: Vec<f64> = values.into_iter().map(|value| value as f64).collect();
    assert_eq!(as_f64(Dtype::I64, &source), expected);
    let unsigned: Vec<f64> = values.into_iter().map(|value| value.cast_unsigned() as f64).collect();
    assert_eq!(as_f64(Dtype::U64, &source), unsigned);
    let source: Vec<u8> = [i32::MIN, i32::MAX].into_iter().flat_map(i32::to_le_bytes).collect();
    assert_eq!(as_f64(Dtype::I32, &source), [-2_147_483_648.0, 2_147_483_647.0]);
}

#[test]
fn nonzero_bool_bytes_are_one() {
    assert_eq!(as_f64(Dtype::Bool, &[0, 1, 2, 255]), [0.0, 1.0, 1.0, 1.0]);
}

proptest! {
    #[test]
    fn f32_rounds_to_f16_and_bf16_like_the_half_crate(bits in prop::collection::vec(any::<u32>(), 1..40)) {
        let values: Vec<f32> = bits.into_iter().map(f32::from_bits).filter(|value| !value.is_nan()).collect();
        let source = bytes_of_f32(&values);
        let f16s: Vec<u8> = values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect();
        prop_assert_eq!(convert(Dtype::F32, Dtype::F16, &source), f16s);
        let bf16s: Vec<u8> = values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect();
        prop_assert_eq!(convert(Dtype::F32, Dtype::BF16, &source), bf16s);
    }

    #[test]
    fn casts_are_monotonic(mut values in prop::collection::vec(prop::num::f32::NORMAL | prop::num::f32::SUBNORMAL, 2..40)) {
        values.sort_by(f32::total_cmp);
        let source = bytes_of_f32(&values);
        // E8M0 drops the sign.
        for to in FLOATS.into_iter().filter(|to| !matches!(to, Dtype::F32 | Dtype::F8E8M0)) {
            // Some formats represent an overflow as NaN.
            let after = as_f64(to, &convert(Dtype::F32, to, &source));
            let numbers: Vec<f64> = after.into_iter().filter(|value| !value.is_nan()).collect();
            prop_assert!(numbers.is_sorted(), "to {}: {:?}", to, numbers);
        }
    }

    /// The result is independent of block boundaries and of the alignment of the bytes.
    #[test]
    fn elements_are_cast_independently(
        count in 0usize..2500,
        shift in 0usize..8,
        from in prop::sample::select([FLOATS, INTEGERS].concat()),
        to in prop::sample::select(FLOATS.to_vec()),
        seed in any::<u64>(),
    ) {
        prop_assume!(from != to);
        let (from_bytes, to_bytes) = (from.item_bytes() as usize, to.item_bytes() as usize);
        let random = |index: usize| (seed.wrapping_add(index as u64)).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()[7];
        let bytes: Vec<u8> = (0..shift + count * from_bytes).map(random).collect();
        let source = &bytes[shift..];
        let mut target = vec![0; shift + count * to_bytes + 1];
        let end = target.len() - 1;
        Cast::new(from, to).unwrap().run(source, &mut target[shift..end]);
        prop_assert_eq!(target[end], 0);
        let one_by_one: Vec<u8> = source.chunks(from_bytes).flat_map(|element| convert(from, to, element)).collect();
        prop_assert_eq!(&target[shift..end], &one_by_one);
    }
}
