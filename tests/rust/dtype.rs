//! Tests of the dtype table against the safetensors crate.

use fst::dtype::Dtype;
use safetensors::tensor::Dtype as Reference;

#[test]
fn every_dtype_matches_safetensors() {
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
fn scalar_types_are_distinct_with_matching_sizes() {
    let mut seen = std::collections::HashSet::new();
    for dtype in Dtype::all() {
        match dtype.scalar_type() {
            Some(scalar_type) => {
                assert!(seen.insert(scalar_type), "{dtype} has the scalar type of another dtype");
                assert_eq!(dtype.item_bytes() * 8, dtype.bits() * dtype.packed_elements(), "{dtype}");
            }
            None => assert_eq!(dtype.bits(), 6, "{dtype}"),
        }
    }
}

#[test]
fn unknown_names_have_no_dtype() {
    for name in ["", "f32", "F32 ", "F8", "BF32"] {
        assert_eq!(Dtype::from_name(name), None);
    }
}
