//! Builds the layer for one PyTorch. It needs the headers of PyTorch, and neither its libraries nor the core: the
//! linker gets empty libraries with the same names.

mod compile;
mod environment;

use anyhow::{Context, Result, ensure};
use compile::{TORCH_LIBRARIES, Torch};
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() -> Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    // Clippy finds nothing here to check, and must not need PyTorch.
    if environment::is_linting() {
        return Ok(());
    }
    let torch = Torch::find()?;
    let out = environment::out_dir()?;
    // Apart from the empty libraries, because fst-tch searches this directory.
    let archives = out.join("archives");
    println!("cargo:archives={}", archives.display());
    let mut compiler = compile::compiler("..", &torch, &compile::BRIDGES)?;
    compiler.files(compile::units("..")?);
    compiler.out_dir(&archives).cargo_metadata(false).compile("fst_torch");
    // Programs in Rust have this file from cxx.
    let cxx_h = PathBuf::from(env::var_os("DEP_CXXBRIDGE1_HEADER").context("cxx does not report its header")?);
    let mut compiler = cc::Build::new();
    compiler.cpp(true).std("c++20").debug(false).file(cxx_h.with_file_name("../src/cxx.cc"));
    compiler.out_dir(&archives).cargo_metadata(false).compile("fst_cxx");

    // Static initializers register the operators. The linker would drop them, since no symbol refers to them.
    println!("cargo:rustc-link-arg=-L{}", archives.display());
    println!("cargo:rustc-link-arg=-Wl,--whole-archive,-lfst_torch,--no-whole-archive,-lfst_cxx");
    println!("cargo:rustc-link-arg=-L{}", out.display());
    // Without symbols, none of these would count as needed.
    println!("cargo:rustc-link-arg=-Wl,--no-as-needed");
    for name in TORCH_LIBRARIES.into_iter().chain(["fst_core"]) {
        link_empty(name, &out)?;
        println!("cargo:rustc-link-arg=-l{name}");
    }
    // What g++ links. rustc names libc before the layer, and not libgcc, which has atomic operations of 64-bit Arm.
    for name in ["stdc++", "gcc", "c"] {
        println!("cargo:rustc-link-arg=-l{name}");
    }
    // The name under which the package has the layer.
    println!("cargo:rustc-link-arg=-Wl,-soname,libfst_torch_{}.so", release_of(&torch)?);
    // The core is in the directory of the layer. Programs have loaded PyTorch.
    println!("cargo:rustc-link-arg=-Wl,-rpath,$ORIGIN");
    Ok(())
}

/// The minor release of a PyTorch, such as "2.11".
fn release_of(torch: &Torch) -> Result<String> {
    let version = torch.root.join("version.py");
    let text = fs::read_to_string(&version)?;
    let release = text.lines().find_map(|line| {
        let mut parts = line.strip_prefix("__version__ = '")?.split('.');
        Some(format!("{}.{}", parts.next()?, parts.next()?))
    });
    release.with_context(|| format!("{} does not state the release of PyTorch", version.display()))
}

/// Links the library `lib{name}.so` without symbols, which makes the layer load the real one.
fn link_empty(name: &str, out: &Path) -> Result<()> {
    let file = format!("lib{name}.so");
    let mut linker = cc::Build::new().get_compiler().to_command();
    linker.args(["-shared", "-nostdlib", "-x", "c", "/dev/null"]).arg(format!("-Wl,-soname,{file}"));
    let status = linker.arg("-o").arg(out.join(&file)).status().context("cannot run the C compiler")?;
    ensure!(status.success(), "{linker:?} failed");
    Ok(())
}
