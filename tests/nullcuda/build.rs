//! Sets the SONAME of the CUDA driver.

fn main() {
    // The dynamic linker resolves `dlopen("libcuda.so")` to a loaded library with this SONAME.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo:rerun-if-changed=build.rs");
}
