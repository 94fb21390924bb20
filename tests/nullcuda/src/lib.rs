//! A CUDA driver whose work has no effect. With a [model] of the time that work takes, a benchmark sees what a load waits
//! for. It checks nothing: the tests use the simulated driver of `tests/simcuda`.
//!
//! Without a model, a query of an event says that its work is pending, and a wait returns at once.

#![allow(non_snake_case, reason = "the names are CUDA's")]
#![allow(clippy::missing_safety_doc, reason = "the contracts are CUDA's")]

pub mod model;

use model::Kind;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

const SUCCESS: c_uint = 0;
const NOT_READY: c_uint = 600;

/// Handle of the only context.
const CONTEXT: usize = 0x10;

static NEXT_HANDLE: AtomicUsize = AtomicUsize::new(0x100);

/// Stores a result for the caller.
///
/// # Safety
/// `out` is valid for a write.
unsafe fn store<T>(out: *mut T, value: T) -> c_uint {
    // SAFETY: guaranteed by the caller.
    unsafe { out.write(value) };
    SUCCESS
}

macro_rules! calls {
    ($($name:ident($($parameter:ident: $type:ty),*) $body:block)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "`")]
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($parameter: $type),*) -> c_uint {
                // SAFETY: the caller passes pointers as CUDA requires them.
                unsafe { $body }
            }
        )*
    };
}

#[allow(unused_unsafe, reason = "only some of the calls write to pointers")]
mod calls {
    use super::*;

    fn handle() -> usize {
        NEXT_HANDLE.fetch_add(0x10, Ordering::Relaxed)
    }

    calls! {
        cuInit(_flags: c_uint) { SUCCESS }
        cuDeviceGetCount(count: *mut c_int) { store(count, 1) }
        cuDeviceGet(device: *mut c_int, ordinal: c_int) { store(device, ordinal) }
        cuDeviceGetPCIBusId(text: *mut c_char, _length: c_int, _device: c_int) { store(text, 0) }
        cuDevicePrimaryCtxRetain(context: *mut usize, _device: c_int) { store(context, CONTEXT) }
        cuDevicePrimaryCtxRelease_v2(_device: c_int) { SUCCESS }
        cuCtxGetCurrent(context: *mut usize) { store(context, CONTEXT) }
        cuCtxSetCurrent(_context: usize) { SUCCESS }
        cuCtxGetDevice(device: *mut c_int) { store(device, 0) }
        cuStreamCreate(stream: *mut usize, _flags: c_uint) {
            model::call(Kind::Create, |costs| costs.stream_us);
            store(stream, handle())
        }
        cuStreamDestroy_v2(_stream: usize) { SUCCESS }
        cuStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) { model::stream_wait(stream, event); SUCCESS }
        cuStreamSynchronize(_stream: usize) { SUCCESS }
        cuStreamIsCapturing(_stream: usize, status: *mut c_uint) { store(status, 0) }
        cuThreadExchangeStreamCaptureMode(_mode: *mut c_uint) { SUCCESS }
        cuEventCreate(event: *mut usize, flags: c_uint) {
            let new = handle();
            model::create_event(new, flags);
            store(event, new)
        }
        cuEventRecord(event: usize, stream: usize) { model::record(event, stream); SUCCESS }
        cuEventSynchronize(event: usize) { model::wait(event); SUCCESS }
        cuEventQuery(event: usize) {
            if model::query(event).unwrap_or(false) { SUCCESS } else { NOT_READY }
        }
        cuEventDestroy_v2(_event: usize) { SUCCESS }
        cuModuleLoadData(module: *mut usize, _image: *const c_void) {
            model::call(Kind::Module, |costs| costs.module_us);
            store(module, handle())
        }
        cuModuleUnload(_module: usize) { SUCCESS }
        cuModuleGetFunction(function: *mut usize, _module: usize, _name: *const c_char) { store(function, handle()) }
        cuLaunchKernel(
            _function: usize, _blocks_x: c_uint, _blocks_y: c_uint, _blocks_z: c_uint, _threads_x: c_uint,
            _threads_y: c_uint, _threads_z: c_uint, _shared_bytes: c_uint, stream: usize, _parameters: usize,
            _extra: usize
        ) { model::launch(stream); SUCCESS }
        cuMemHostRegister_v2(start: usize, bytes: usize, _flags: c_uint) { model::pin(start, bytes); SUCCESS }
        cuMemHostUnregister(start: usize) { model::unpin(start); SUCCESS }
        cuMemcpyHtoDAsync_v2(_target: u64, _source: usize, bytes: usize, stream: usize) { model::copy(stream, bytes); SUCCESS }
        cuMemcpyDtoHAsync_v2(_target: usize, _source: u64, _bytes: usize, _stream: usize) { SUCCESS }
        cuMemcpy2DAsync_v2(_copy: *const c_void, _stream: usize) { SUCCESS }
        cuGetErrorName(_error: c_uint, text: *mut *const c_char) { store(text, c"error".as_ptr()) }
        cuGetErrorString(_error: c_uint, text: *mut *const c_char) { store(text, c"error".as_ptr()) }
    }
}

pub use calls::*;
