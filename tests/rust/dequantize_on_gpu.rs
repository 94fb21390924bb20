//! Dequantization on the simulated GPU, as the operators queue it. It gives the bits of the CPU, which
//! tests/python/core/test_dequantize.py compares with PyTorch.

use crate::sim::abi::{POISON, REGISTER_PORTABLE};
use crate::sim::gpu::Gpu;
use crate::sim::random::Random;
use crate::sim::{self, Sim};
use fst::cast::dequantize;
use fst::cast::dequantize_task::BATCH_MATRICES;
use fst::cast::matrix::Matrix;
use fst::cast::scheme::Scheme;
use fst::device::cuda::{convert, kernels::IMAGE};
use fst::dtype::Dtype;
use half::{bf16, f16};
use memmap2::MmapMut;

/// GPUs that no other test uses, because their kernels stay loaded: a CUDA graph may need them.
const ORDINALS: [i32; 2] = [3, 4];

/// Matrices with addresses relative to the sources and the targets.
struct Program {
    matrices: Vec<Matrix>,
    source: Vec<u8>,
    target_bytes: usize,
    random: Random,
}

impl Program {
    fn new(seed: u64) -> Program {
        Program { matrices: Vec::new(), source: Vec::new(), target_bytes: 0, random: Random::new(seed) }
    }

    /// Adds bytes of the sources at a multiple of `alignment`, and returns their address.
    fn push_source(&mut self, bytes: impl Iterator<Item = u8>, alignment: usize) -> u64 {
        self.source.resize((self.source.len() + self.random.below(20) as usize).next_multiple_of(alignment), 0);
        let address = self.source.len();
        self.source.extend(bytes);
        address as u64
    }

    fn noise(&mut self, count: u64) -> Vec<u8> {
        (0..count).map(|_| self.random.below(256) as u8).collect()
    }

    /// Returns strides of a matrix by rows, by columns, or with gaps between all elements, and its length in bytes.
    fn strides(&mut self, [rows, columns]: [u64; 2], item_bytes: u64) -> ([u64; 2], u64) {
        let gap = self.random.below(3) * item_bytes;
        let strides = match self.random.below(3) {
            0 => [columns * item_bytes + gap, item_bytes],
            1 => [item_bytes, rows * item_bytes + gap],
            _ => [2 * columns * item_bytes, 2 * item_bytes],
        };
        (strides, (rows - 1) * strides[0] + (columns - 1) * strides[1] + item_bytes)
    }

    /// Adds a matrix. Without sizes, it has each code with each scale.
    fn push(&mut self, scheme: Scheme, dtypes: [Dtype; 3], sizes: Option<[u64; 6]>) {
        let [from, scale_dtype, to] = dtypes;
        let per_byte = scheme.codes_per_byte();
        let [rows, width, begin_row, begin_column, block_rows, block_columns] = sizes.unwrap_or([256, 256, 0, 0, 1, 0]);
        let (size, begin) = ([rows, width * per_byte], [begin_row, begin_column * per_byte]);
        let block = [block_rows, block_columns * per_byte];
        let grid = [0, 1].map(|axis| match block[axis] {
            0 => 1,
            block => (begin[axis] + size[axis]).div_ceil(block),
        });
        let scale_bytes = scale_dtype.item_bytes();
        let number_bytes = to.item_bytes();
        let (mut code_strides, mut code_bytes) = self.strides([rows, width], 1);
        let (mut scale_strides, mut scales_bytes) = self.strides(grid, scale_bytes);
        let mut scales = self.noise(scales_bytes);
        let mut codes = self.noise(code_bytes);
        if sizes.is_none() {
            (code_strides, code_bytes) = ([0, 1], 256);
            codes = (0..code_bytes).map(|code| code as u8).collect();
            (scale_strides, scales_bytes) = ([scale_bytes, scale_bytes], 256 * scale_bytes);
            scales = if scale_bytes == 1 { codes.clone() } else { self.noise(scales_bytes) };
        }
        let codes = self.push_source(codes.into_iter(), 1);
        let scales = self.push_source(scales.into_iter(), scale_bytes as usize);
        let factor = [0.37_f32, 2688.0, 1e-42][self.random.below(3) as usize];
        let global_scale = scheme.has_global_scale().then(|| self.push_source(factor.to_le_bytes().into_iter(), 4));
        let (target_strides, bytes) = self.strides(size, number_bytes);
        let target = (self.target_bytes as u64 + self.random.below(20)).next_multiple_of(number_bytes);
        self.target_bytes = (target + bytes) as usize;
        self.matrices.push(Matrix {
            scheme,
            from,
            scale_dtype,
            to,
            size,
            begin,
            block,
            codes,
            code_strides,
            scales,
            scale_strides,
            global_scale,
            target,
            target_strides,
        });
    }

