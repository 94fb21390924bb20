//! Test harness of the simulated libcufile.

pub use fst_simcufile::abi::{Counters, Fault};

use super::Sim;
use fst_simcufile::Status;
use std::marker::PhantomData;

/// Simulated libcufile of a test that holds the simulated driver. Dropping it fails the test after a misuse, or if a file
/// or a buffer is still registered.
pub struct Cufile<'a>(PhantomData<&'a Sim>);

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
        call!(fst_simcufile::simcufile_reset());
        Cufile(PhantomData)
    }

    /// Opens the driver, like another user of the library in this process.
    pub fn open(&self) {
        let Status { code, cuda_code } = call!(fst_simcufile::cuFileDriverOpen());
        assert_eq!((code, cuda_code), (0, 0), "the driver is not open");
    }

    /// Makes the `at`-th later call of a kind fail, counted from 1.
    pub fn inject(&self, fault: Fault, at: u64) {
        call!(fst_simcufile::simcufile_inject(fault, at));
    }

    /// Returns the counts since the start.
    pub fn counters(&self) -> Counters {
        call!(fst_simcufile::simcufile_counters())
    }
}
