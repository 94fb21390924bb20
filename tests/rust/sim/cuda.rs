//! Calls of the simulated driver with Rust types. The calls are safe for all
//! arguments: the simulator reports an invalid handle or address and does not use it.

use super::abi::{CaptureMode, Memcpy2D, Status};
use super::library::Library;
use std::ffi::{CStr, c_char};

/// Calls of the driver.
#[derive(Clone, Copy)]
pub struct Cuda(pub(super) &'static Library);

// SAFETY of every call below: pointers refer to locals of the right type, and the
// simulator checks all other arguments.
#[allow(clippy::undocumented_unsafe_blocks, reason = "the comment above covers all calls")]
impl Cuda {
    pub fn init(&self) -> Result<(), Status> {
        unsafe { (self.0.cuInit)(0) }.check()
    }

    pub fn device_count(&self) -> Result<i32, Status> {
        returned(|out| unsafe { (self.0.cuDeviceGetCount)(out) })
    }

    pub fn device(&self, ordinal: i32) -> Result<i32, Status> {
        returned(|out| unsafe { (self.0.cuDeviceGet)(out, ordinal) })
    }

    pub fn retain_context(&self, device: i32) -> Result<usize, Status> {
        returned(|out| unsafe { (self.0.cuDevicePrimaryCtxRetain)(out, device) })
    }

    pub fn release_context(&self, device: i32) -> Result<(), Status> {
        unsafe { (self.0.cuDevicePrimaryCtxRelease_v2)(device) }.check()
    }

    pub fn set_current(&self, context: usize) -> Result<(), Status> {
        unsafe { (self.0.cuCtxSetCurrent)(context) }.check()
    }

    pub fn current(&self) -> Result<usize, Status> {
        returned(|out| unsafe { (self.0.cuCtxGetCurrent)(out) })
    }

    pub fn create_stream(&self) -> Result<usize, Status> {
        returned(|out| unsafe { (self.0.cuStreamCreate)(out, 1) })
    }

    pub fn destroy_stream(&self, stream: usize) -> Result<(), Status> {
        unsafe { (self.0.cuStreamDestroy_v2)(stream) }.check()
    }

    pub fn wait_event(&self, stream: usize, event: usize) -> Result<(), Status> {
        unsafe { (self.0.cuStreamWaitEvent)(stream, event, 0) }.check()
    }

    pub fn synchronize_stream(&self, stream: usize) -> Result<(), Status> {
        unsafe { (self.0.cuStreamSynchronize)(stream) }.check()
    }

    pub fn create_event(&self) -> Result<usize, Status> {
        returned(|out| unsafe { (self.0.cuEventCreate)(out, 2) })
    }

    pub fn record_event(&self, event: usize, stream: usize) -> Result<(), Status> {
        unsafe { (self.0.cuEventRecord)(event, stream) }.check()
    }

    pub fn synchronize_event(&self, event: usize) -> Result<(), Status> {
        unsafe { (self.0.cuEventSynchronize)(event) }.check()
    }

    pub fn query_event(&self, event: usize) -> Result<(), Status> {
        unsafe { (self.0.cuEventQuery)(event) }.check()
    }

    pub fn destroy_event(&self, event: usize) -> Result<(), Status> {
        unsafe { (self.0.cuEventDestroy_v2)(event) }.check()
    }

    pub fn register(&self, memory: &[u8], flags: u32) -> Result<(), Status> {
        unsafe { (self.0.cuMemHostRegister_v2)(memory.as_ptr().expose_provenance(), memory.len(), flags) }.check()
    }

    pub fn unregister(&self, start: usize) -> Result<(), Status> {
        unsafe { (self.0.cuMemHostUnregister)(start) }.check()
    }

    pub fn copy(&self, target: u64, source: &[u8], stream: usize) -> Result<(), Status> {
        let start = source.as_ptr().expose_provenance();
        unsafe { (self.0.cuMemcpyHtoDAsync_v2)(target, start, source.len(), stream) }.check()
    }

    /// Copies `bytes` bytes to host memory at the address `target`.
    pub fn copy_to_host(&self, target: usize, source: u64, bytes: usize, stream: usize) -> Result<(), Status> {
        unsafe { (self.0.cuMemcpyDtoHAsync_v2)(target, source, bytes, stream) }.check()
    }

    pub fn copy_2d(&self, copy: &Memcpy2D, stream: usize) -> Result<(), Status> {
        unsafe { (self.0.cuMemcpy2DAsync_v2)(copy, stream) }.check()
    }

    pub fn allocate(&self, bytes: usize) -> Result<u64, Status> {
        returned(|out| unsafe { (self.0.cuMemAlloc_v2)(out, bytes) })
    }

    pub fn free(&self, address: u64) -> Result<(), Status> {
        unsafe { (self.0.cuMemFree_v2)(address) }.check()
    }

    pub fn create_timing_event(&self) -> Result<usize, Status> {
        returned(|out| unsafe { (self.0.cuEventCreate)(out, 0) })
    }

    pub fn elapsed_time(&self, start: usize, end: usize) -> Result<f32, Status> {
        returned(|out| unsafe { (self.0.cuEventElapsedTime)(out, start, end) })
    }

    pub fn is_capturing(&self, stream: usize) -> Result<u32, Status> {
        returned(|out| unsafe { (self.0.cuStreamIsCapturing)(stream, out) })
    }

    pub fn begin_capture(&self, stream: usize, mode: CaptureMode) -> Result<(), Status> {
        unsafe { (self.0.cuStreamBeginCapture_v2)(stream, mode) }.check()
    }

    pub fn end_capture(&self, stream: usize) -> Result<(), Status> {
        returned(|graph| unsafe { (self.0.cuStreamEndCapture)(stream, graph) }).map(drop)
    }

    /// Sets the mode of the calling thread, and returns the one before.
    pub fn exchange_capture_mode(&self, mut mode: CaptureMode) -> CaptureMode {
        let status = unsafe { (self.0.cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
        assert_eq!(status, Status::Success);
        mode
    }

    pub fn bus_id(&self, device: i32) -> Result<String, Status> {
        let mut text = [0_u8; 16];
        unsafe { (self.0.cuDeviceGetPCIBusId)(text.as_mut_ptr().cast(), 16, device) }.check()?;
        Ok(CStr::from_bytes_until_nul(&text).expect("a terminating NUL").to_string_lossy().into_owned())
    }

    pub fn load_module(&self, image: &[u8]) -> Result<usize, Status> {
        returned(|out| unsafe { (self.0.cuModuleLoadData)(out, image.as_ptr().expose_provenance()) })
    }

    pub fn unload_module(&self, module: usize) -> Result<(), Status> {
        unsafe { (self.0.cuModuleUnload)(module) }.check()
    }

    pub fn function(&self, module: usize, name: &CStr) -> Result<usize, Status> {
        returned(|out| unsafe { (self.0.cuModuleGetFunction)(out, module, name.as_ptr()) })
    }

    /// Launches `[blocks, threads]`. The parameters may be dropped when the call returns.
    pub fn launch(&self, function: usize, grid: [u32; 2], stream: usize, parameters: &[&[u8]]) -> Result<(), Status> {
        let addresses: Vec<usize> = parameters.iter().map(|bytes| bytes.as_ptr().expose_provenance()).collect();
        let (address, [blocks, threads]) = (addresses.as_ptr().expose_provenance(), grid);
        unsafe { (self.0.cuLaunchKernel)(function, blocks, 1, 1, threads, 1, 1, 0, stream, address, 0) }.check()
    }

    /// Returns the name and the description of an error.
    pub fn describe(&self, error: u32) -> Result<(String, String), Status> {
        let text = |of: unsafe extern "C" fn(u32, *mut *const c_char) -> Status| {
            let mut text = std::ptr::null();
            unsafe { of(error, &raw mut text) }.check()?;
            Ok(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        Ok((text(self.0.cuGetErrorName)?, text(self.0.cuGetErrorString)?))
    }
}

fn returned<T: Default>(call: impl FnOnce(*mut T) -> Status) -> Result<T, Status> {
    let mut value = T::default();
    call(&raw mut value).check()?;
    Ok(value)
}
