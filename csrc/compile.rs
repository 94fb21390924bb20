//! Compiles csrc/ and the cxx bridges against PyTorch.

use crate::environment::{is_linting, is_release, out_dir, python};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Bridges to the core.
pub const BRIDGES: [&str; 2] = ["rust/bridge.rs", "rust/bridge/types.rs"];

/// Files of the layer.
pub const SOURCES: [&str; 25] = [
    "csrc/cast.cpp",
    "csrc/change.cpp",
    "csrc/checkpoint.cpp",
    "csrc/classes.cpp",
    "csrc/delta.cpp",
    "csrc/dequantize.cpp",
    "csrc/encryption_key.cpp",
    "csrc/error.cpp",
    "csrc/load.cpp",
    "csrc/loader.cpp",
    "csrc/memory.cpp",
    "csrc/memory_streams.cpp",
    "csrc/ops.cpp",
    "csrc/ranks_load.cpp",
    "csrc/ranks_save.cpp",
    "csrc/recipe.cpp",
    "csrc/save.cpp",
    "csrc/select.cpp",
    "csrc/source.cpp",
    "csrc/tensors.cpp",
    "csrc/transfer.cpp",
    "csrc/update.cpp",
    "csrc/version.cpp",
    "csrc/views.cpp",
    "csrc/writer.cpp",
];

/// Libraries of PyTorch that the layer links. No symbol refers to libtorch, but it loads libtorch_cuda in programs
/// without Python.
pub const TORCH_LIBRARIES: [&str; 3] = ["torch", "torch_cpu", "c10"];

/// An installed PyTorch, or its headers.
pub struct Torch {
    /// The directory of its Python package.
    pub root: PathBuf,
}

impl Torch {
    /// Finds the PyTorch in the directory `FST_TORCH`, or the one of the Python interpreter if the variable is not set.
    pub fn find() -> Result<Torch> {
        println!("cargo:rerun-if-env-changed=FST_TORCH");
        let root = env::var_os("FST_TORCH").map_or_else(Self::of_python, |root| Ok(root.into()))?;
        let version = root.join("version.py");
        ensure!(version.is_file(), "{} is not the directory of a PyTorch", root.display());
        // Rebuilds for another version in the same directory.
        println!("cargo:rerun-if-changed={}", version.display());
        Ok(Torch { root })
    }

    fn of_python() -> Result<PathBuf> {
        let python = python();
        let script = "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0])";
        let output = Command::new(&python)
            .args(["-c", script])
            .output()
            .with_context(|| format!("cannot run {python}; set FST_PYTHON to a Python that has PyTorch"))?;
        ensure!(
            output.status.success(),
            "{python} has no PyTorch; set FST_PYTHON to a Python that has one:\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?.trim_end().into())
    }
}

/// Returns the compiler for C++ files that include the headers of the `bridges`, which it compiles, too. `checkout` is
/// the path from the package to the root of the checkout.
pub fn compiler(checkout: &str, torch: &Torch, bridges: &[&str]) -> Result<cc::Build> {
    let checkout = Path::new(checkout);
    // C++ includes "fst/rust/bridge.rs.h" in either package.
    cxx_build::CFG.include_prefix = "fst";
    let mut compiler = cxx_build::bridges(bridges.iter().map(|bridge| checkout.join(bridge)));
    compiler.include(checkout.join("torch_ext/fst/include"));
    for include in ["include", "include/torch/csrc/api/include"] {
        compiler.flag("-isystem").flag(torch.root.join(include).to_string_lossy().as_ref());
    }
    let version = concat!("\"", env!("CARGO_PKG_VERSION"), "\"");
    // Every PyTorch that has what fst calls is built with the C++11 ABI of libstdc++.
    compiler.define("FST_VERSION", version).define("_GLIBCXX_USE_CXX11_ABI", "1");
    // As PyTorch's own libraries are built. Otherwise assertions in its headers reject arguments with INTERNAL ASSERT FAILED
    // before fst sees them, and are checked in each call.
    compiler.define("NDEBUG", None);
    // PyTorch's headers have used C++20 since 2.15.
    compiler.std("c++20").debug(false);
    // Level 3 would take 7 s of CPU time more for each PyTorch. The layer has no loops over data.
    if is_release() {
        compiler.opt_level(2);
    }
    compiler.warnings(true).extra_warnings(true).flag("-Wpedantic");
    // Warnings are errors for developers. A release builds also with a compiler that warns of more.
    compiler.warnings_into_errors(!is_release());
    // GCC 12 reports overflows in inlined code of PyTorch, where there are none.
    compiler.flag_if_supported("-Wno-stringop-overflow");
    // Messages name PyTorch's files in every build alike.
    compiler.flag(format!("-ffile-prefix-map={}=torch", torch.root.display()));
    for path in bridges.iter().copied().chain(["csrc", "torch_ext/fst/include"]) {
        println!("cargo:rerun-if-changed={}", checkout.join(path).display());
    }
    Ok(compiler)
}

/// Writes the files that are compiled. PyTorch's headers take 12 s for each file that includes them. A release has one file,
/// because the core is compiled at the same time, and clang-tidy reads one. For development there are two, so that a changed
/// line waits for half of the layer.
pub fn units(checkout: &str) -> Result<Vec<PathBuf>> {
    let checkout = fs::canonicalize(checkout)?;
    let write = |(index, sources): (usize, &[&str])| {
        let lines = sources.iter().map(|source| format!("#include {:?}\n", checkout.join(source)));
        let file = out_dir()?.join(format!("csrc_{index}.cpp"));
        fs::write(&file, lines.collect::<String>())?;
        Ok(file)
    };
    let count = if is_release() || is_linting() { 1 } else { 2 };
    SOURCES.chunks(SOURCES.len().div_ceil(count)).enumerate().map(write).collect()
}
