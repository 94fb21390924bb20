//! Loads the simulated driver and declares the types of its functions.

use super::abi::{CaptureMode, Counters, Fault, Memcpy2D, Schedule, Status};
use std::ffi::c_char;

/// Declares the functions of a library that replaces another one, and loads it until the process ends.
///
/// The library must be open before any code opens the one that it replaces. The dynamic linker then resolves the SONAME to
/// this library. It is a dev-dependency, so every `cargo test` builds it. Cargo puts the libraries of dependencies into the
/// directory of the test programs, `deps` of the profile. The file name of a cdylib has no hash.
macro_rules! library {
    ($file:literal: $(fn $name:ident($($type:ty),*) $(-> $result:ty)?;)*) => {
        /// Functions of the library. Handles are integers, which the C ABI passes like pointers.
        #[allow(non_snake_case, reason = "the names are those of the replaced library")]
        pub struct Library { $(pub $name: unsafe extern "C" fn($($type),*) $(-> $result)?,)* }

        pub static LIBRARY: std::sync::LazyLock<Library> = std::sync::LazyLock::new(|| {
            let test = std::env::current_exe().expect("the path of the running test");
            let path = test.parent().expect("the directory of the test program").join($file);
            // SAFETY: the library has no initializers with preconditions, and the types match the simulator.
            unsafe {
                let library = libloading::Library::new(&path)
                    .unwrap_or_else(|error| panic!("cannot open the simulator {}: {error}", path.display()));
                let library = Box::leak(Box::new(library));
                Library { $($name: *library.get(stringify!($name)).expect(stringify!($name)),)* }
            }
        });
    };
}

library! {
    "libfst_simcuda.so":
    fn cuInit(u32) -> Status;
    fn cuDevicePrimaryCtxRetain(*mut usize, i32) -> Status;
    fn cuDevicePrimaryCtxRelease_v2(i32) -> Status;
    fn cuCtxSetCurrent(usize) -> Status;
    fn cuCtxGetCurrent(*mut usize) -> Status;
    fn cuStreamCreate(*mut usize, u32) -> Status;
    fn cuStreamDestroy_v2(usize) -> Status;
    fn cuStreamWaitEvent(usize, usize, u32) -> Status;
    fn cuStreamSynchronize(usize) -> Status;
    fn cuEventCreate(*mut usize, u32) -> Status;
    fn cuEventRecord(usize, usize) -> Status;
    fn cuEventQuery(usize) -> Status;
    fn cuEventDestroy_v2(usize) -> Status;
    fn cuStreamIsCapturing(usize, *mut u32) -> Status;
    fn cuStreamBeginCapture_v2(usize, CaptureMode) -> Status;
    fn cuStreamEndCapture(usize, *mut usize) -> Status;
    fn cuThreadExchangeStreamCaptureMode(*mut CaptureMode) -> Status;
    fn cuModuleLoadData(*mut usize, usize) -> Status;
    fn cuModuleUnload(usize) -> Status;
    fn cuModuleGetFunction(*mut usize, usize, *const c_char) -> Status;
    fn cuLaunchKernel(usize, u32, u32, u32, u32, u32, u32, u32, usize, usize, usize) -> Status;
    fn cuMemHostRegister_v2(usize, usize, u32) -> Status;
    fn cuMemHostUnregister(usize) -> Status;
    fn cuMemcpyHtoDAsync_v2(u64, usize, usize, usize) -> Status;
    fn cuMemcpyDtoHAsync_v2(usize, u64, usize, usize) -> Status;
    fn cuMemcpy2DAsync_v2(*const Memcpy2D, usize) -> Status;
    fn cuMemAlloc_v2(*mut u64, usize) -> Status;
    fn cuMemFree_v2(u64) -> Status;
    fn sim_reset(u64);
    fn sim_schedule(Schedule);
    fn sim_inject(Fault, u64);
    fn sim_counters() -> Counters;
    fn sim_launch_write(usize, u64, usize, u8) -> Status;
    fn sim_launch_read(usize, u64, usize) -> Status;
    fn sim_capture();
    fn sim_other_context(i32) -> usize;
    fn sim_read(u64, *mut u8, usize) -> Status;
    fn sim_write(u64, *const u8, usize) -> Status;
    fn sim_finish() -> usize;
    fn sim_violations(*mut u8, usize) -> usize;
}
