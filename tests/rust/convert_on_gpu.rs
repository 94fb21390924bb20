//! Casts and writes by position on the simulated GPU, as the operators queue them.

use crate::sim::Sim;
use crate::sim::abi::POISON;
use crate::sim::gpu::Gpu;
use fst::cast::batch::Conversion;
use fst::cast::elements::Cast;
use fst::device::cuda::kernels::IMAGE;
use fst::device::{self, cuda::convert};
use fst::dtype::Dtype;

/// GPU that no other test uses, because its kernels stay loaded: a CUDA graph may need them.
const ORDINAL: i32 = 2;

/// Sizes of more tensors than fit one launch: empty, tiny, and of several tiles.
fn sizes() -> impl Iterator<Item = usize> {
    (0..200).map(|index| if index % 50 == 49 { 20_000 } else { index % 7 })
}

/// Returns a write to every third position, and the bytes of its target afterwards. The values are written late.
fn put(sim: &Sim, gpu: &Gpu, dtype: Dtype, elements: usize) -> (Conversion, Vec<u8>) {
    let item_bytes = dtype.item_bytes() as usize;
    let numbers: Vec<u32> = (0..elements as u32).map(|number| number * 3 + number % 2).collect();
    let mut expected = vec![POISON; (elements * 3 + 1) * item_bytes];
    for &number in &numbers {
        expected[number as usize * item_bytes..][..item_bytes].fill(0x11);
    }
    let positions = gpu.allocate(elements * 4);
    sim.write(positions, &numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>()).unwrap();
    let (source, target) = (gpu.allocate(elements * item_bytes), gpu.allocate(expected.len()));
    gpu.queue_fill(source, elements * item_bytes);
    let (from, to, positions) = (dtype, dtype, Some(positions));
    (
        Conversion {
            source,
            target,
            elements: elements as u64,
            from,
            to,
            positions,
            target_elements: elements as u64 * 3 + 1,
        },
        expected,
    )
}

#[test]
fn tensors_are_converted_on_the_callers_stream() {
    let sim = Sim::start(7);
    sim.capture();
    let gpu = Gpu::new(&sim, ORDINAL);
    let stream = u64::try_from(gpu.stream).unwrap();
    let mut conversions = Vec::new();
    let mut results = Vec::new();
    for (index, elements) in sizes().enumerate().filter(|&(_, elements)| elements > 0) {
        let to = if index % 3 == 0 { Dtype::F32 } else { Dtype::BF16 };
        let (source_bytes, target_bytes) = (elements * 4, elements * to.item_bytes() as usize);
        let (source, target) = (gpu.allocate(source_bytes), gpu.allocate(target_bytes));
        // The write is queued and runs late. The cast has to wait for it.
        gpu.queue_fill(source, source_bytes);
        conversions.push(Conversion {
            source,
            target,
            elements: elements as u64,
            from: Dtype::F32,
            to,
            positions: None,
            target_elements: 0,
        });
        let before = vec![0x11; source_bytes];
        let mut expected = before.clone();
        if let Some(cast) = Cast::new(Dtype::F32, to) {
            expected.truncate(target_bytes);
            cast.run(&before, &mut expected);
        }
        results.push((target, expected));
    }
    for (index, elements) in sizes().enumerate().filter(|&(_, elements)| elements > 0) {
        let dtype = [Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::I64, Dtype::C128][index % 5];
        let (put, expected) = put(&sim, &gpu, dtype, elements);
        conversions.push(put);
        results.push((put.target, expected));
    }
    let is_done = convert::run(&conversions, ORDINAL, stream).unwrap();
    assert_eq!(is_done, IMAGE.is_some());
    if is_done {
        assert_eq!(sim.counters().launches as usize, conversions.len().div_ceil(fst::cast::scatter::BATCH_TASKS));
        let found = gpu.read_all(results.iter().map(|(target, expected)| (*target, expected.len())));
        for (found, (target, expected)) in found.iter().zip(&results) {
            assert!(found == expected, "the tensor at {target:#x}");
        }
        // Kernels that a graph may replay stay loaded.
        device::release();
        assert!(convert::run(&conversions, ORDINAL, stream).unwrap());
    }
    drop(gpu);
    assert_no_violations(sim);
}

fn assert_no_violations(sim: Sim) {
    // The kernels, which stay loaded, retain their context.
    let others: Vec<String> =
        sim.finish().violations.into_iter().filter(|violation| !violation.starts_with("leak")).collect();
    assert_eq!(others, Vec::<String>::new());
}
