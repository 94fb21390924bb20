//! Tests of the dtype table against the safetensors crate.

use fst::cast::elements::Cast;
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
    for name in ["", "f32", "F32 ", "F8", "BF32"] {
        assert_eq!(Dtype::from_name(name), None);
    }
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

/// Renders the definitions of csrc/kernels/dtype.h.
fn kernel_definitions() -> String {
    let is_cast = |dtype: Dtype| dtype == Dtype::F32 || Cast::new(dtype, Dtype::F32).is_some();
    let mut dtypes: Vec<_> = Dtype::all().filter(|&dtype| is_cast(dtype)).collect();
    dtypes.sort_by_key(|dtype| dtype.scalar_type());
    let mut text = "enum Dtype : uint8_t {\n".to_owned();
    for dtype in &dtypes {
        text += &format!("  {dtype} = {},\n", dtype.scalar_type().unwrap());
    }
    text += "};\n";
    for dtype in dtypes {
        let Some(layout) = dtype.float8() else { continue };
        let (mantissa_bits, bias, finite_end) = (layout.mantissa_bits, layout.bias, layout.finite_end);
        text += &format!("struct Float8<{dtype}> : Float8Layout<{mantissa_bits}, {bias}, {finite_end:#04X}> {{}};\n");
    }
    text
}

#[test]
fn kernels_have_the_same_dtypes() {
    let header = include_str!("../../csrc/kernels/dtype.h");
    let (_, numbers) = header.split_once("enum Dtype").unwrap();
    let (numbers, layouts) = numbers.split_once("};\n").unwrap();
    let layouts = layouts.lines().filter(|line| line.starts_with("struct Float8<"));
    let definitions =
        format!("enum Dtype{numbers}}};\n") + &layouts.map(|line| format!("{line}\n")).collect::<String>();
    assert_eq!(definitions, kernel_definitions(), "csrc/kernels/dtype.h differs from rust/dtype.rs");
}
