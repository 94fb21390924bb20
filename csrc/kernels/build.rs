//! Compiles the device kernels into one image for all GPUs, and into PTX for drivers that refuse the image. The library
//! embeds both. The cfg `fst_kernels` tells that they exist. Without nvcc, the library uses PyTorch's kernels instead.

use crate::environment::{is_release, out_dir, python};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Compute capabilities with machine code in the image of a release, so that drivers need not compile at the first load.
/// Devices of one generation share code: 8.0 also runs on 8.7, and 12.0 on 12.1.
const ARCHITECTURES: [u32; 8] = [75, 80, 86, 89, 90, 100, 110, 120];

/// Version of the PTX for older drivers, from CUDA 12.0. nvcc writes its own version, but this code has no instruction
/// that is newer: tests/python/kernels/test_image.py assembles it with the ptxas of CUDA 12.0.
const PTX_VERSION: &str = "8.0";

pub fn build() -> Result<()> {
    println!("cargo:rerun-if-changed=csrc/kernels");
    for name in ["CUDA_HOME", "CUDA_PATH", "PATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let Some(nvcc) = find_nvcc() else {
        println!(
            "cargo:warning=nvcc was not found; this build of fst has no device kernels and casts with PyTorch. Install \
             the nvidia packages of requirements/build.txt, or set CUDA_HOME"
        );
        return Ok(());
    };
    println!("cargo:rerun-if-changed={}", nvcc.display());
    let machine_code = if is_release() { &ARCHITECTURES[..] } else { &[] };
    let mut arguments: Vec<String> = ["-fatbin", "--threads=0", "-Xfatbin=-compress-all"].map(String::from).into();
    for architecture in machine_code {
        arguments.push(format!("-gencode=arch=compute_{architecture},code=sm_{architecture}"));
    }
    // Drivers compile PTX for devices that have no machine code in the image. Builds for tests have no other code.
    let [oldest, ..] = ARCHITECTURES;
    arguments.push(ptx_for(*machine_code.last().unwrap_or(&oldest)));
    compile(&nvcc, &arguments, &image()?)?;
    compile(&nvcc, &["-ptx".into(), ptx_for(oldest)], &ptx()?)?;
    let text = fs::read_to_string(ptx()?)?;
    let is_version = |line: &&str| line.starts_with(".version ");
    let version = text.lines().find(is_version).context("nvcc's PTX states no version")?;
    // The driver expects a terminating zero.
    fs::write(ptx()?, text.replacen(version, &format!(".version {PTX_VERSION}"), 1) + "\0")?;
    embed()
}

fn ptx_for(architecture: u32) -> String {
    format!("-gencode=arch=compute_{architecture},code=compute_{architecture}")
}

fn compile(nvcc: &Path, arguments: &[String], target: &Path) -> Result<()> {
    let mut compiler = Command::new(nvcc);
    compiler.args(["-std=c++17", "-O3"]).args(arguments).arg("csrc/kernels/kernels.cu").arg("-o").arg(target);
    let output = compiler.output().with_context(|| format!("cannot run {}", nvcc.display()))?;
    ensure!(
        output.status.success(),
        "nvcc failed; it needs a supported g++ (NVCC_CCBIN selects one):\n{compiler:?}\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Embeds empty files, for checks that link nothing.
pub fn build_nothing() -> Result<()> {
    fs::write(image()?, [])?;
    fs::write(ptx()?, [])?;
    embed()
}

fn image() -> Result<PathBuf> {
    Ok(out_dir()?.join("kernels.fatbin"))
}

fn ptx() -> Result<PathBuf> {
    Ok(out_dir()?.join("kernels.ptx"))
}

fn embed() -> Result<()> {
    println!("cargo:rustc-cfg=fst_kernels");
    println!("cargo:rustc-env=FST_KERNELS={}", image()?.display());
    println!("cargo:rustc-env=FST_KERNELS_PTX={}", ptx()?.display());
    Ok(())
}

/// Finds nvcc in the packages of the Python interpreter, in a CUDA toolkit, or on PATH, in this order.
fn find_nvcc() -> Option<PathBuf> {
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    let folders = env::var_os("PATH").map(|path| env::split_paths(&path).collect::<Vec<_>>()).unwrap_or_default();
    let candidates = packages().into_iter().chain(toolkits.map(|toolkit| toolkit.join("bin"))).chain(folders);
    candidates.map(|folder| folder.join("nvcc")).find(|nvcc| nvcc.is_file())
}

/// Returns the program directories of NVIDIA's CUDA 13 packages for Python. An interpreter that cannot run has none.
fn packages() -> Vec<PathBuf> {
    let script = "import importlib.util as u; s = u.find_spec('nvidia'); \
                  print(*(s.submodule_search_locations if s else []), sep='\\n')";
    let Ok(output) = Command::new(python()).args(["-c", script]).output() else {
        return Vec::new();
    };
    String::from_utf8_lossy(&output.stdout).lines().map(|root| Path::new(root).join("cu13/bin")).collect()
}
