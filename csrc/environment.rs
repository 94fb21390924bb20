//! What cargo and the user tell the build scripts in environment variables.

use anyhow::{Context, Result};
use std::env;
use std::path::PathBuf;

/// Returns the Python interpreter whose packages to build with: the one that `FST_PYTHON` names, `python3` by default.
pub fn python() -> String {
    for name in ["FST_PYTHON", "PYTHONPATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    env::var("FST_PYTHON").unwrap_or_else(|_| "python3".into())
}

/// Returns the directory for the output of the build script.
pub fn out_dir() -> Result<PathBuf> {
    Ok(env::var_os("OUT_DIR").context("cargo sets OUT_DIR")?.into())
}

/// Whether the profile inherits from `release`.
pub fn is_release() -> bool {
    env::var_os("PROFILE").is_some_and(|profile| profile == "release")
}

/// Whether this is a build for Clippy, which links nothing and so needs nothing compiled. Cargo keeps its build scripts
/// apart from other builds.
pub fn is_linting() -> bool {
    let wrapper = env::var_os("RUSTC_WORKSPACE_WRAPPER").map(PathBuf::from);
    wrapper.is_some_and(|path| path.file_stem().is_some_and(|name| name == "clippy-driver"))
}
