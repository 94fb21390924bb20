//! Loads a checkpoint with fst in a Rust program, on the CPU or on a GPU:
//!
//! ```text
//! cargo run --package fst-tch --example load -- model.safetensors [cuda:0]
//! ```
//!
//! Prints name, dtype, shape and sum of each tensor as soon as it is ready, while the next ones load.

use anyhow::{Context, Result, bail};
use tch::{Device, Kind};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().context("usage: load CHECKPOINT [DEVICE]")?;
    let device = device(arguments.next().as_deref().unwrap_or("cpu"))?;
    for item in fst_tch::stream(&[path], device, None, None)? {
        let (name, tensor) = item?;
        match tensor.f_kind() {
            Ok(kind) => {
                let sum = tensor.sum(Kind::Double).double_value(&[]);
                println!("{name} {kind:?} {:?} sum {sum}", tensor.size());
            }
            Err(_) => println!("{name} has a dtype without a tch kind, {:?}", tensor.size()),
        }
    }
    Ok(())
}

fn device(text: &str) -> Result<Device> {
    Ok(match text.split_once(':') {
        None if text == "cpu" => Device::Cpu,
        None if text == "cuda" => Device::Cuda(0),
        Some(("cuda", index)) => Device::Cuda(index.parse()?),
        _ => bail!("{text} is not a device: pass cpu, cuda or cuda:N"),
    })
}
