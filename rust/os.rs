//! Operating-system services: threads, processes, signals, NUMA nodes and file systems.

pub mod compute_pool;
pub mod file_system;
pub mod numa;
pub mod per_process;
pub mod sigint;
pub mod threads;

use std::time::Duration;

/// Pause before an operation that failed with `EAGAIN` or `EBUSY` is repeated.
pub const BUSY_WAIT: Duration = Duration::from_millis(1);
