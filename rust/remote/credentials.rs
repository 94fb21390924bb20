//! Credentials of stores that `object_store` does not find itself.

pub mod aws_profile;
mod files;
pub mod ini;
pub mod process;
pub(super) mod redis;
pub mod refresh;
mod sso;
mod sts;
