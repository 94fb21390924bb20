//! Compiles what is not Rust: the device kernels wherever there is an nvcc, and with the feature `tch` csrc/.

#[cfg(feature = "tch")]
#[path = "csrc/compile.rs"]
mod compile;
#[path = "csrc/kernels/build.rs"]
mod kernels;
#[path = "csrc/python.rs"]
mod python;
#[cfg(feature = "tch")]
#[path = "csrc/tch.rs"]
mod tch;

fn main() -> anyhow::Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(fst_kernels)");
    // The layer refers to the core by this name.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfst_core.so");
    if is_linting() {
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

/// Whether this is a build for Clippy, which links nothing and so needs nothing compiled. Cargo keeps its build scripts
/// apart from those of other builds.
fn is_linting() -> bool {
    let wrapper = std::env::var_os("RUSTC_WORKSPACE_WRAPPER").map(std::path::PathBuf::from);
    wrapper.is_some_and(|path| path.file_stem().is_some_and(|name| name == "clippy-driver"))
}
