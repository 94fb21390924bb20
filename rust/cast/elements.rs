//! Casts of elements on the CPU, bit-exact with PyTorch's `Tensor.to` on the CPU.
//!
//! As in PyTorch, every value goes through f32. An f64 cast to 16 bits is therefore rounded twice. Casts of wide
//! integers to F64 are an exception, since f32 cannot hold all their digits, as are casts of F64 to F16 on 64-bit Arm.
//! PyTorch's result for NaN depends on
//! whether its vector or its scalar loop handles the element; these casts match the vector loop. `docs/casts.md` has
//! all rules.

#[cfg(target_arch = "x86_64")]
use super::f16c;
use super::float8;
use crate::dtype::Dtype;
use half::f16;
use half::slice::HalfFloatSliceExt;
use zerocopy::FromBytes;

/// Supported cast. Unsupported pairs of dtypes cannot be represented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cast {
    /// Dtype of the source.
    pub from: Dtype,
    /// Dtype of the destination.
    pub to: Dtype,
}

/// Elements converted at a time. Their f32 values stay in the L1 cache.
const BLOCK_ELEMENTS: usize = 512;

/// Intermediate values of one block.
struct Scratch {
    values: [f32; BLOCK_ELEMENTS],
    halves: [f16; BLOCK_ELEMENTS],
}

/// NaN that PyTorch's vector loops write when they cast f32 to bf16. Its scalar loops write `BF16_NAN`.
const BF16_NAN_OF_VECTORS: u16 = 0xffff;
const BF16_NAN: u16 = 0x7fc0;

impl Cast {
    /// Returns the cast from one dtype to another, or `None` if it is unsupported or the dtypes are equal.
    ///
    /// Sources are bools, integers, and floats of at least 8 bits. Destinations are floats of at least 8 bits.
    pub fn new(from: Dtype, to: Dtype) -> Option<Cast> {
        let is_integer = matches!(
            from,
            Dtype::Bool
                | Dtype::U8
                | Dtype::I8
                | Dtype::U16
                | Dtype::I16
                | Dtype::U32
                | Dtype::I32
                | Dtype::U64
                | Dtype::I64
        );
        (from != to && to.is_float() && (from.is_float() || is_integer)).then_some(Cast { from, to })
    }

    /// Casts the elements of `source` into `target`. Both hold the same number of elements, of any alignment.
    pub fn run(self, source: &[u8], target: &mut [u8]) {
        debug_assert_eq!(
            source.len() / item_bytes(self.from),
            target.len() / item_bytes(self.to),
            "{self:?}: elements of source and target"
        );
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { self.run_avx2(source, target) };
        }
        self.run_blocks(source, target);
    }

    /// Runs the same loops, compiled for AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn run_avx2(self, source: &[u8], target: &mut [u8]) {
        self.run_blocks(source, target);
    }

    #[inline(always)]
    fn run_blocks(self, source: &[u8], target: &mut [u8]) {
        let mut scratch = Scratch { values: [0.0; BLOCK_ELEMENTS], halves: [f16::ZERO; BLOCK_ELEMENTS] };
        let sources = source.chunks(BLOCK_ELEMENTS * item_bytes(self.from));
        let targets = target.chunks_mut(BLOCK_ELEMENTS * item_bytes(self.to));
        for (source, target) in sources.zip(targets) {
            self.run_block(source, target, &mut scratch);
        }
    }

    #[inline(always)]
    #[allow(clippy::cast_precision_loss, reason = "casts round")]
    fn run_block(self, source: &[u8], target: &mut [u8], scratch: &mut Scratch) {
        let Scratch { values, halves } = scratch;
        match (self.from, self.to) {
            (Dtype::I32, Dtype::F64) => map(source, target, |bytes| f64::from(i32::from_le_bytes(bytes)).to_le_bytes()),
            (Dtype::U32, Dtype::F64) => map(source, target, |bytes| f64::from(u32::from_le_bytes(bytes)).to_le_bytes()),
            (Dtype::I64, Dtype::F64) => map(source, target, |bytes| (i64::from_le_bytes(bytes) as f64).to_le_bytes()),
            (Dtype::U64, Dtype::F64) => map(source, target, |bytes| (u64::from_le_bytes(bytes) as f64).to_le_bytes()),
            // PyTorch rounds once on these processors, which have an instruction for it.
            #[cfg(target_arch = "aarch64")]
            (Dtype::F64, Dtype::F16) => {
                map(source, target, |bytes| f16::from_f64(f64::from_le_bytes(bytes)).to_le_bytes());
            }
            // Aligned f32 values are used in place.
            (Dtype::F32, _) if let Ok(values) = <[f32]>::ref_from_bytes(source) => self.narrow(values, target, halves),
            (_, Dtype::F32) if let Ok(values) = <[f32]>::mut_from_bytes(target) => self.widen(source, values, halves),
            _ => {
                self.widen(source, values, halves);
                self.narrow(values, target, halves);
            }
        }
    }

    #[inline(always)]
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "casts round")]
    fn widen(self, source: &[u8], values: &mut [f32], halves: &mut [f16]) {
        match self.from {
            Dtype::Bool => load(source, values, |[byte]| f32::from(u8::from(byte != 0))),
            Dtype::U8 => load(source, values, |[byte]| f32::from(byte)),
            Dtype::I8 => load(source, values, |bytes| f32::from(i8::from_le_bytes(bytes))),
            Dtype::U16 => load(source, values, |bytes| f32::from(u16::from_le_bytes(bytes))),
            Dtype::I16 => load(source, values, |bytes| f32::from(i16::from_le_bytes(bytes))),
            Dtype::U32 => load(source, values, |bytes| u32::from_le_bytes(bytes) as f32),
            Dtype::I32 => load(source, values, |bytes| i32::from_le_bytes(bytes) as f32),
            Dtype::U64 => load(source, values, |bytes| u64::from_le_bytes(bytes) as f32),
            Dtype::I64 => load(source, values, |bytes| i64::from_le_bytes(bytes) as f32),
            Dtype::F16 => {
                if let Ok(halves) = <[f16]>::ref_from_bytes(source) {
                    values_of(halves, values);
                } else {
                    load(source, halves, f16::from_le_bytes);
                    values_of(halves, values);
                }
            }
            Dtype::BF16 => load(source, values, |bytes| f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)),
            Dtype::F32 => load(source, values, |bytes| f32::from_bits(u32::from_le_bytes(bytes))),
            Dtype::F64 => load(source, values, |bytes| f64::from_le_bytes(bytes) as f32),
            Dtype::F8E4M3 => load(source, values, |[byte]| float8::E4M3_VALUES.of(byte)),
            Dtype::F8E5M2 => load(source, values, |[byte]| float8::E5M2_VALUES.of(byte)),
            Dtype::F8E4M3Fnuz => load(source, values, |[byte]| float8::E4M3_FNUZ_VALUES.of(byte)),
            Dtype::F8E5M2Fnuz => load(source, values, |[byte]| float8::E5M2_FNUZ_VALUES.of(byte)),
            Dtype::F8E8M0 => load(source, values, |[byte]| float8::E8M0_VALUES.of(byte)),
            // `Cast::new` rejects other dtypes.
            Dtype::C32 | Dtype::C64 | Dtype::C128 | Dtype::F4 | Dtype::F6E2M3 | Dtype::F6E3M2 => {}
        }
    }

    #[inline(always)]
    fn narrow(self, values: &[f32], target: &mut [u8], halves: &mut [f16]) {
        match self.to {
            Dtype::F16 => {
                if let Ok(halves) = <[f16]>::mut_from_bytes(target) {
                    halves_of(values, halves);
                } else {
                    halves_of(values, halves);
                    store(halves, target, f16::to_le_bytes);
                }
            }
            Dtype::BF16 => {
                let nan = if matches!(self.from, Dtype::F32 | Dtype::F64) { BF16_NAN_OF_VECTORS } else { BF16_NAN };
                store(values, target, |value| bf16_bits(value, nan).to_le_bytes());
            }
            Dtype::F32 => store(values, target, |value| value.to_bits().to_le_bytes()),
            Dtype::F64 => store(values, target, |value| f64::from(value).to_le_bytes()),
            Dtype::F8E4M3 => store(values, target, |value| [float8::E4M3.encode(value)]),
            Dtype::F8E5M2 => store(values, target, |value| [float8::E5M2.encode(value)]),
            Dtype::F8E4M3Fnuz => store(values, target, |value| [float8::E4M3_FNUZ.encode(value)]),
            Dtype::F8E5M2Fnuz => store(values, target, |value| [float8::E5M2_FNUZ.encode(value)]),
            Dtype::F8E8M0 => store(values, target, |value| [float8::encode_e8m0(value)]),
            // `Cast::new` rejects other dtypes.
            _ => {}
        }
    }
}

