//! Properties of all casts. tests/python/core/test_cast.py compares the bits of each with PyTorch.

use fst::cast::elements::Cast;
use fst::cast::scatter::has_cast;
use fst::dtype::Dtype;
use proptest::prelude::*;

/// Dtypes to which numbers can be cast.
const FLOATS: [Dtype; 9] = [
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

#[test]
fn numbers_cast_to_floats_only() {
    for from in Dtype::all() {
        for to in Dtype::all() {
            let is_number = FLOATS.contains(&from) || INTEGERS.contains(&from);
            let is_cast = from != to && is_number && FLOATS.contains(&to);
            assert_eq!((Cast::new(from, to).is_some(), has_cast(from, to)), (is_cast, is_cast), "{from} to {to}");
        }
    }
}

proptest! {
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
