//! Compiles what is not Rust: the device kernels wherever there is an nvcc, and with the feature `tch` csrc/.

#[cfg(feature = "tch")]
#[path = "csrc/compile.rs"]
mod compile;
#[path = "csrc/environment.rs"]
mod environment;
#[path = "csrc/kernels/build.rs"]
mod kernels;
#[cfg(feature = "tch")]
#[path = "csrc/tch.rs"]
mod tch;

fn main() -> anyhow::Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(fst_kernels)");
    // The layer refers to the core by this name.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfst_core.so");
    if environment::is_linting() {
        kernels::build_nothing()?;
        #[cfg(feature = "tch")]
        tch::write_compile_commands()?;
        return Ok(());
    }
    kernels::build()?;
    #[cfg(feature = "tch")]
    tch::build()?;
    Ok(())
}
