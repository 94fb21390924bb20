//! Ctrl-C. While a load runs, this module's handler counts each SIGINT and then calls the program's own handler
//! (Python's, for example). The load fails at its next chunk. The behaviour of a program that has no handler or ignores
//! SIGINT is unchanged.
//!
//! The module uses libc, since rustix has no sigaction(2) for programs that link a C library.

use crate::error::{Error, Kind, Result};
use crate::os::mutex::Mutex;
use crate::os::per_process::PerProcess;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Interval at which a waiting caller checks for SIGINT. A signal handler cannot wake a condition variable.
pub const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Number of SIGINTs received while loads ran.
static SEEN: AtomicU64 = AtomicU64::new(0);
/// Address of the program's handler, which the installed handler calls.
static PROGRAM_HANDLER: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
/// `sa_flags` of the program's action: with `SA_SIGINFO` its handler takes three arguments.
static PROGRAM_FLAGS: AtomicUsize = AtomicUsize::new(0);

static WATCHES: PerProcess<Mutex<Watches>> = PerProcess::new(Mutex::default);

/// Number of watches, and the program's action while it is replaced.
#[derive(Default)]
struct Watches {
    count: usize,
    replaced: Option<libc::sigaction>,
}

/// Detects SIGINTs until it is dropped.
pub struct Watch {
    seen_before: u64,
    watches: &'static Mutex<Watches>,
}

impl Watch {
    /// Installs the handler if this is the first watch.
    pub fn begin() -> Watch {
        let watches = WATCHES.get();
        let mut state = watches.lock();
        if state.count == 0 {
            state.replaced = replace();
        }
        state.count += 1;
        Watch { seen_before: SEEN.load(Ordering::Relaxed), watches }
    }

    /// Fails if a SIGINT was received since the watch began.
    pub fn check(&self) -> Result<()> {
        if SEEN.load(Ordering::Relaxed) == self.seen_before {
            Ok(())
        } else {
            Err(Error::new(Kind::Interrupted, "ended by SIGINT (Ctrl-C); all resources are released"))
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // A forked child does not count the watches of its parent.
        if !ptr::eq(self.watches, WATCHES.get()) {
            return;
        }
        let mut state = self.watches.lock();
        state.count -= 1;
        if state.count == 0
            && let Some(program) = state.replaced.take()
        {
            restore(&program);
        }
    }
}

fn current() -> Option<libc::sigaction> {
    let mut action = MaybeUninit::uninit();
    // SAFETY: without a new action the call only writes the current one to `action`.
    let code = unsafe { libc::sigaction(libc::SIGINT, ptr::null(), action.as_mut_ptr()) };
    // SAFETY: a successful call has written the whole structure.
    (code == 0).then(|| unsafe { action.assume_init() })
}

/// Replaces the program's handler, if it has one, and returns its action.
fn replace() -> Option<libc::sigaction> {
    let program = current().filter(|action| !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN))?;
    if program.sa_sigaction == handler() {
        // This process was forked during a load of its parent, which had installed the handler.
        let mut program = program;
        program.sa_sigaction = PROGRAM_HANDLER.load(Ordering::SeqCst);
        program.sa_flags = libc::c_int::try_from(PROGRAM_FLAGS.load(Ordering::SeqCst)).unwrap_or(0);
        return Some(program);
    }
    PROGRAM_HANDLER.store(program.sa_sigaction, Ordering::SeqCst);
    PROGRAM_FLAGS.store(usize::try_from(program.sa_flags).unwrap_or(0), Ordering::SeqCst);
    let mut action = program;
    action.sa_sigaction = handler();
    action.sa_flags |= libc::SA_SIGINFO;
    // SAFETY: the handler performs only async-signal-safe operations.
    let set = unsafe { libc::sigaction(libc::SIGINT, &raw const action, ptr::null_mut()) };
    (set == 0).then_some(program)
}

/// Restores the program's action, unless the program has installed another handler meanwhile.
fn restore(program: &libc::sigaction) {
    if current().is_some_and(|action| action.sa_sigaction == handler()) {
        // SAFETY: sigaction(2) returned this action earlier.
        unsafe { libc::sigaction(libc::SIGINT, program, ptr::null_mut()) };
    }
}

fn handler() -> libc::sighandler_t {
    let function: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = count_and_forward;
    function as libc::sighandler_t
}

extern "C" fn count_and_forward(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    SEEN.fetch_add(1, Ordering::Relaxed);
    let program = PROGRAM_HANDLER.load(Ordering::SeqCst);
    let takes_info = usize::try_from(libc::SA_SIGINFO).unwrap_or(0);
    if PROGRAM_FLAGS.load(Ordering::SeqCst) & takes_info != 0 {
        // SAFETY: the program registered a function of this type. The address is neither SIG_DFL nor SIG_IGN.
        let call: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(program) };
        call(signal, info, context);
    } else {
        // SAFETY: the program registered a function of this type, without `SA_SIGINFO`.
        let call: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(program) };
        call(signal);
    }
}
