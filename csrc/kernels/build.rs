//! Compiles the device kernels into one image for all GPUs, which the library embeds. The cfg `fst_kernels` tells that
//! the image exists. Without nvcc, the library uses PyTorch's kernels instead.

use crate::environment::{out_dir, python};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Compute capabilities with machine code in the image of a release, so that drivers need not compile at the first load.
/// Devices of one generation share code: 8.0 also runs on 8.7, and 12.0 on 12.1.
const ARCHITECTURES: [u32; 8] = [75, 80, 86, 89, 90, 100, 110, 120];

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
    let image = image()?;
    let mut compiler = Command::new(&nvcc);
    compiler.args(["-fatbin", "-std=c++17", "-O3", "--threads=0", "-Xfatbin=-compress-all"]);
    let machine_code = if is_release() { &ARCHITECTURES[..] } else { &[] };
    for architecture in machine_code {
        compiler.arg(format!("-gencode=arch=compute_{architecture},code=sm_{architecture}"));
    }
    // Drivers compile PTX for devices that have no machine code in the image. Builds for tests have no other code.
    let ptx = machine_code.last().unwrap_or(&ARCHITECTURES[0]);
    compiler.arg(format!("-gencode=arch=compute_{ptx},code=compute_{ptx}"));
    compiler.arg("csrc/kernels/scatter.cu").arg("-o").arg(&image);
    let output = compiler.output().with_context(|| format!("cannot run {}", nvcc.display()))?;
    ensure!(
        output.status.success(),
        "nvcc failed; it needs a supported g++ (NVCC_CCBIN selects one):\n{compiler:?}\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    embed(&image);
    Ok(())
}

/// Embeds an empty image, for checks that link nothing.
pub fn build_nothing() -> Result<()> {
    let image = image()?;
    fs::write(&image, [])?;
    embed(&image);
    Ok(())
}

/// Whether the profile inherits from `release`.
fn is_release() -> bool {
    env::var_os("PROFILE").is_some_and(|profile| profile == "release")
}

fn image() -> Result<PathBuf> {
    Ok(out_dir()?.join("kernels.fatbin"))
}

fn embed(image: &Path) {
    println!("cargo:rustc-cfg=fst_kernels");
    println!("cargo:rustc-env=FST_KERNELS={}", image.display());
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
