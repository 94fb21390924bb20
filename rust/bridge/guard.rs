//! Panic guard of the FFI boundary, and the log.

use crate::error::{Error, Kind, Result};
use crate::options;
use crate::os::retry::Check;
use crate::os::sigint::Watch;
use crate::profile;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

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

/// Starts the log, and runs `work` as [`guard`] does.
pub(super) fn guard_with_log<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    guard(|| start_log().and_then(|()| work()))
}

/// Runs `work` as [`guard`] does, with a check that Ctrl-C makes fail.
pub(super) fn watched<T>(work: impl FnOnce(Check<'_>) -> Result<T>) -> Result<T> {
    let watch = Watch::begin();
    guard(|| work(&|| watch.check()))
}

/// Starts the log to stderr that `FST_LOG` requests. Rust programs install their own subscriber.
pub(super) fn start_log() -> Result<()> {
    static IS_STARTED: AtomicBool = AtomicBool::new(false);
    if !IS_STARTED.load(Ordering::Relaxed)
        && let Some(level) = options::log_level_from_env()?
        && !IS_STARTED.swap(true, Ordering::Relaxed)
    {
        // Other crates log whole requests, in which there may be secrets.
        let own = Targets::new().with_target(env!("CARGO_CRATE_NAME"), level);
        let lines = tracing_subscriber::fmt::layer().with_writer(|| Stderr).with_ansi(false);
        let subscriber = tracing_subscriber::registry().with(lines).with(own);
        // Another library in the process may have installed a subscriber, which then receives the events.
        if let Err(error) = subscriber.try_init() {
            tracing::debug!(%error, "another subscriber receives the log");
        }
    }
    Ok(())
}

/// Standard error without the lock of [`std::io::Stderr`], which a thread of the parent may hold at a fork. An event is
/// one write.
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(rustix::stdio::stderr(), text)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
