//! Panic guard of the FFI boundary, and the log.

use crate::error::{Error, Kind, Result};
use crate::options;
use crate::profile;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

/// Runs `work` and converts a panic to an error, since a panic that reaches C++ ends the process. Records errors in active
/// profiles.
pub(super) fn guard<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Error::new(Kind::Internal, format!("a bug in fst, please report it: {text}")))
    });
    result.inspect_err(profile::error)
}

/// Starts the log to stderr that `FST_LOG` requests. Rust programs install their own subscriber.
pub(super) fn start_log() -> Result<()> {
    static STARTED: OnceLock<()> = OnceLock::new();
    if STARTED.get().is_none()
        && let Some(level) = options::log_level_from_env()?
    {
        STARTED.get_or_init(|| {
            let subscriber =
                tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).with_ansi(false);
            // Another library in the process may have installed a subscriber, which then receives the events.
            if let Err(error) = subscriber.try_init() {
                tracing::debug!(%error, "another subscriber receives the log");
            }
        });
    }
    Ok(())
}
