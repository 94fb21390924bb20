//! Vector registers of x86-64.

use std::arch::{asm, is_x86_feature_detected};

/// Overwrites the vector registers.
pub fn wipe_registers() {
    if !is_x86_feature_detected!("avx") {
        return;
    }
    // SAFETY: the CPU has the instruction, which changes registers only that a function may change.
    unsafe { asm!("vzeroall", clobber_abi("sysv64"), options(nomem, nostack, preserves_flags)) };
    // Code that is compiled for all CPUs uses these registers only in assembly, such as that of `memcpy`.
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: as above.
        unsafe {
            asm!(
                ".irp number, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31",
                "vpxord zmm\\number, zmm\\number, zmm\\number",
                ".endr",
                options(nomem, nostack, preserves_flags),
            );
        }
    }
}
