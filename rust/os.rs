//! Operating-system services: threads, processes, signals, NUMA nodes, memory and file systems.

pub mod compute_pool;
pub mod file_lock;
pub mod file_system;
pub mod huge_pages;
pub mod lease;
pub mod local_file;
pub mod memory;
pub mod mutex;
pub mod numa;
pub mod per_process;
pub mod retry;
pub mod sigint;
pub mod threads;
