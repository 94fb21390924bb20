//! Tests on the simulated CUDA driver, and of other state that a process has once. They run one at a time
//! ([`sim::exclusive`]), in another process than those in `main.rs`, which run in parallel.
#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used, clippy::expect_used)]
#![allow(clippy::cast_possible_truncation)]

mod background;
mod convert_on_gpu;
mod dequantize_on_gpu;
mod driver_calls;
mod experiments;
mod forks;
mod gds;
mod gpu_load;
mod host_load;
mod interrupts;
mod kernels;
mod load_failures;
mod model;
mod pipeline;
mod profile;
mod save_from_gpu;
mod sigint;
mod sim;
mod sim_driver;
#[allow(dead_code, reason = "each test program uses its own part of this")]
mod smaps;
mod stream;
