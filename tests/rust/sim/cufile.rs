//! Test harness of the simulated libcufile.

pub use fst_simcufile::abi::{Counters, Fault};

use super::Sim;
use std::marker::PhantomData;
use std::sync::LazyLock;

/// `CUfileError_t`.
#[repr(C)]
struct Status {
    code: u32,
    cuda_code: u32,
}

struct Library {
    open: unsafe extern "C" fn() -> Status,
    reset: unsafe extern "C" fn(),
    inject: unsafe extern "C" fn(Fault, u64),
    counters: unsafe extern "C" fn() -> Counters,
}

/// Library, open until the process ends. It must be open before any code opens `libcufile.so.0`.
static LIBRARY: LazyLock<Library> = LazyLock::new(|| {
    let test = std::env::current_exe().expect("the path of the running test");
    let path = test.parent().expect("the directory of the test program").join("libfst_simcufile.so");
    // SAFETY: the library has no initializers, and the types match the simulator.
    unsafe {
        let library = libloading::Library::new(&path)
            .unwrap_or_else(|error| panic!("cannot open the simulated libcufile {}: {error}", path.display()));
        let library = Box::leak(Box::new(library));
        Library {
            open: *library.get(b"cuFileDriverOpen").expect("cuFileDriverOpen"),
            reset: *library.get(b"simcufile_reset").expect("simcufile_reset"),
            inject: *library.get(b"simcufile_inject").expect("simcufile_inject"),
            counters: *library.get(b"simcufile_counters").expect("simcufile_counters"),
        }
    }
});

/// Simulated libcufile of a test that holds the simulated driver. Dropping it fails the test after a misuse, or if a file
/// or a buffer is still registered.
pub struct Cufile<'a>(&'static Library, PhantomData<&'a Sim>);

impl Drop for Cufile<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let Counters { misuses, live_handles, live_buffers, .. } = self.counters();
            assert_eq!(
                (misuses, live_handles, live_buffers),
                (0, 0, 0),
                "misuses, registered files, registered buffers"
            );
        }
    }
}

impl<'a> Cufile<'a> {
    /// Resets the library.
    pub fn start(_sim: &'a Sim) -> Cufile<'a> {
        // SAFETY: the function has no preconditions.
        unsafe { (LIBRARY.reset)() };
        Cufile(&LIBRARY, PhantomData)
    }

    /// Opens the driver, like another user of the library in this process.
    pub fn open(&self) {
        // SAFETY: the function has no preconditions.
        let Status { code, cuda_code } = unsafe { (self.0.open)() };
        assert_eq!((code, cuda_code), (0, 0), "the driver is not open");
    }

    /// Makes the `at`-th later call of a kind fail, counted from 1.
    pub fn inject(&self, fault: Fault, at: u64) {
        // SAFETY: the function accepts all arguments.
        unsafe { (self.0.inject)(fault, at) };
    }

    /// Returns the counts since the start.
    pub fn counters(&self) -> Counters {
        // SAFETY: the function has no preconditions.
        unsafe { (self.0.counters)() }
    }
}
