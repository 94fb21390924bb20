//! Vector registers of x86-64.

/// Overwrites the vector registers.
pub fn wipe_registers() {
    if !std::arch::is_x86_feature_detected!("avx") {
        return;
    }
    // SAFETY: the CPU has the instruction, which changes these registers only.
    unsafe {
        std::arch::asm!(
            "vzeroall",
            out("xmm0") _,
            out("xmm1") _,
            out("xmm2") _,
            out("xmm3") _,
            out("xmm4") _,
            out("xmm5") _,
            out("xmm6") _,
            out("xmm7") _,
            out("xmm8") _,
            out("xmm9") _,
            out("xmm10") _,
            out("xmm11") _,
            out("xmm12") _,
            out("xmm13") _,
            out("xmm14") _,
            out("xmm15") _,
            options(nomem, nostack, preserves_flags),
        );
        // Code that is compiled for all CPUs uses these registers only in assembly, such as that of `memcpy`.
        if std::arch::is_x86_feature_detected!("avx512f") {
            std::arch::asm!(
                "vpxord zmm16, zmm16, zmm16",
                "vpxord zmm17, zmm17, zmm17",
                "vpxord zmm18, zmm18, zmm18",
                "vpxord zmm19, zmm19, zmm19",
                "vpxord zmm20, zmm20, zmm20",
                "vpxord zmm21, zmm21, zmm21",
                "vpxord zmm22, zmm22, zmm22",
                "vpxord zmm23, zmm23, zmm23",
                "vpxord zmm24, zmm24, zmm24",
                "vpxord zmm25, zmm25, zmm25",
                "vpxord zmm26, zmm26, zmm26",
                "vpxord zmm27, zmm27, zmm27",
                "vpxord zmm28, zmm28, zmm28",
                "vpxord zmm29, zmm29, zmm29",
                "vpxord zmm30, zmm30, zmm30",
                "vpxord zmm31, zmm31, zmm31",
                options(nomem, nostack, preserves_flags),
            );
        }
    }
}
