//! Ctrl-C in a process that has its own handler.

use crate::sim::exclusive;
use fst::error::Kind;
use fst::os::sigint::Watch;
use std::sync::atomic::{AtomicUsize, Ordering};

static CALLS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count(_: libc::c_int) {
    CALLS.fetch_add(1, Ordering::SeqCst);
}

pub fn handle_with(handler: libc::sighandler_t) {
    // SAFETY: the handlers of these tests only count.
    unsafe { libc::signal(libc::SIGINT, handler) };
}

pub fn handler() -> libc::sighandler_t {
    // SAFETY: without a new action the call only writes the current one.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGINT, std::ptr::null(), &raw mut action);
        action.sa_sigaction
    }
}

pub fn interrupt() {
    // SAFETY: the process has a handler for SIGINT.
    unsafe { libc::raise(libc::SIGINT) };
}

pub fn counting() -> libc::sighandler_t {
    let function: extern "C" fn(libc::c_int) = count;
    function as libc::sighandler_t
}

#[test]
fn a_watch_detects_the_signal_and_forwards_it() {
    let _lock = exclusive();
    handle_with(counting());
    let before = CALLS.load(Ordering::SeqCst);
    let outer = Watch::begin();
    let inner = Watch::begin();
    assert!(outer.check().is_ok());
    interrupt();
    assert_eq!(CALLS.load(Ordering::SeqCst), before + 1);
    assert_eq!(outer.check().unwrap_err().kind(), Kind::Interrupted);
    assert_eq!(inner.check().unwrap_err().kind(), Kind::Interrupted);
    // The signal does not affect a load that begins later.
    assert!(Watch::begin().check().is_ok());
    drop(outer);
    assert_ne!(handler(), counting());
    drop(inner);
    assert_eq!(handler(), counting());
    handle_with(libc::SIG_DFL);
}

#[test]
fn a_program_without_a_handler_keeps_the_default() {
    let _lock = exclusive();
    for action in [libc::SIG_DFL, libc::SIG_IGN] {
        handle_with(action);
        let watch = Watch::begin();
        assert_eq!(handler(), action);
        drop(watch);
        assert_eq!(handler(), action);
    }
    handle_with(libc::SIG_DFL);
}

#[test]
fn a_handler_installed_during_a_load_is_kept() {
    let _lock = exclusive();
    handle_with(counting());
    let watch = Watch::begin();
    handle_with(libc::SIG_IGN);
    drop(watch);
    assert_eq!(handler(), libc::SIG_IGN);
    handle_with(libc::SIG_DFL);
}
