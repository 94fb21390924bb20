//! Functions of the timed driver, and functions of the C library that follow the model, too.

use fst_nullcuda::model::{Costs, Span};
use libloading::Library;
use std::ffi::{c_int, c_void};
use std::mem;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Delay that the kernel adds to sleeps, in microseconds.
const TIMER_SLACK_US: f64 = 50.0;

/// Driver of tests/nullcuda, in the place of libcuda.
pub struct Driver {
    pub start: unsafe extern "C" fn(*const Costs),
    pub stop: unsafe extern "C" fn(),
    pub spans: unsafe extern "C" fn(*mut usize) -> *const Span,
    pub now: unsafe extern "C" fn() -> u64,
    pub host: unsafe extern "C" fn(f64),
    pub malloc: unsafe extern "C" fn(),
    pub read: unsafe extern "C" fn(usize, usize),
    pub pages: unsafe extern "C" fn(usize, usize),
    pub sleep: unsafe extern "C" fn(f64),
    pub thread: unsafe extern "C" fn(),
    pub share: unsafe extern "C" fn(*mut AtomicU64),
}

pub static DRIVER: OnceLock<Driver> = OnceLock::new();
/// Whether reads and page faults follow the model.
pub static IS_MODELLED: AtomicBool = AtomicBool::new(false);

pub fn driver() -> &'static Driver {
    DRIVER.get_or_init(|| {
        let program = std::env::current_exe().unwrap();
        let path = program.parent().unwrap().join("libfst_nullcuda.so");
        // SAFETY: the library has no initializers, and the types match.
        unsafe {
            let library = Box::leak(Box::new(Library::new(&path).unwrap()));
            Driver {
                start: *library.get(b"timed_start").unwrap(),
                stop: *library.get(b"timed_stop").unwrap(),
                spans: *library.get(b"timed_spans").unwrap(),
                now: *library.get(b"timed_now").unwrap(),
                host: *library.get(b"timed_host").unwrap(),
                malloc: *library.get(b"timed_malloc").unwrap(),
                read: *library.get(b"timed_read").unwrap(),
                pages: *library.get(b"timed_pages").unwrap(),
                sleep: *library.get(b"timed_sleep").unwrap(),
                thread: *library.get(b"timed_thread").unwrap(),
                share: *library.get(b"timed_share").unwrap(),
            }
        }
    })
}

pub fn now() -> u64 {
    // SAFETY: the function has no preconditions.
    unsafe { (driver().now)() }
}

/// Spends time of the host, in microseconds.
pub fn spend(us: f64) {
    // SAFETY: the function has no preconditions.
    unsafe { (driver().host)(us) }
}

pub fn malloc() {
    // SAFETY: the function has no preconditions.
    unsafe { (driver().malloc)() }
}

/// Takes the place of the C library's function for the whole program, and so also for the standard library: a read takes
/// the time of the model, and leaves the memory as it is.
#[unsafe(no_mangle)]
unsafe extern "C" fn pread64(file: c_int, into: *mut c_void, bytes: usize, offset: i64) -> isize {
    if !IS_MODELLED.load(Ordering::Relaxed) {
        // SAFETY: the caller's promise. The result is a count or -1.
        return unsafe { libc::syscall(libc::SYS_pread64, file, into, bytes, offset) as isize };
    }
    // SAFETY: the function only looks at the address.
    unsafe { (driver().read)(into.addr(), bytes) };
    bytes.cast_signed()
}

/// As above, for a design that makes pages before it registers them.
#[unsafe(no_mangle)]
unsafe extern "C" fn madvise(address: *mut c_void, bytes: usize, advice: c_int) -> c_int {
    if advice == libc::MADV_POPULATE_WRITE && IS_MODELLED.load(Ordering::Relaxed) {
        // SAFETY: the function only looks at the address.
        unsafe { (driver().pages)(address.addr(), bytes) };
        return 0;
    }
    // SAFETY: the caller's promise. The result is 0 or -1.
    unsafe { libc::syscall(libc::SYS_madvise, address, bytes, advice) as c_int }
}

/// As above, for starts of threads, which cost their parent time.
#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> c_int {
    type Create = unsafe extern "C" fn(
        *mut libc::pthread_t,
        *const libc::pthread_attr_t,
        extern "C" fn(*mut c_void) -> *mut c_void,
        *mut c_void,
    ) -> c_int;
    if IS_MODELLED.load(Ordering::Relaxed) {
        // SAFETY: the function has no preconditions.
        unsafe { (driver().thread)() };
    }
    // SAFETY: the C library has the function, with this type, and the arguments are the caller's.
    unsafe {
        let create = libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr());
        mem::transmute::<*mut c_void, Create>(create)(thread, attributes, start, argument)
    }
}

/// As above, for threads that wait for a copy: sleeps are stretched, and have the timer slack of other threads.
#[unsafe(no_mangle)]
unsafe extern "C" fn clock_nanosleep(
    clock: c_int,
    flags: c_int,
    request: *const libc::timespec,
    remaining: *mut libc::timespec,
) -> c_int {
    if IS_MODELLED.load(Ordering::Relaxed) {
        // SAFETY: the caller's promise, and the driver's function has no preconditions.
        unsafe { (driver().sleep)((*request).tv_nsec as f64 / 1e3 + TIMER_SLACK_US) };
        return 0;
    }
    // SAFETY: the caller's promise.
    let result = unsafe { libc::syscall(libc::SYS_clock_nanosleep, clock, flags, request, remaining) };
    if result == 0 { 0 } else { std::io::Error::last_os_error().raw_os_error().unwrap() }
}