fn item_bytes(dtype: Dtype) -> usize {
    match dtype.bits() {
        8 => 1,
        16 => 2,
        32 => 4,
        _ => 8,
    }
}

/// Converts values to f16, up to the length of the shorter slice.
fn halves_of(values: &[f32], halves: &mut [f16]) {
    let count = values.len().min(halves.len());
    if let (Some(values), Some(halves)) = (values.get(..count), halves.get_mut(..count)) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("f16c") {
            // SAFETY: the processor has F16C, which implies AVX.
            return unsafe { f16c::encode(values, halves) };
        }
        halves.convert_from_f32_slice(values);
    }
}

/// Converts f16 values to f32, up to the length of the shorter slice.
fn values_of(halves: &[f16], values: &mut [f32]) {
    let count = values.len().min(halves.len());
    if let (Some(halves), Some(values)) = (halves.get(..count), values.get_mut(..count)) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("f16c") {
            // SAFETY: the processor has F16C, which implies AVX.
            return unsafe { f16c::decode(halves, values) };
        }
        halves.convert_to_f32_slice(values);
    }
}

#[inline(always)]
fn load<const BYTES: usize, T>(source: &[u8], values: &mut [T], read: impl Fn([u8; BYTES]) -> T) {
    for (bytes, value) in source.as_chunks().0.iter().zip(values) {
        *value = read(*bytes);
    }
}

#[inline(always)]
fn store<const BYTES: usize, T: Copy>(values: &[T], target: &mut [u8], write: impl Fn(T) -> [u8; BYTES]) {
    for (bytes, value) in target.as_chunks_mut().0.iter_mut().zip(values) {
        *bytes = write(*value);
    }
}

#[inline(always)]
fn map<const FROM: usize, const TO: usize>(source: &[u8], target: &mut [u8], convert: impl Fn([u8; FROM]) -> [u8; TO]) {
    for (from, to) in source.as_chunks().0.iter().zip(target.as_chunks_mut().0) {
        *to = convert(*from);
    }
}

/// Rounds to nearest, ties to even.
#[inline(always)]
fn bf16_bits(value: f32, nan: u16) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let [_, _, low, high] = rounded.to_le_bytes();
    if value.is_nan() { nan } else { u16::from_le_bytes([low, high]) }
}
