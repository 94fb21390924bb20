//! Layouts, compared byte for byte with the `safetensors` crate's.

use fst::dtype::Dtype;
use fst::error::Kind;
use fst::format::METADATA_KEY;
use fst::format::layout::{Layout, Names, Tensor, header, pad};
use proptest::prelude::*;
use safetensors::tensor::{Dtype as Reference, TensorView};
use std::collections::{BTreeMap, HashMap};

fn reference_dtype(dtype: Dtype) -> Reference {
    serde_json::from_value(serde_json::Value::from(dtype.name())).unwrap()
}

/// Returns the header that the `safetensors` crate writes for these tensors.
fn reference_header(tensors: &[(String, Dtype, Vec<u64>)], metadata: Option<HashMap<String, String>>) -> Vec<u8> {
    let data: Vec<Vec<u8>> = tensors.iter().map(|(_, dtype, shape)| vec![0; bytes_of(*dtype, shape)]).collect();
    let views = tensors.iter().zip(&data).map(|((name, dtype, shape), data)| {
        let shape = shape.iter().map(|&size| size as usize).collect();
        (name.clone(), TensorView::new(reference_dtype(*dtype), shape, data).unwrap())
    });
    let file = safetensors::serialize(views, metadata).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    file[..8 + length].to_vec()
}

fn bytes_of(dtype: Dtype, shape: &[u64]) -> usize {
    (shape.iter().product::<u64>() * dtype.bits() / 8) as usize
}

fn tensors() -> impl Strategy<Value = Vec<(String, Dtype, Vec<u64>)>> {
    let dtypes: Vec<Dtype> = Dtype::all().collect();
    let tensor =
        (prop::sample::select(dtypes), prop::collection::vec(0..4_u64, 0..3)).prop_map(|(dtype, mut shape)| {
            // Elements of less than a byte come in eights here.
            if dtype.bits() < 8 {
                shape.push(8);
            }
            (dtype, shape)
        });
    prop::collection::btree_map(any::<String>().prop_filter("reserved", |name| name != METADATA_KEY), tensor, 0..12)
        .prop_map(|named| named.into_iter().map(|(name, (dtype, shape))| (name, dtype, shape)).collect::<Vec<_>>())
        .prop_shuffle()
}

proptest! {
    #[test]
    fn headers_equal_those_of_the_safetensors_crate(
        tensors in tensors(),
        // The reference writes several entries in any order.
        metadata in prop::option::of(prop::collection::btree_map(any::<String>(), any::<String>(), 0..2)),
    ) {
        // There the reference writes what is no JSON.
        prop_assume!(!(tensors.is_empty() && metadata.as_ref().is_some_and(BTreeMap::is_empty)));
        let expected = reference_header(&tensors, metadata.clone().map(|texts| texts.into_iter().collect()));
        let ours: Vec<_> =
            tensors.iter().map(|(name, dtype, shape)| Tensor::new(name, *dtype, shape.clone()).unwrap()).collect();
        let layout = Layout::new(&ours, &metadata).unwrap();
        prop_assert_eq!(String::from_utf8_lossy(layout.header()), String::from_utf8_lossy(&expected));
        // Every byte of the data belongs to the tensor that the header gives it to.
        let mut begin = expected.len() as u64;
        for &index in layout.order() {
            let end = begin + ours[index].bytes();
            if begin < end {
                prop_assert_eq!(layout.tensor_at(begin), Some(ours[index].name()));
                prop_assert_eq!(layout.tensor_at(end - 1), Some(ours[index].name()));
            }
            begin = end;
        }
        prop_assert_eq!(layout.file_bytes(), begin);
        prop_assert_eq!(layout.tensor_at(begin), None);
        prop_assert_eq!(layout.tensor_at(0), None);
    }
}

#[test]
fn metadata_are_sorted() {
    let metadata = ["b", "a", "c"].map(|key| (key.to_owned(), key.to_uppercase()));
    let layout = Layout::new(&[], &Some(BTreeMap::from(metadata))).unwrap();
    assert_eq!(&layout.header()[8..], br#"{"__metadata__":{"a":"A","b":"B","c":"C"}}      "#);
}

#[test]
fn invalid_tensors_and_names_are_rejected() {
    let tensor = |name: &str| Tensor::new(name, Dtype::F32, vec![1]).unwrap();
    let layout = |tensors: &[Tensor]| Layout::new(tensors, &None).map(drop);
    for refused in [
        layout(&[tensor("a"), tensor("b"), tensor("a")]),
        layout(&[tensor(METADATA_KEY)]),
        Tensor::new("a", Dtype::F4, vec![3]).map(drop),
        Tensor::new("a", Dtype::F32, vec![1 << 40, 1 << 40]).map(drop),
        header([].iter(), &Some(BTreeMap::from([("a".into(), "b".repeat(100_000_000))]))).map(drop),
    ] {
        assert_eq!(refused.unwrap_err().kind(), Kind::InvalidArgument);
    }
    let mut names = Names::default();
    names.add("a").unwrap();
    assert!(names.add("a").unwrap_err().to_string().contains("tensor \"a\""));
}

#[test]
fn a_header_is_padded_with_spaces() {
    let mut bytes = header([].iter(), &None).unwrap();
    let before = bytes.clone();
    pad(&mut bytes, 4090);
    assert_eq!(bytes.len(), 4096);
    assert_eq!(u64::from_le_bytes(bytes[..8].try_into().unwrap()), 4088);
    assert!(bytes.starts_with(&[&4088_u64.to_le_bytes()[..], &before[8..]].concat()));
    assert!(bytes[before.len()..].iter().all(|&byte| byte == b' '));
    pad(&mut bytes, 16);
    assert_eq!(bytes.len(), 4096);
}
