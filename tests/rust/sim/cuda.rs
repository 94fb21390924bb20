//! Calls of the simulated driver with Rust types. The calls are safe for all
//! arguments: the simulator reports an invalid handle or address and does not use it.

use super::abi::{CaptureMode, Memcpy2D, Status};
use std::ffi::CStr;

/// Calls of the driver.
#[derive(Clone, Copy)]
pub struct Cuda;

// SAFETY of every call below: pointers refer to locals of the right type, and the
// simulator checks all other arguments.

/// Defines calls that return nothing, or calls that write a result to their first argument.
macro_rules! calls {
    ($($name:ident($($parameter:ident: $type:ty),*) $symbol:ident($($argument:expr),*);)*) => {$(
        pub fn $name(&self, $($parameter: $type),*) -> Result<(), Status> {
            unsafe { call!(unsafe fst_simcuda::api::$symbol($($argument),*)) }.check()
        }
    )*};
    ($($name:ident($($parameter:ident: $type:ty),*) -> $result:ty, $symbol:ident($($argument:expr),*);)*) => {$(
        pub fn $name(&self, $($parameter: $type),*) -> Result<$result, Status> {
            returned(|out| unsafe { call!(unsafe fst_simcuda::api::$symbol(out, $($argument),*)) })
        }
    )*};
}

#[allow(clippy::undocumented_unsafe_blocks, reason = "the comment above covers all calls")]
impl Cuda {
    calls! {
        init() cuInit(0);
        release_context(device: i32) cuDevicePrimaryCtxRelease_v2(device);
        set_current(context: usize) cuCtxSetCurrent(context);
        destroy_stream(stream: usize) cuStreamDestroy_v2(stream);
        wait_event(stream: usize, event: usize) cuStreamWaitEvent(stream, event, 0);
        synchronize_stream(stream: usize) cuStreamSynchronize(stream);
        record_event(event: usize, stream: usize) cuEventRecord(event, stream);
        query_event(event: usize) cuEventQuery(event);
        destroy_event(event: usize) cuEventDestroy_v2(event);
        register(memory: &[u8], flags: u32)
            cuMemHostRegister_v2(memory.as_ptr().expose_provenance(), memory.len(), flags);
        unregister(start: usize) cuMemHostUnregister(start);
        // To host memory at the address `target`.
        copy_to_host(target: usize, source: u64, bytes: usize, stream: usize)
            cuMemcpyDtoHAsync_v2(target, source, bytes, stream);
        copy_2d(copy: &Memcpy2D, stream: usize) cuMemcpy2DAsync_v2(copy, stream);
        free(address: u64) cuMemFree_v2(address);
        begin_capture(stream: usize, mode: CaptureMode) cuStreamBeginCapture_v2(stream, mode);
        unload_module(module: usize) cuModuleUnload(module);
    }

    calls! {
        retain_context(device: i32) -> usize, cuDevicePrimaryCtxRetain(device);
        current() -> usize, cuCtxGetCurrent();
        create_stream() -> usize, cuStreamCreate(1);
        create_event() -> usize, cuEventCreate(2);
        allocate(bytes: usize) -> u64, cuMemAlloc_v2(bytes);
        load_module(image: &[u8]) -> usize, cuModuleLoadData(image.as_ptr().expose_provenance());
        function(module: usize, name: &CStr) -> usize, cuModuleGetFunction(module, name.as_ptr());
    }

    pub fn copy(&self, target: u64, source: &[u8], stream: usize) -> Result<(), Status> {
        let start = source.as_ptr().expose_provenance();
        unsafe { call!(unsafe fst_simcuda::api::cuMemcpyHtoDAsync_v2(target, start, source.len(), stream)) }.check()
    }

    pub fn is_capturing(&self, stream: usize) -> Result<u32, Status> {
        returned(|out| unsafe { call!(unsafe fst_simcuda::api::cuStreamIsCapturing(stream, out)) })
    }

    pub fn end_capture(&self, stream: usize) -> Result<(), Status> {
        returned(|graph| unsafe { call!(unsafe fst_simcuda::api::cuStreamEndCapture(stream, graph)) }).map(drop)
    }

    /// Sets the mode of the calling thread, and returns the one before.
    pub fn exchange_capture_mode(&self, mut mode: CaptureMode) -> CaptureMode {
        let status = unsafe { call!(unsafe fst_simcuda::api::cuThreadExchangeStreamCaptureMode(&raw mut mode)) };
        assert_eq!(status, Status::Success);
        mode
    }

    /// Launches `[blocks, threads]`. The parameters may be dropped when the call returns.
    pub fn launch(&self, function: usize, grid: [u32; 2], stream: usize, parameters: &[&[u8]]) -> Result<(), Status> {
        let addresses: Vec<usize> = parameters.iter().map(|bytes| bytes.as_ptr().expose_provenance()).collect();
        let (address, [blocks, threads]) = (addresses.as_ptr().expose_provenance(), grid);
        unsafe {
            call!(unsafe fst_simcuda::api::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, address, 0))
        }
        .check()
    }
}

fn returned<T: Default>(call: impl FnOnce(*mut T) -> Status) -> Result<T, Status> {
    let mut value = T::default();
    call(&raw mut value).check()?;
    Ok(value)
}
