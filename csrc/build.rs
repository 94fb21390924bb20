//! Compiles csrc/ and the cxx border against the PyTorch of the interpreter that `FST_PYTHON` names (`python3` by
//! default).

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const SOURCES: [&str; 14] = [
    "csrc/checkpoint.cpp",
    "csrc/convert.cpp",
    "csrc/converter.cpp",
    "csrc/elements.cpp",
    "csrc/error.cpp",
    "csrc/filler.cpp",
    "csrc/group.cpp",
    "csrc/load.cpp",
    "csrc/loader.cpp",
    "csrc/ops.cpp",
    "csrc/save.cpp",
    "csrc/select.cpp",
    "csrc/views.cpp",
    "csrc/writer.cpp",
];

pub fn build() -> Result<()> {
    let torch = Torch::find()?;
    let libraries = torch.root.join("lib");
    let with_tch = cfg!(feature = "tch");
    let mut borders = vec!["rust/bridge.rs"];
    if with_tch {
        check_tch(&libraries)?;
        borders.push("rust/tch.rs");
    }
    let mut compiler = cxx_build::bridges(&borders);
    compiler
        .files(SOURCES)
        .include(torch.root.join("include"))
        .flag("-isystem")
        .flag(torch.root.join("include/torch/csrc/api/include").to_string_lossy().as_ref());
    if with_tch {
        compiler.file("csrc/tch.cpp").include("torch_ext/fst/include");
    }
    // PyTorch's headers have used C++20 since 2.15.
    let version = concat!("\"", env!("CARGO_PKG_VERSION"), "\"");
    compiler.define("FST_VERSION", version).define("_GLIBCXX_USE_CXX11_ABI", torch.cxx11_abi.as_str());
    compiler.std("c++20").warnings(false).debug(false);
    // The operators register themselves when the library is loaded; no symbol asks for them by name.
    compiler.link_lib_modifier("+whole-archive");
    compiler.compile("fst_torch");

    println!("cargo:rustc-link-search=native={}", libraries.display());
    // The build script of a program finds it in DEP_FST_TORCH_LIB.
    println!("cargo:torch_lib={}", libraries.display());
    // libtorch has no symbols of its own, but brings libtorch_cuda into a program without Python.
    println!("cargo:rustc-link-arg=-Wl,--no-as-needed");
    for library in ["torch", "torch_cpu", "c10"] {
        println!("cargo:rustc-link-lib=dylib={library}");
    }
    if with_tch {
        // The tests and examples of this package run where they were built.
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", libraries.display());
    }
    // A program that is linked with the library asks for it by this name, wherever it lay then.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfst.so");
    for path in borders.into_iter().chain(["csrc", "torch_ext/fst/include"]) {
        println!("cargo:rerun-if-changed={path}");
    }
    Ok(())
}

/// tch and fst exchange tensors, so they must be built for one PyTorch.
fn check_tch(libraries: &Path) -> Result<()> {
    let theirs = env::var_os("DEP_TCH_LIBTORCH_LIB").context("torch-sys does not say which PyTorch it found")?;
    ensure!(
        fs::canonicalize(&theirs)? == fs::canonicalize(libraries)?,
        "tch is built for the PyTorch in {}, but fst for the one in {}; activate one environment for both, set \
         LIBTORCH_USE_PYTORCH=1, and leave LIBTORCH and FST_PYTHON unset",
        theirs.display(),
        libraries.display()
    );
    Ok(())
}

struct Torch {
    root: PathBuf,
    cxx11_abi: String,
}

impl Torch {
    fn find() -> Result<Torch> {
        let python = crate::python();
        let script = "import os, torch; print(os.path.dirname(torch.__file__)); \
                      print(int(torch.compiled_with_cxx11_abi())); print(torch.__version__)";
        let output = Command::new(&python)
            .args(["-c", script])
            .output()
            .with_context(|| format!("cannot run {python}; set FST_PYTHON to a Python that has PyTorch"))?;
        ensure!(
            output.status.success(),
            "{python} cannot import torch; set FST_PYTHON to a Python that has PyTorch:\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let text = String::from_utf8(output.stdout)?;
        let mut lines = text.lines();
        let root = lines.next().context("torch has no path")?;
        let cxx11_abi = lines.next().context("torch has no ABI")?.to_owned();
        // Another version in the same place must build anew.
        println!("cargo:rerun-if-changed={}", Path::new(root).join("version.py").display());
        Ok(Torch { root: root.into(), cxx11_abi })
    }
}
