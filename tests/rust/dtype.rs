//! The dtype table against the reference implementation.

use fst::dtype::Dtype;
use safetensors::tensor::Dtype as Reference;

#[test]
fn every_row_agrees_with_safetensors() {
    let mut count = 0;
    for dtype in Dtype::all() {
        let reference: Reference = serde_json::from_str(&format!("{:?}", dtype.name())).unwrap();
        assert_eq!(reference.to_string(), dtype.name());
        assert_eq!(reference.bitsize() as u64, dtype.bits(), "{dtype}");
        assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
        count += 1;
    }
    assert_eq!(count, 22);
}

#[test]
fn scalar_types_are_distinct_and_sized() {
    let mut seen = std::collections::HashSet::new();
    for dtype in Dtype::all() {
        match dtype.scalar_type() {
            Some(scalar_type) => {
                assert!(seen.insert(scalar_type), "{dtype} shares its scalar type");
                assert_eq!(dtype.item_bytes() * 8, dtype.bits() * dtype.packed_elements(), "{dtype}");
            }
            None => assert_eq!(dtype.bits(), 6, "{dtype}"),
        }
    }
}

#[test]
fn an_unknown_name_has_no_dtype() {
    for name in ["", "f32", "F32 ", "F8", "BF32"] {
        assert_eq!(Dtype::from_name(name), None);
    }
}