    /// Adds a matrix of random dtypes, sizes, block and region.
    fn push_random(&mut self) {
        let scheme = self.choose(Scheme::ALL);
        let [from, scale_dtype] = [scheme.code_dtypes(), scheme.scale_dtypes()].map(|dtypes| self.choose(dtypes));
        let to = self.choose(&TARGETS);
        let mut below = |end| self.random.below(end);
        let sizes = [
            1 + below(70),
            1 + below(70),
            below(90),
            below(60),
            [0, 1, 2, 5, 64][below(5) as usize],
            [0, 1, 3, 8, 16][below(5) as usize],
        ];
        self.push(scheme, [from, scale_dtype, to], Some(sizes));
    }

    fn choose<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.random.below(values.len() as u64) as usize]
    }

    /// Returns the matrices at these addresses.
    fn at(&self, source: u64, target: u64) -> Vec<Matrix> {
        let moved = |matrix: &Matrix| Matrix {
            codes: matrix.codes + source,
            scales: matrix.scales + source,
            global_scale: matrix.global_scale.map(|scale| scale + source),
            target: matrix.target + target,
            ..*matrix
        };
        self.matrices.iter().map(moved).collect()
    }

    /// Returns the targets that the CPU writes.
    fn expected(&self) -> Vec<u8> {
        // Aligned to any element.
        let mut words = vec![u64::from_ne_bytes([POISON; 8]); self.target_bytes.div_ceil(8)];
        let addresses = (self.source.as_ptr().expose_provenance(), words.as_mut_ptr().expose_provenance());
        let matrices = self.at(addresses.0 as u64, addresses.1 as u64);
        // SAFETY: the matrices are in `source` and `words`, and do not overlap.
        unsafe { dequantize::run(&matrices, 1, &|| Ok(())) }.unwrap();
        words.iter().flat_map(|word| word.to_ne_bytes()).take(self.target_bytes).collect()
    }

    /// Compares targets. The bits of NaN differ between devices.
    fn check(&self, mut found: Vec<u8>) {
        let expected = self.expected();
        for matrix in &self.matrices {
            for row in 0..matrix.size[0] {
                for column in 0..matrix.size[1] {
                    let at = matrix.target + row * matrix.target_strides[0] + column * matrix.target_strides[1];
                    let bytes = at as usize..(at + matrix.to.item_bytes()) as usize;
                    if is_nan(matrix.to, &found[bytes.clone()]) && is_nan(matrix.to, &expected[bytes.clone()]) {
                        found[bytes.clone()].copy_from_slice(&expected[bytes.clone()]);
                    }
                    let (found, expected) = (&found[bytes.clone()], &expected[bytes]);
                    assert!(found == expected, "{row}, {column} of {matrix:?}: {found:x?}, {expected:x?}");
                }
            }
        }
        assert!(found == expected, "bytes between numbers were written");
    }
}

const TARGETS: [Dtype; 4] = [Dtype::BF16, Dtype::F16, Dtype::F32, Dtype::F64];

fn is_nan(dtype: Dtype, bytes: &[u8]) -> bool {
    match dtype {
        Dtype::BF16 => bf16::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        Dtype::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        Dtype::F32 => f32::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        _ => f64::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
    }
}

