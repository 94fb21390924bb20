//! Tests of the core without PyTorch and without a GPU.
#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used, clippy::expect_used)]
#![allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)]
#![allow(clippy::cast_precision_loss)]

#[cfg(feature = "remote")]
mod aws_profile;
mod cast;
mod cast_batch;
mod checkpoint;
mod checkpoint_save;
mod conformance;
mod delta;
mod digest_groups;
mod digests;
mod dtype;
mod dtype_rules;
mod encryption;
mod files;
mod header;
mod host_load;
mod layout;
mod leases;
mod memory;
mod mesh;
#[cfg(feature = "remote")]
mod names;
mod options;
mod page_cache;
mod plan;
mod quantized;
mod ranks;
mod read_ahead;
mod recipe;
#[cfg(feature = "remote")]
mod remote;
#[cfg(feature = "remote")]
mod replaced_files;
mod requests;
mod save;
mod save_plan;
mod scatter;
mod scripted_kernel;
mod selection;
mod shared_slot;
mod signatures;
mod smaps;
mod tensors_format;
mod uring;
mod views;
mod windows;
