//! Gives the library the name of the real driver, and compiles the device kernels' code for the host.

fn main() {
    // The dynamic linker answers `dlopen("libcuda.so")` with a library already
    // in the process whose SONAME is that, so a test that opens this file first
    // decides which driver everybody else gets.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .warnings(true)
        .extra_warnings(true)
        .opt_level(2)
        // `#pragma unroll` is for nvcc.
        .flag("-Wno-unknown-pragmas")
        // A dtype that stands in no list leaves values unset, but a launch with one is refused.
        .flag("-Wno-maybe-uninitialized")
        .include("../../csrc")
        .file("src/kernels.cpp")
        .compile("fst_sim_kernels");
    for path in ["build.rs", "src/kernels.cpp", "../../csrc/kernels"] {
        println!("cargo:rerun-if-changed={path}");
    }
}
