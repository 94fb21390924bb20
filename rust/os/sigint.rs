//! Ctrl-C. While a load runs, a SIGINT is noted before the handler that the
//! program has set (Python's, say) is called as ever, and the load ends with
//! an error at its next chunk. A program without a handler ends as it always
//! did, and one that ignores SIGINT goes on.

use crate::error::{Error, Kind, Result};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many SIGINTs have come while loads ran.
static SEEN: AtomicU64 = AtomicU64::new(0);
/// The program's handler as an address, and whether it takes three arguments, for ours to call.
static PROGRAM_HANDLER: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
static PROGRAM_FLAGS: AtomicUsize = AtomicUsize::new(0);

/// How many watches there are, and the program's action while ours stands in its place.
static WATCHES: Mutex<Watches> = Mutex::new(Watches { count: 0, replaced: None });

struct Watches {
    count: usize,
    replaced: Option<libc::sigaction>,
}

/// Notes SIGINTs for as long as it lives.
pub struct Watch {
    seen_before: u64,
}

impl Watch {
    /// Begins to watch.
    pub fn begin() -> Watch {
        let mut watches = lock();
        if watches.count == 0 {
            watches.replaced = replace();
        }
        watches.count += 1;
        Watch { seen_before: SEEN.load(Ordering::Relaxed) }
    }

    /// Fails once a SIGINT has come.
    ///
    /// # Errors
    /// `interrupted`.
    pub fn check(&self) -> Result<()> {
        if SEEN.load(Ordering::Relaxed) == self.seen_before {
            Ok(())
        } else {
            Err(Error::new(Kind::Interrupted, "ended by SIGINT (Ctrl-C); everything is released"))
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut watches = lock();
        watches.count -= 1;
        if watches.count == 0
            && let Some(program) = watches.replaced.take()
        {
            restore(&program);
        }
    }
}

fn lock() -> MutexGuard<'static, Watches> {
    WATCHES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn current() -> Option<libc::sigaction> {
    let mut action = MaybeUninit::uninit();
    // SAFETY: only asks, and writes the whole structure when it succeeds.
    let asked = unsafe { libc::sigaction(libc::SIGINT, ptr::null(), action.as_mut_ptr()) };
    // SAFETY: as above.
    (asked == 0).then(|| unsafe { action.assume_init() })
}

/// Puts our handler in the place of the program's, if it has one.
fn replace() -> Option<libc::sigaction> {
    let program = current().filter(|action| !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN))?;
    PROGRAM_HANDLER.store(program.sa_sigaction, Ordering::SeqCst);
    PROGRAM_FLAGS.store(usize::try_from(program.sa_flags).unwrap_or(0), Ordering::SeqCst);
    let mut ours = program;
    ours.sa_sigaction = handler();
    ours.sa_flags |= libc::SA_SIGINFO;
    // SAFETY: the handler does nothing that a signal handler may not do.
    let set = unsafe { libc::sigaction(libc::SIGINT, &raw const ours, ptr::null_mut()) };
    (set == 0).then_some(program)
}

/// Gives the program its handler back, unless it has set another one meanwhile.
fn restore(program: &libc::sigaction) {
    if current().is_some_and(|action| action.sa_sigaction == handler()) {
        // SAFETY: the action was in force before.
        unsafe { libc::sigaction(libc::SIGINT, program, ptr::null_mut()) };
    }
}

fn handler() -> libc::sighandler_t {
    let function: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = note;
    function as libc::sighandler_t
}

extern "C" fn note(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    SEEN.fetch_add(1, Ordering::Relaxed);
    let program = PROGRAM_HANDLER.load(Ordering::SeqCst);
    let takes_info = usize::try_from(libc::SA_SIGINFO).unwrap_or(0);
    if PROGRAM_FLAGS.load(Ordering::SeqCst) & takes_info != 0 {
        // SAFETY: the program registered a function of this type; the address is not SIG_DFL or SIG_IGN.
        let call: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(program) };
        call(signal, info, context);
    } else {
        // SAFETY: as above.
        let call: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(program) };
        call(signal);
    }
}
