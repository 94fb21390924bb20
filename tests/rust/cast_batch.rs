//! Batches of conversions, on one thread and on several threads.

use fst::cast::batch::{self, Conversion};
use fst::dtype::Dtype;
use fst::error::Kind;
use half::bf16;

/// Casts BF16 tensors of these sizes to F32, and checks every element.
fn widen(sizes: &[usize], threads: usize) {
    let source: Vec<bf16> =
        (0..sizes.iter().sum()).map(|index: usize| bf16::from_bits(index as u16 & 0x3fff)).collect();
    let mut target = vec![0f32; source.len()];
    let mut first = 0;
    let mut conversions = Vec::new();
    for &size in sizes {
        conversions.push(Conversion {
            source: source[first..].as_ptr().expose_provenance() as u64,
            target: target[first..].as_mut_ptr().expose_provenance() as u64,
            elements: size as u64,
            from: Dtype::BF16,
            to: Dtype::F32,
            positions: None,
            target_elements: 0,
        });
        first += size;
    }
    // SAFETY: the sources and targets are valid, and no targets overlap.
    unsafe { batch::run(&conversions, threads) }.unwrap();
    for (index, (from, to)) in source.iter().zip(&target).enumerate() {
        assert_eq!(f32::from(*from).to_bits(), to.to_bits(), "element {index} of {sizes:?}");
    }
}

#[test]
fn tensors_of_all_sizes_are_cast() {
    for threads in [1, 2, 5] {
        widen(&[], threads);
        widen(&[0, 1, 0], threads);
        widen(&[1_000_003], threads);
        widen(&(0..3000).map(|index| index % 300).collect::<Vec<_>>(), threads);
        widen(&[65536, 700_001, 65535, 0, 65537, 3], threads);
    }
}

#[test]
fn large_copies_have_all_bytes_at_any_alignment() {
    let source: Vec<u8> = (0..(64 << 20) + 100).map(|index: usize| (index ^ (index >> 8)) as u8).collect();
    let mut target = vec![0u8; source.len() + 32];
    for (from, to, left) in [(0, 0, 0), (3, 1, 7), (1, 16, 15)] {
        let bytes = source.len() - from - left;
        target.fill(0);
        let conversion = Conversion {
            source: source[from..].as_ptr().expose_provenance() as u64,
            target: target[to..].as_mut_ptr().expose_provenance() as u64,
            elements: bytes as u64,
            from: Dtype::U8,
            to: Dtype::U8,
            positions: None,
            target_elements: 0,
        };
        // SAFETY: both pointers are valid for the bytes.
        unsafe { batch::run(&[conversion], 2) }.unwrap();
        assert!(target[to..to + bytes] == source[from..from + bytes]);
        assert!(target[..to].iter().chain(&target[to + bytes..]).all(|&byte| byte == 0));
    }
}

/// Writes elements of this size to every third position, and checks all bytes of the target.
fn put(dtype: Dtype, elements: usize, threads: usize) {
    let item_bytes = dtype.item_bytes() as usize;
    let values: Vec<u8> = (0..elements * item_bytes).map(|index| (index * 7 + index / 251) as u8).collect();
    let positions: Vec<u32> = (0..elements as u32).map(|number| number * 3 + number % 2).collect();
    let mut target = vec![0xEE; elements * item_bytes * 3 + item_bytes];
    let mut expected = target.clone();
    for (value, &position) in values.chunks(item_bytes).zip(&positions).take(elements.saturating_sub(1)) {
        expected[position as usize * item_bytes..][..item_bytes].copy_from_slice(value);
    }
    let conversion = Conversion {
        source: values.as_ptr().expose_provenance() as u64,
        target: target.as_mut_ptr().expose_provenance() as u64,
        elements: elements as u64,
        from: dtype,
        to: dtype,
        positions: Some(positions.as_ptr().expose_provenance() as u64),
        // The last position is beyond the elements that may be written.
        target_elements: positions.last().map_or(0, |&last| u64::from(last)),
    };
    // SAFETY: values, positions and target are valid.
    unsafe { batch::run(&[conversion], threads) }.unwrap();
    assert!(target == expected, "{elements} elements of {dtype:?}");
}

#[test]
fn elements_are_written_by_position() {
    for dtype in [Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::I64, Dtype::C128] {
        for (elements, threads) in [(0, 1), (5, 1), (100_003, 1), (100_003, 4)] {
            put(dtype, elements, threads);
        }
    }
}

#[test]
fn unsupported_cast_is_an_internal_error() {
    let conversion = Conversion {
        source: 1,
        target: 1,
        elements: 0,
        from: Dtype::C64,
        to: Dtype::F32,
        positions: None,
        target_elements: 0,
    };
    for wrong in [conversion, Conversion { from: Dtype::F16, positions: Some(1), ..conversion }] {
        // SAFETY: there are no elements.
        let error = unsafe { batch::run(&[wrong], 1) }.unwrap_err();
        assert_eq!(error.kind(), Kind::Internal);
    }
}
