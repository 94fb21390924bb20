//! Compiles the device kernels wherever there is an nvcc.

#[path = "csrc/environment.rs"]
mod environment;
#[path = "csrc/kernels/build.rs"]
mod kernels;

fn main() -> anyhow::Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(fst_kernels)");
    // The layer refers to the core by this name.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfst_core.so");
    if environment::is_linting() {
        return kernels::build_nothing();
    }
    kernels::build()
}
