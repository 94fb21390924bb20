//! Dequantization and quantization that a check ends.

use fst::cast::matrix::Matrix;
use fst::cast::quantize::{Codes, Numbers};
use fst::cast::scheme::Scheme;
use fst::cast::{dequantize, quantize};
use fst::dtype::Dtype;
use fst::error::{Error, Kind, Result};
use std::sync::atomic::{AtomicUsize, Ordering};

const ROWS: usize = 4096;
const COLUMNS: usize = 1024;

/// Returns a check that fails from this call on.
fn failing_from(call: usize) -> impl Fn() -> Result<()> + Sync {
    let calls = AtomicUsize::new(0);
    move || {
        let is_early = calls.fetch_add(1, Ordering::Relaxed) < call;
        if is_early { Ok(()) } else { Err(Error::new(Kind::Interrupted, "enough")) }
    }
}

#[test]
fn failed_check_ends_dequantization_after_the_current_parts() {
    let codes = vec![1_u8; ROWS * COLUMNS];
    let scale = [1.0_f32];
    for threads in [1, 3] {
        let mut target = vec![0.0_f32; ROWS * COLUMNS];
        let matrix = Matrix {
            scheme: Scheme::Scale,
            from: Dtype::I8,
            scale_dtype: Dtype::F32,
            to: Dtype::F32,
            size: [ROWS as u64, COLUMNS as u64],
            begin: [0, 0],
            block: [0, 0],
            codes: codes.as_ptr().expose_provenance() as u64,
            code_strides: [COLUMNS as u64, 1],
            scales: scale.as_ptr().expose_provenance() as u64,
            scale_strides: [0, 0],
            global_scale: None,
            target: target.as_mut_ptr().expose_provenance() as u64,
            target_strides: [COLUMNS as u64 * 4, 4],
        };
        // SAFETY: the matrix is in memory of this test.
        let result = unsafe { dequantize::run(&[matrix], threads, &failing_from(3)) };
        assert_eq!(result.unwrap_err().kind(), Kind::Interrupted);
        let written = target.iter().filter(|&&number| number != 0.0).count();
        assert_eq!(written, 3 * (512 << 10));
    }
}

#[test]
fn failed_check_ends_quantization_in_both_passes() {
    let values = vec![3.0_f32; ROWS * COLUMNS];
    // Parts have 256 rows, and each pass has 16 of them.
    for (call, written) in [(3, 0), (16 + 3, 3 * (256 << 10))] {
        let mut codes = vec![0_u8; ROWS * COLUMNS];
        let mut scales = vec![0.0_f32; ROWS];
        let numbers = Numbers {
            to: Codes::I8,
            from: Dtype::F32,
            size: [ROWS as u64, COLUMNS as u64],
            first_row: 0,
            block: [1, 0],
            values: values.as_ptr().expose_provenance() as u64,
            strides: [COLUMNS as u64 * 4, 4],
            codes: codes.as_mut_ptr().expose_provenance() as u64,
            scales: scales.as_mut_ptr().expose_provenance() as u64,
        };
        // SAFETY: numbers, codes and scales are memory of this test.
        let result = unsafe { quantize::run(&[numbers], 2, &failing_from(call)) };
        assert_eq!(result.unwrap_err().kind(), Kind::Interrupted);
        assert_eq!(codes.iter().filter(|&&code| code != 0).count(), written);
    }
}
