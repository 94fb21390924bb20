//! Gives the library the name of the real driver.

fn main() {
    // The dynamic linker answers `dlopen("libcuda.so")` with a library already
    // in the process whose SONAME is that, so a test that opens this file first
    // decides which driver everybody else gets.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo:rerun-if-changed=build.rs");
}
