//! Compiles what is not Rust: the device kernels wherever there is an nvcc, and with the feature `torch` csrc/.

#[path = "csrc/kernels/build.rs"]
mod kernels;
#[cfg(feature = "torch")]
#[path = "csrc/build.rs"]
mod torch;

fn main() -> anyhow::Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(fst_kernels)");
    if is_linting() {
        kernels::build_nothing()?;
        #[cfg(feature = "torch")]
        torch::write_compile_commands()?;
        return Ok(());
    }
    kernels::build()?;
    #[cfg(feature = "torch")]
    torch::build()?;
    Ok(())
}

/// Whether this is a build for Clippy, which links nothing and so needs nothing compiled. Cargo keeps its build scripts
/// apart from those of other builds.
fn is_linting() -> bool {
    let wrapper = std::env::var_os("RUSTC_WORKSPACE_WRAPPER").map(std::path::PathBuf::from);
    wrapper.is_some_and(|path| path.file_stem().is_some_and(|name| name == "clippy-driver"))
}

/// The interpreter whose packages to build with.
fn python() -> String {
    for name in ["FST_PYTHON", "PYTHONPATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    std::env::var("FST_PYTHON").unwrap_or_else(|_| "python3".into())
}