#[test]
fn matrices_are_dequantized_on_the_callers_stream() {
    let mut program = Program::new(3);
    for scheme in Scheme::ALL {
        // Codes of 4 bits have the same values in all dtypes.
        let kinds = if scheme.codes_per_byte() == 1 { scheme.code_dtypes() } else { &[Dtype::U8] };
        for (index, &from) in kinds.iter().enumerate() {
            for &scale_dtype in scheme.scale_dtypes() {
                program.push(*scheme, [from, scale_dtype, TARGETS[index % 4]], None);
            }
        }
    }
    (0..100).for_each(|_| program.push_random());

    let sim = Sim::start(5);
    let gpu = Gpu::new(&sim, ORDINALS[0]);
    let mut slot = MmapMut::map_anon(program.source.len()).unwrap();
    slot.copy_from_slice(&program.source);
    sim.cuda.register(&slot, REGISTER_PORTABLE).unwrap();
    let (source, target) = (gpu.allocate(slot.len()), gpu.allocate(program.target_bytes));
    // The copy is queued and runs late. The kernel has to wait for it.
    sim.cuda.copy(source, &slot, gpu.stream).unwrap();
    let matrices = program.at(source, target);
    sim.capture();
    let is_done = convert::dequantize(&matrices, gpu.ordinal, u64::try_from(gpu.stream).unwrap()).unwrap();
    assert_eq!(is_done, IMAGE.is_some());
    if is_done {
        assert_eq!(sim.counters().launches as usize, matrices.len().div_ceil(BATCH_MATRICES));
        program.check(gpu.read(target, program.target_bytes));
    }
    gpu.synchronize();
    gpu.with_context(|| sim.cuda.unregister(slot.as_ptr().addr())).unwrap();
    drop(gpu);
    assert_eq!(violations(sim), Vec::<String>::new());
}

#[test]
fn kernel_reads_and_writes_on_its_stream_only() {
    if IMAGE.is_none() {
        return;
    }
    let mut program = Program::new(4);
    program.push(Scheme::Nvfp4, [Dtype::U8, Dtype::F8E4M3, Dtype::BF16], None);
    let sim = Sim::start_lazy(6);
    let gpu = Gpu::new(&sim, ORDINALS[1]);
    let (source, target) = (gpu.allocate(program.source.len()), gpu.allocate(program.target_bytes));
    let other = sim.cuda.create_stream().unwrap();
    // Another stream writes codes, scales and global scale, and reads the target.
    let matrices = program.at(source, target);
    let matrix = matrices[0];
    for (address, bytes) in [(matrix.codes, 1), (matrix.scales, 1), (matrix.global_scale.unwrap(), 4)] {
        sim.launch_write(other, address, bytes, 0x11).unwrap();
    }
    assert!(convert::dequantize(&matrices, gpu.ordinal, u64::try_from(gpu.stream).unwrap()).unwrap());
    sim.launch_read(other, matrix.target, 1).unwrap();
    sim.cuda.synchronize_stream(other).unwrap();
    sim.cuda.destroy_stream(other).unwrap();
    drop(gpu);
    let found = violations(sim);
    assert!(found.len() == 4 && found.iter().all(|text| text.starts_with("missing-wait")), "{found:#?}");
}

#[test]
fn targets_that_the_kernel_cannot_write_are_refused() {
    let mut program = Program::new(4);
    program.push(Scheme::Scale, [Dtype::I8, Dtype::F32, Dtype::F32], None);
    let sim = Sim::start(6);
    let gpu = Gpu::new(&sim, 0);
    let target = gpu.allocate(program.target_bytes + 8);
    let good = program.at(gpu.allocate(program.source.len()), target)[0];
    for (wrong, text) in [
        (Matrix { target: target + 1, ..good }, "is not aligned"),
        (Matrix { scales: good.scales + 2, ..good }, "is not aligned"),
        (Matrix { to: Dtype::I32, ..good }, "has a dtype that the kernel does not know"),
        (Matrix { size: [1 << 60, 1 << 60], ..good }, "has too many tiles"),
    ] {
        let result = convert::dequantize(&[good, wrong], gpu.ordinal, u64::try_from(gpu.stream).unwrap());
        match IMAGE {
            None => assert!(!result.unwrap()),
            Some(_) => assert!(result.unwrap_err().to_string().contains(text)),
        }
    }
    assert_eq!(sim.counters().launches, 0);
    drop(gpu);
    assert_eq!(violations(sim), Vec::<String>::new());
}

/// Returns the violations, except for the context that the kernels, which stay loaded, retain.
fn violations(sim: Sim) -> Vec<String> {
    sim::release();
    sim.finish().violations.into_iter().filter(|violation| !violation.starts_with("leak")).collect()
}
