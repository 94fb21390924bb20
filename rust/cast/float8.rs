//! The 8-bit floats: encoding by arithmetic that compiles to vectors, decoding by tables.

use crate::dtype::Float8;

/// A format of a sign, exponent bits and mantissa bits.
#[derive(Clone, Copy)]
pub struct Format {
    mantissa_bits: u32,
    bias: u32,
    /// f32 bits of the value that the first code without a finite number would have. From this magnitude on, values are
    /// out of range; below it, rounding decides.
    overflow: u32,
    specials: Specials,
}

/// Encoding of NaN and the infinities.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Specials {
    /// Infinities and NaN as in the wider formats.
    Ieee,
    /// All bits but the sign mean NaN, and infinities become it.
    FiniteAndNan,
    /// The only NaN has the code of negative zero, which the format lacks.
    Unsigned,
}

const F32_MANTISSA_BITS: u32 = 23;
const F32_BIAS: u32 = 127;
const F32_SIGN: u32 = 1 << 31;
const F32_INFINITY: u32 = 0x7f80_0000;
const F32_QUIET_NAN: u32 = 0x7fc0_0000;
/// PyTorch's value of the NaN of formats with only one NaN.
const F32_LONE_NAN: u32 = 0x7f80_0001;

pub const E4M3: Format = Format::new(Float8::E4M3, Specials::FiniteAndNan);
pub const E5M2: Format = Format::new(Float8::E5M2, Specials::Ieee);
pub const E4M3_FNUZ: Format = Format::new(Float8::E4M3_FNUZ, Specials::Unsigned);
pub const E5M2_FNUZ: Format = Format::new(Float8::E5M2_FNUZ, Specials::Unsigned);

impl Format {
    const fn new(layout: Float8, specials: Specials) -> Format {
        let Float8 { mantissa_bits, bias, finite_end } = layout;
        let rebias = (F32_BIAS - bias) << F32_MANTISSA_BITS;
        let overflow = (finite_end << (F32_MANTISSA_BITS - mantissa_bits)) + rebias;
        Format { mantissa_bits, bias, overflow, specials }
    }

    /// Rounds to nearest, ties to even. Values out of range become infinity or NaN; nothing saturates.
    #[inline(always)]
    pub fn encode(self, value: f32) -> u8 {
        let sign = value.to_bits() & F32_SIGN;
        let magnitude = value.to_bits() ^ sign;
        let shift = F32_MANTISSA_BITS - self.mantissa_bits;

        // Adding a power of two whose last bit has the weight of the format's smallest number rounds a value as the
        // format does below its normal range.
        let power = (F32_BIAS - self.bias + shift + 1) << F32_MANTISSA_BITS;
        let subnormal = (f32::from_bits(magnitude) + f32::from_bits(power)).to_bits().wrapping_sub(power);

        let half = (1 << (shift - 1)) - 1 + (magnitude >> shift & 1);
        let rebias = (F32_BIAS - self.bias) << F32_MANTISSA_BITS;
        let normal = magnitude.wrapping_sub(rebias).wrapping_add(half) >> shift;

        let is_subnormal = magnitude < (F32_BIAS - self.bias + 1) << F32_MANTISSA_BITS;
        let finite = if is_subnormal { subnormal } else { normal };
        let code = if magnitude < self.overflow { finite } else { self.overflow_code(magnitude) };
        let is_without_sign = self.specials == Specials::Unsigned && (code == 0 || code == 0x80);
        let [byte, ..] = (code | if is_without_sign { 0 } else { sign >> 24 }).to_le_bytes();
        byte
    }

    #[inline(always)]
    const fn overflow_code(self, magnitude: u32) -> u32 {
        match self.specials {
            Specials::Ieee => {
                if magnitude > F32_INFINITY {
                    0x7f
                } else {
                    0x7c
                }
            }
            Specials::FiniteAndNan => 0x7f,
            Specials::Unsigned => 0x80,
        }
    }

    /// Returns the f32 bits of a code.
    const fn decode(self, code: u32) -> u32 {
        let sign = (code & 0x80) << 24;
        let magnitude = code & 0x7f;
        let shift = F32_MANTISSA_BITS - self.mantissa_bits;
        let exponent = magnitude >> self.mantissa_bits;
        let mantissa = (magnitude & ((1 << self.mantissa_bits) - 1)) << shift;
        match self.specials {
            Specials::Unsigned if code == 0x80 => return F32_LONE_NAN,
            Specials::FiniteAndNan if magnitude == 0x7f => return sign | F32_QUIET_NAN | mantissa,
            Specials::Ieee if magnitude == 0x7c => return sign | F32_INFINITY,
            Specials::Ieee if magnitude > 0x7c => return sign | F32_QUIET_NAN | mantissa,
            _ => {}
        }
        if exponent != 0 {
            return sign | ((exponent + F32_BIAS - self.bias) << F32_MANTISSA_BITS) | mantissa;
        }
        if mantissa == 0 {
            return sign;
        }
        // The leading one of a subnormal number becomes f32's implicit bit.
        let lead = mantissa.leading_zeros() - (31 - F32_MANTISSA_BITS);
        let normal = mantissa << lead & ((1 << F32_MANTISSA_BITS) - 1);
        sign | ((F32_BIAS - self.bias + 1 - lead) << F32_MANTISSA_BITS) | normal
    }
}

/// Encodes as F8_E8M0: powers of two from 2^-127 to 2^127, and NaN. The sign is dropped, zero becomes 2^-127, and
/// values that round up to 2^128 become NaN.
#[inline(always)]
pub fn encode_e8m0(value: f32) -> u8 {
    let bits = value.to_bits();
    let exponent = bits >> F32_MANTISSA_BITS & 0xff;
    let mantissa = bits & ((1 << F32_MANTISSA_BITS) - 1);
    let half = 1 << (F32_MANTISSA_BITS - 1);
    // Ties go up, except from 2^-127, which is a subnormal f32.
    let is_up = exponent != 0xff && (mantissa > half || (mantissa == half && exponent != 0));
    let [byte, ..] = (exponent + u32::from(is_up)).to_le_bytes();
    byte
}

const fn decode_e8m0(code: u32) -> u32 {
    match code {
        0 => 1 << (F32_MANTISSA_BITS - 1),
        0xff => F32_LONE_NAN,
        _ => code << F32_MANTISSA_BITS,
    }
}

pub static E4M3_VALUES: Values = values(Some(E4M3));
pub static E5M2_VALUES: Values = values(Some(E5M2));
pub static E4M3_FNUZ_VALUES: Values = values(Some(E4M3_FNUZ));
pub static E5M2_FNUZ_VALUES: Values = values(Some(E5M2_FNUZ));
pub static E8M0_VALUES: Values = values(None);

/// f32 bits of all codes of a format.
pub struct Values([u32; 256]);

impl Values {
    /// Returns the value of a code.
    #[inline(always)]
    #[allow(clippy::indexing_slicing, reason = "the table has an entry for every byte")]
    pub fn of(&self, code: u8) -> f32 {
        f32::from_bits(self.0[usize::from(code)])
    }
}

#[allow(
    clippy::indexing_slicing,
    reason = "the loop ends at the last entry, and an out-of-range index in a constant does not compile"
)]
const fn values(format: Option<Format>) -> Values {
    let mut values = [0; 256];
    let mut code: u32 = 0;
    while code < 256 {
        values[code as usize] = match format {
            Some(format) => format.decode(code),
            None => decode_e8m0(code),
        };
        code += 1;
    }
    Values(values)
}
