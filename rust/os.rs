//! Operating-system services: threads, signals, NUMA nodes and file systems.

pub mod compute_pool;
pub mod file_system;
pub mod numa;
pub mod sigint;
pub mod threads;
