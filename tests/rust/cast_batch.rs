//! Batches of conversions, on one thread and on several threads.

use fst::cast::batch::{self, Conversion};
use fst::dtype::Dtype;
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
