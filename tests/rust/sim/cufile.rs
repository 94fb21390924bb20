//! The simulated libcufile as the tests see it.

pub use abi::{Counters, Fault};

use super::Sim;
use std::sync::LazyLock;

#[path = "../../simcufile/src/abi.rs"]
mod abi;

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

/// The library, open until the process ends. It must be open before anything looks for `libcufile.so.0`.
static LIBRARY: LazyLock<Library> = LazyLock::new(|| {
    let test = std::env::current_exe().expect("the path of the running test");
    let path = test.parent().expect("a program lies in a folder").join("libfst_simcufile.so");
    // SAFETY: opening it runs no code that could be misused, and the types are those in the simulator.
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

/// The library during a test's turn with the simulated driver.
#[derive(Clone, Copy)]
pub struct Cufile(&'static Library);

impl Cufile {
    /// Begins anew.
    pub fn start(_turn: &Sim) -> Cufile {
        // SAFETY: takes nothing.
        unsafe { (LIBRARY.reset)() };
        Cufile(&LIBRARY)
    }

    /// Opens the driver as another user of the library in this process.
    pub fn open(self) {
        // SAFETY: may be called at any time.
        let Status { code, cuda_code } = unsafe { (self.0.open)() };
        assert_eq!((code, cuda_code), (0, 0), "nobody has opened it");
    }

    /// Makes the `at`-th call of a sort fail, counted from 1 and from now.
    pub fn inject(self, fault: Fault, at: u64) {
        // SAFETY: takes any fault and number.
        unsafe { (self.0.inject)(fault, at) };
    }

    /// What has happened since the start.
    pub fn counters(self) -> Counters {
        // SAFETY: only asks.
        unsafe { (self.0.counters)() }
    }

    /// Fails the test if something was left behind or misused.
    pub fn assert_clean(self) {
        let Counters { misuses, live_handles, live_buffers, .. } = self.counters();
        assert_eq!((misuses, live_handles, live_buffers), (0, 0, 0), "misuses, files and buffers left");
    }
}
