//! Sets the SONAME of the CUDA driver, and compiles the code of the device kernels for the host.

fn main() {
    // The dynamic linker resolves `dlopen("libcuda.so")` to a loaded library with
    // this SONAME. A test that opens the simulator first therefore replaces the
    // driver for the whole process.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .warnings(true)
        .extra_warnings(true)
        .opt_level(2)
        // `#pragma unroll` is for nvcc.
        .flag("-Wno-unknown-pragmas")
        // An unknown dtype leaves values unset; a launch with an unknown dtype is rejected.
        .flag("-Wno-maybe-uninitialized")
        .include("../../csrc")
        .file("src/kernels.cpp")
        .compile("fst_sim_kernels");
    for path in ["build.rs", "src/kernels.cpp", "../../csrc/kernels"] {
        println!("cargo:rerun-if-changed={path}");
    }
}
