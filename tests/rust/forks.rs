//! State of one process, in a child that is forked while another thread holds a lock.

use crate::sigint::{counting, handle_with, handler, interrupt};
use crate::sim::exclusive;
use fst::error::Kind;
use fst::os::mutex::Mutex;
use fst::os::per_process::PerProcess;
use fst::os::sigint::Watch;
use fst::profile::{self, Stage, span};
use fst::staging::pool::{PAGE_BYTES, Request, take};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{ptr, thread};

/// Seconds after which a child that waits for a lock is killed.
const PATIENCE_SECONDS: libc::c_uint = 20;

/// Returns whether `check` returns true in a child that is forked while another thread holds what `lock` returns.
fn passes_in_child<G>(lock: impl FnOnce() -> G + Send, check: impl FnOnce() -> bool) -> bool {
    // The child takes the check out. Here it is dropped after the lock is released, which its captures may need.
    let mut check = Some(check);
    let (is_held, is_checked) = (Barrier::new(2), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            let _held = lock();
            is_held.wait();
            is_checked.wait();
        });
        is_held.wait();
        let passed = passes(&mut check);
        is_checked.wait();
        passed
    })
}

fn passes(check: &mut Option<impl FnOnce() -> bool>) -> bool {
    // SAFETY: the C library resets its own locks in the child, and the child takes no lock of the test harness.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends this process if it waits for ever.
        unsafe { libc::alarm(PATIENCE_SECONDS) };
        let check = AssertUnwindSafe(|| check.take().is_some_and(|check| check()));
        let has_passed = catch_unwind(check).unwrap_or(false);
        // SAFETY: exits without the exit handlers of the test harness.
        unsafe { libc::_exit(i32::from(!has_passed)) }
    }
    let mut status = 0;
    // SAFETY: waits for the child of this call; `status` is valid for writes.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

#[test]
fn child_has_a_value_of_its_own() {
    static STATE: PerProcess<Mutex<u32>> = PerProcess::new(|| Mutex::new(1));
    *STATE.get().lock() = 2;
    assert!(passes_in_child(|| STATE.get().lock(), || *STATE.get().lock() == 1));
    assert_eq!(*STATE.get().lock(), 2);
}

#[test]
fn child_keeps_settings_and_waits_for_no_lock() {
    static SETTINGS: PerProcess<Mutex<u32>> = PerProcess::settings();
    *SETTINGS.get().lock() = 2;
    assert!(passes_in_child(|| (), || *SETTINGS.get().lock() == 2));
    assert!(passes_in_child(|| SETTINGS.get().lock(), || *SETTINGS.get().lock() == 0));
    assert_eq!(*SETTINGS.get().lock(), 2);
}

#[test]
fn threads_share_one_value_and_the_others_are_dropped() {
    static LIVE: AtomicUsize = AtomicUsize::new(0);
    struct Counted;
    impl Drop for Counted {
        fn drop(&mut self) {
            LIVE.fetch_sub(1, Ordering::SeqCst);
        }
    }
    let create = || {
        LIVE.fetch_add(1, Ordering::SeqCst);
        Counted
    };
    let state = PerProcess::new(create);
    let addresses: Vec<usize> = thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| ptr::from_ref(state.get()).addr())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(addresses.iter().all(|address| *address == addresses[0]));
    assert_eq!(LIVE.load(Ordering::SeqCst), 1);
    drop(state);
    assert_eq!(LIVE.load(Ordering::SeqCst), 0);
}

#[test]
fn child_watches_and_restores_the_handler_of_the_program() {
    let _lock = exclusive();
    handle_with(counting());
    let inherited = Watch::begin();
    let check = || {
        let watch = Watch::begin();
        drop(inherited);
        interrupt();
        let is_seen = watch.check().is_err();
        drop(watch);
        is_seen && handler() == counting()
    };
    assert!(passes_in_child(|| (), check));
    handle_with(libc::SIG_DFL);
}

#[test]
fn child_profiles_its_own_work_during_a_profile_of_its_parent() {
    let _lock = exclusive();
    let profile = profile::start();
    drop(span(Stage::Plan));
    let check = || {
        drop(span(Stage::Read));
        assert_eq!(profile::stop(profile).unwrap_err().kind(), Kind::InvalidArgument);
        let own = profile::start();
        drop(span(Stage::Write));
        let trace = profile::stop(own).unwrap();
        trace.contains(r#""name":"write""#) && !trace.contains(r#""name":"plan""#) && trace.contains("thread_name")
    };
    assert!(passes_in_child(|| (), check));
    assert!(profile::stop(profile).unwrap().contains(r#""name":"plan""#));
}

#[test]
fn child_counts_no_slot_of_its_parent() {
    let _lock = exclusive();
    let request = Request { bytes: PAGE_BYTES, node: None, staging_bytes: PAGE_BYTES };
    let inherited = take(&request, &|| Ok(())).unwrap();
    // In the child, the slot of the parent neither counts towards the bound nor returns to the pool.
    let check = || {
        drop(inherited);
        take(&request, &|| Ok(())).unwrap().is_some_and(|mut slot| slot.bytes_mut().len() == PAGE_BYTES)
    };
    assert!(passes_in_child(|| (), check));
}
