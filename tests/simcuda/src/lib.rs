//! A CUDA driver without a GPU, for tests.
//!
//! A test opens this library before anything opens `libcuda.so` and so takes
//! the place of the real driver (see `build.rs`). It exports the entry points
//! that fst calls, with the real ABI, and beside them a control interface, the
//! functions `sim_*`.
//!
//! It behaves like a real driver where that is inconvenient:
//!
//! - Work is queued and runs later, on one thread per stream, after random but
//!   seeded delays. Only order within a stream, events and waits hold it back.
//! - Device memory has addresses that fault when host code touches them, and is
//!   full of poison when it is new.
//! - Calls fail where a test asks them to.
//!
//! And it looks for what a real driver lets pass: see [`abi::Kind`]. Where it
//! can, it decides from the *order of the calls* and not from how the threads
//! happened to run, so that a missing wait is found in every run and not in one
//! of a hundred. It writes violations down and never stops the program.
//!
//! It is stricter than CUDA in three places. The default stream does not wait
//! for other streams, and they do not wait for it. A copy from pageable memory
//! is as asynchronous as any other. Memory registered in one context is pinned
//! in another one only if it was registered as portable.
//!
//! How a call travels: [`api`] and [`control`] turn C arguments into a call of
//! a method of [`driver::Driver`], which stands behind one lock; those methods
//! live beside the thing that they are about ([`context`], [`stream`],
//! [`event`], [`memory`], [`host`], [`copy`], [`fetch`], [`module`], [`launch`]).
//!
//! The kernels of fst run, too: their code is compiled for the host
//! (`kernels.cpp`), and a launch runs it for every thread. What the launch may
//! touch stands in its table of tasks, which is known when it is queued.

pub mod abi;
pub mod api;
pub mod clock;
pub mod context;
pub mod control;
pub mod copy;
pub mod driver;
pub mod event;
pub mod fault;
pub mod fetch;
pub mod host;
pub mod launch;
pub mod memory;
pub mod module;
pub mod random;
pub mod region;
pub mod stream;
