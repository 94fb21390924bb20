//! Compiles what is not Rust: the device kernels wherever there is an nvcc, and with the feature `torch` csrc/.

#[path = "csrc/kernels/build.rs"]
mod kernels;
#[cfg(feature = "torch")]
#[path = "csrc/build.rs"]
mod torch;

fn main() -> anyhow::Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    kernels::build()?;
    #[cfg(feature = "torch")]
    torch::build()?;
    Ok(())
}

/// The interpreter whose packages to build with.
fn python() -> String {
    for name in ["FST_PYTHON", "PYTHONPATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    std::env::var("FST_PYTHON").unwrap_or_else(|_| "python3".into())
}
