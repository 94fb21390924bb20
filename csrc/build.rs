//! Compiles csrc/ and the cxx bridges against PyTorch. `FST_PYTHON` names the Python interpreter that has it, `python3`
//! by default.

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, iter};

const SOURCES: [&str; 16] = [
    "csrc/cast.cpp",
    "csrc/checkpoint.cpp",
    "csrc/cipher.cpp",
    "csrc/dtype_rules.cpp",
    "csrc/encryption_key.cpp",
    "csrc/error.cpp",
    "csrc/group.cpp",
    "csrc/load.cpp",
    "csrc/loader.cpp",
    "csrc/ops.cpp",
    "csrc/save.cpp",
    "csrc/select.cpp",
    "csrc/source.cpp",
    "csrc/transfer.cpp",
    "csrc/views.cpp",
    "csrc/writer.cpp",
];

/// Compiles and links the C++ code.
pub fn build() -> Result<()> {
    let torch = Torch::find()?;
    let libraries = torch.root.join("lib");
    if cfg!(feature = "tch") {
        check_tch(&libraries)?;
    }
    let mut compiler = compiler(&torch);
    // Static initializers register the operators. The linker would drop them, since no symbol refers to them.
    compiler.link_lib_modifier("+whole-archive");
    compiler.compile("fst_torch");

    println!("cargo:rustc-link-search=native={}", libraries.display());
    // Build scripts of dependents read this value from DEP_FST_TORCH_LIB.
    println!("cargo:torch_lib={}", libraries.display());
    // No symbol refers to libtorch, but it loads libtorch_cuda in programs without Python.
    println!("cargo:rustc-link-arg=-Wl,--no-as-needed");
    for library in ["torch", "torch_cpu", "c10"] {
        println!("cargo:rustc-link-lib=dylib={library}");
    }
    if cfg!(feature = "tch") {
        // Lets the tests and examples of this package find PyTorch's libraries.
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", libraries.display());
    }
    // Programs linked with the library refer to it by this name, not by its path at that time.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfst.so");
    Ok(())
}

/// Writes `compile_commands.json` for clang-tidy, and the headers of the cxx bridges that it needs, to cargo's target
/// directory. Compiles nothing.
pub fn write_compile_commands() -> Result<()> {
    let compiler = compiler(&Torch::find()?);
    let out = PathBuf::from(env::var_os("OUT_DIR").context("cargo sets OUT_DIR")?);
    // OUT_DIR is TARGET/PROFILE/build/PACKAGE/out.
    let target = out.ancestors().nth(4).context("OUT_DIR is not in a target directory")?;
    let directory = env::current_dir()?;
    let command = compiler.try_get_compiler()?.to_command();
    let words: Vec<_> = iter::once(command.get_program()).chain(command.get_args()).collect();
    // The debug format of a string is JSON, as long as the string has no control characters.
    let words: Vec<_> = words.into_iter().map(|word| format!("{:?}", word.to_string_lossy())).collect();
    let entry = |source: &Path| {
        format!(
            "{{\"directory\": {directory:?}, \"file\": {source:?}, \"arguments\": [{}, \"-c\", {source:?}]}}",
            words.join(", ")
        )
    };
    // clang-tidy infers the commands of files that are not in the database from those that are.
    let sources = compiler.get_files().filter(|source| source.starts_with("csrc"));
    let entries: Vec<_> = sources.map(entry).collect();
    fs::write(target.join("compile_commands.json"), format!("[\n{}\n]\n", entries.join(",\n")))?;
    Ok(())
}

fn compiler(torch: &Torch) -> cc::Build {
    let mut bridges = vec!["rust/bridge.rs"];
    let mut sources = SOURCES.to_vec();
    if cfg!(feature = "tch") {
        bridges.push("rust/tch.rs");
        sources.push("csrc/tch.cpp");
    }
    let mut compiler = cxx_build::bridges(&bridges);
    compiler.files(sources).include("torch_ext/fst/include");
    for include in ["include", "include/torch/csrc/api/include"] {
        compiler.flag("-isystem").flag(torch.root.join(include).to_string_lossy().as_ref());
    }
    let version = concat!("\"", env!("CARGO_PKG_VERSION"), "\"");
    compiler.define("FST_VERSION", version).define("_GLIBCXX_USE_CXX11_ABI", torch.cxx11_abi.as_str());
    // PyTorch's headers have used C++20 since 2.15.
    compiler.std("c++20").debug(false);
    compiler.warnings(true).extra_warnings(true).flag("-Wpedantic");
    // Warnings are errors for developers. A release builds also with a compiler that warns of more.
    compiler.warnings_into_errors(env::var("PROFILE").is_ok_and(|profile| profile == "debug"));
    // GCC 12 reports overflows in inlined code of PyTorch, where there are none.
    compiler.flag_if_supported("-Wno-stringop-overflow");
    for path in bridges.into_iter().chain(["csrc", "torch_ext/fst/include"]) {
        println!("cargo:rerun-if-changed={path}");
    }
    compiler
}

/// Checks that tch is built for the same PyTorch. tch and fst exchange tensors.
fn check_tch(libraries: &Path) -> Result<()> {
    let torch_of_tch = env::var_os("DEP_TCH_LIBTORCH_LIB").context("torch-sys does not report its PyTorch")?;
    ensure!(
        fs::canonicalize(&torch_of_tch)? == fs::canonicalize(libraries)?,
        "tch is built for the PyTorch in {}, but fst for the one in {}; activate one environment for both, set \
         LIBTORCH_USE_PYTORCH=1, and leave LIBTORCH and FST_PYTHON unset",
        torch_of_tch.display(),
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
        // Rebuilds for another version in the same directory.
        println!("cargo:rerun-if-changed={}", Path::new(root).join("version.py").display());
        Ok(Torch { root: root.into(), cxx11_abi })
    }
}
