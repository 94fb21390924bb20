//! A CUDA driver without a GPU, for tests. `docs/decisions/testing-without-a-gpu.md` lists what it checks.
//!
//! A test opens this library before any code opens `libcuda.so`. The library then replaces the real driver (see
//! `build.rs`). It exports the entry points that fst calls, with the ABI of CUDA, and a control interface, the functions
//! `sim_*`.
//!
//! Where possible, a check depends on the *order of the calls* and not on the timing of the threads, so that every run
//! detects a missing wait. Violations, listed in [`abi::Kind`], are recorded and never stop the program.
//!
//! The simulator is stricter than CUDA in three respects. The default stream does not synchronize with other streams. A
//! copy from pageable memory is as asynchronous as any other copy. Memory registered in one context is pinned in another
//! context only if it was registered as portable.
//!
//! [`api`] and [`control`] convert C arguments and call methods of [`driver::Driver`], which is protected by one lock.
//! Each method is defined in the module of its subject.

pub mod abi;
pub mod api;
pub mod capture;
pub mod clock;
pub mod context;
pub mod control;
pub mod copy_to_device;
pub mod copy_to_host;
pub mod driver;
pub mod event;
pub mod fault;
pub mod host;
pub mod launch;
mod matrices;
pub mod memory;
pub mod module;
pub mod random;
pub mod region;
pub mod stream;
mod task;
