//! Links the C++ layer into the library.

#[path = "../../csrc/compile.rs"]
mod compile;
#[path = "../../csrc/environment.rs"]
mod environment;

use anyhow::{Context, Result, ensure};
use compile::{BRIDGES, TORCH_LIBRARIES, Torch, units};
use environment::out_dir;
use std::path::{Path, PathBuf};
use std::{env, fs, iter};

const CHECKOUT: &str = "../..";
/// Calls operators for this crate. It needs the bridge of this crate, so it is compiled apart.
const TCH: &str = "../../csrc/tch.cpp";
const BRIDGE: &str = "rust/tch/lib.rs";

fn main() -> Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    if environment::is_linting() { write_compile_commands() } else { build() }
}

fn compiler(torch: &Torch, bridges: &[&str]) -> Result<cc::Build> {
    let mut compiler = compile::compiler(CHECKOUT, torch, bridges)?;
    compiler.include("../../csrc");
    Ok(compiler)
}

fn build() -> Result<()> {
    let torch = Torch::find()?;
    let libraries = torch.root.join("lib");
    check_tch(&libraries)?;
    compiler(&torch, &[BRIDGE])?.file(TCH).compile("fst_tch");
    let archives = env::var("DEP_FST_OPERATORS_ARCHIVES").context("fst-operators does not report its archive")?;
    println!("cargo:rustc-link-search=native={archives}");
    // Static initializers register the operators. The linker would drop them, since no symbol refers to them.
    println!("cargo:rustc-link-lib=static:+whole-archive=fst_torch");

    println!("cargo:rustc-link-search=native={}", libraries.display());
    // Build scripts of dependents read this value from DEP_FST_TCH_TORCH_LIB.
    println!("cargo:torch_lib={}", libraries.display());
    println!("cargo:rustc-link-arg=-Wl,--no-as-needed");
    for library in TORCH_LIBRARIES {
        println!("cargo:rustc-link-lib=dylib={library}");
    }
    // Lets the tests and examples of this package find PyTorch's libraries.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", libraries.display());
    Ok(())
}

/// Writes `compile_commands.json` for clang-tidy, and the headers of the cxx bridges that it needs, to cargo's target
/// directory. Compiles nothing.
fn write_compile_commands() -> Result<()> {
    let compiler = compiler(&Torch::find()?, &[&BRIDGES[..], &[BRIDGE]].concat())?;
    let out = out_dir()?;
    // OUT_DIR is TARGET/PROFILE/build/PACKAGE/out.
    let target = out.ancestors().nth(4).context("OUT_DIR is not in a target directory")?;
    let directory = env::current_dir()?;
    let command = compiler.try_get_compiler()?.to_command();
    let words: Vec<_> = iter::once(command.get_program()).chain(command.get_args()).collect();
    // The debug format of a string is JSON, as long as the string has no control characters.
    let words: Vec<_> = words.into_iter().map(|word| format!("{:?}", word.to_string_lossy())).collect();
    let entry = |source: &PathBuf| {
        format!(
            "{{\"directory\": {directory:?}, \"file\": {source:?}, \"arguments\": [{}, \"-c\", {source:?}]}}",
            words.join(", ")
        )
    };
    // clang-tidy infers the commands of files that are not in the database, in tests/cpp and examples, from these.
    let entries: Vec<_> = units(CHECKOUT)?.iter().chain([&fs::canonicalize(TCH)?]).map(entry).collect();
    fs::write(target.join("compile_commands.json"), format!("[\n{}\n]\n", entries.join(",\n")))?;
    Ok(())
}

/// Checks that tch is built for the same PyTorch. tch and fst exchange tensors.
fn check_tch(libraries: &Path) -> Result<()> {
    let torch_of_tch = env::var_os("DEP_TCH_LIBTORCH_LIB").context("torch-sys does not report its PyTorch")?;
    ensure!(
        fs::canonicalize(&torch_of_tch)? == fs::canonicalize(libraries)?,
        "tch is built for the PyTorch in {}, but fst for the one in {}; activate one environment for both, set \
         LIBTORCH_USE_PYTORCH=1, and leave LIBTORCH, FST_TORCH and FST_PYTHON unset",
        torch_of_tch.display(),
        libraries.display()
    );
    Ok(())
}
