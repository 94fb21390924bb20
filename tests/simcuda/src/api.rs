//! Entry points of the driver, with the names and types of CUDA 12.0, the oldest
//! that fst supports. Names of later versions are left out, so that fst cannot
//! require them. Handles are integers, which the C ABI passes like pointers.

#![allow(non_snake_case, reason = "the names are CUDA's")]

use crate::abi::{CaptureMode, Memcpy2D, Status};
use crate::capture;
use crate::context::{self, DEVICES};
use crate::copy_to_device::regions_of;
use crate::driver::{DRIVER, Driver};
use crate::launch::Grid;
use crate::region::Region;
use std::ffi::{CStr, c_char, c_int, c_uint};

/// Runs `body` on the state of the driver, or returns `NotInitialized` before `cuInit`.
fn call(body: impl FnOnce(&mut Driver) -> Result<(), Status>) -> Status {
    let mut driver = DRIVER.lock();
    if !driver.initialized {
        return Status::NotInitialized;
    }
    let result = body(&mut driver);
    drop(driver);
    DRIVER.notify_all();
    status(result)
}

/// Runs `body` as [`call`] does, unless a capture makes this call illegal.
fn call_potentially_unsafe(name: &str, body: impl FnOnce(&mut Driver) -> Result<(), Status>) -> Status {
    call(|driver| driver.potentially_unsafe(name).and_then(|()| body(driver)))
}

fn status(result: Result<(), Status>) -> Status {
    result.err().unwrap_or(Status::Success)
}

/// Writes a result to an output pointer of the caller.
fn store<T>(out: *mut T, value: T) -> Result<(), Status> {
    if out.is_null() {
        return Err(Status::InvalidValue);
    }
    // SAFETY: the pointer is not null, and the caller guarantees that it is valid for a `T`.
    unsafe { out.write(value) };
    Ok(())
}

/// Initializes the driver. Every other call before this one fails.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> Status {
    if flags != 0 {
        return Status::InvalidValue;
    }
    DRIVER.lock().initialized = true;
    Status::Success
}

/// Returns the number of devices.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Status {
    call(|_| store(count, DEVICES as c_int))
}

/// Returns the handle of a device, which equals its ordinal.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Status {
    call(|driver| {
        driver.device(ordinal)?;
        store(device, ordinal)
    })
}

/// Returns the PCI address of a device, in the format of `/sys/bus/pci/devices`.
///
/// # Safety
/// `text` is valid for writes of `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: c_int) -> Status {
    call(|driver| {
        let name = format!("0000:{:02X}:00.0\0", 0x51 + driver.device(device)?);
        if text.is_null() || usize::try_from(length).is_ok_and(|length| length < name.len()) {
            return Err(Status::InvalidValue);
        }
        // SAFETY: `text` is valid for `length` bytes, and `name` is not longer.
        unsafe { text.cast::<u8>().copy_from_nonoverlapping(name.as_ptr(), name.len()) };
        Ok(())
    })
}

/// See [`Driver::retain_context`].
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) -> Status {
    call(|driver| store(context, driver.retain_context(device)?))
}

/// See [`Driver::release_context`].
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> Status {
    call(|driver| driver.release_context(device))
}

/// See [`Driver::set_current`].
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: usize) -> Status {
    call(|driver| driver.set_current(context))
}

/// Returns the calling thread's context, or null without a context.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(context: *mut usize) -> Status {
    call(|_| store(context, context::current()))
}

/// Returns the device of the calling thread's context.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetDevice(device: *mut c_int) -> Status {
    call(|driver| store(device, driver.device_of(context::current())? as c_int))
}

/// Creates a stream. The flags have no effect: no stream synchronizes with the default stream.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreate(stream: *mut usize, _flags: c_uint) -> Status {
    call_potentially_unsafe("cuStreamCreate", |driver| store(stream, driver.create_stream()?))
}

/// See [`Driver::destroy_stream`].
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: usize) -> Status {
    call_potentially_unsafe("cuStreamDestroy", |driver| driver.destroy_stream(stream))
}

/// See [`Driver::wait_event`].
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) -> Status {
    call(|driver| driver.wait_event(stream, event))
}

/// Waits until all work on the stream has run.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: usize) -> Status {
    status(DRIVER.synchronize_stream(stream))
}

/// See [`Driver::capture_status`].
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamIsCapturing(stream: usize, status: *mut c_uint) -> Status {
    call(|driver| store(status, driver.capture_status(stream)?))
}

/// See [`Driver::begin_capture`].
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: usize, mode: CaptureMode) -> Status {
    call(|driver| driver.begin_capture(stream, mode))
}

/// See [`Driver::end_capture`]. The graph is null.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamEndCapture(stream: usize, graph: *mut usize) -> Status {
    call(|driver| driver.end_capture(stream).and_then(|()| store(graph, 0)))
}

/// See [`capture::exchange_mode`].
///
/// # Safety
/// `mode` is null or valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut CaptureMode) -> Status {
    // SAFETY: guaranteed by the caller.
    let Some(mode) = (unsafe { mode.as_mut() }) else {
        return Status::InvalidValue;
    };
    *mode = capture::exchange_mode(*mode);
    Status::Success
}

/// See [`Driver::load_module`].
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadData(module: *mut usize, image: usize) -> Status {
    call_potentially_unsafe("cuModuleLoadData", |driver| store(module, driver.load_module(image as u64)?))
}

/// See [`Driver::unload_module`].
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: usize) -> Status {
    call_potentially_unsafe("cuModuleUnload", |driver| driver.unload_module(module))
}

/// See [`Driver::function`].
///
/// # Safety
/// `name` is null or a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) -> Status {
    if name.is_null() {
        return Status::InvalidValue;
    }
    // SAFETY: guaranteed by the caller.
    let name = unsafe { CStr::from_ptr(name) };
    call_potentially_unsafe("cuModuleGetFunction", |driver| store(function, driver.function(module, name)?))
}

/// See [`Driver::launch`].
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the parameters are CUDA's")]
pub extern "C" fn cuLaunchKernel(
    function: usize,
    blocks_x: c_uint,
    blocks_y: c_uint,
    blocks_z: c_uint,
    threads_x: c_uint,
    threads_y: c_uint,
    threads_z: c_uint,
    shared_bytes: c_uint,
    stream: usize,
    parameters: usize,
    extra: usize,
) -> Status {
    let grid = Grid {
        blocks: [blocks_x, blocks_y, blocks_z],
        threads: [threads_x, threads_y, threads_z],
        shared_bytes,
        has_extra: extra != 0,
    };
    call(|driver| driver.launch(function, grid, stream, parameters as u64))
}

/// Creates an event. Only the flag `CU_EVENT_DISABLE_TIMING` has an effect.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventCreate(event: *mut usize, flags: c_uint) -> Status {
    call_potentially_unsafe("cuEventCreate", |driver| store(event, driver.create_event(flags)?))
}

/// See [`Driver::record_event`].
#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: usize, stream: usize) -> Status {
    call(|driver| driver.record_event(event, stream))
}

/// Waits until the work before the event has run.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: usize) -> Status {
    status(DRIVER.synchronize_event(event))
}

/// Returns `NotReady` until the work before the event has run.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: usize) -> Status {
    call_potentially_unsafe("cuEventQuery", |driver| driver.query_event(event))
}

/// See [`Driver::elapsed_time`].
#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize) -> Status {
    call_potentially_unsafe("cuEventElapsedTime", |driver| store(milliseconds, driver.elapsed_time(start, end)?))
}

/// See [`Driver::destroy_event`].
#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: usize) -> Status {
    call_potentially_unsafe("cuEventDestroy", |driver| driver.destroy_event(event))
}

/// See [`Driver::allocate`].
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> Status {
    call_potentially_unsafe("cuMemAlloc", |driver| store(address, driver.allocate(bytes as u64)?))
}

/// See [`Driver::free`].
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> Status {
    call_potentially_unsafe("cuMemFree", |driver| driver.free(address))
}

/// See [`Driver::register`].
#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(start: usize, bytes: usize, flags: c_uint) -> Status {
    call_potentially_unsafe("cuMemHostRegister", |driver| driver.register(start as u64, bytes as u64, flags))
}

/// See [`Driver::unregister`].
#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(start: usize) -> Status {
    call_potentially_unsafe("cuMemHostUnregister", |driver| driver.unregister(start as u64))
}

/// Queues a copy to the device. An empty copy has no effect.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(target: u64, source: usize, bytes: usize, stream: usize) -> Status {
    if bytes == 0 {
        return Status::Success;
    }
    let regions = Region::linear(source as u64, bytes as u64).zip(Region::linear(target, bytes as u64));
    call(|driver| {
        let (source, target) = regions.ok_or(Status::InvalidValue)?;
        driver.copy_to_device(source, target, stream)
    })
}

/// Queues a copy to the host. An empty copy has no effect.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoHAsync_v2(target: usize, source: u64, bytes: usize, stream: usize) -> Status {
    if bytes == 0 {
        return Status::Success;
    }
    let regions = Region::linear(source, bytes as u64).zip(Region::linear(target as u64, bytes as u64));
    call(|driver| {
        let (source, target) = regions.ok_or(Status::InvalidValue)?;
        driver.copy_to_host(source, target, stream)
    })
}

/// Queues a strided copy to the device. An empty copy has no effect.
///
/// # Safety
/// `copy` is null or points to a valid description.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy2DAsync_v2(copy: *const Memcpy2D, stream: usize) -> Status {
    // SAFETY: guaranteed by the caller.
    let Some(copy) = (unsafe { copy.as_ref() }) else {
        return Status::InvalidValue;
    };
    call(|driver| match regions_of(copy)? {
        Some((source, target)) => driver.copy_to_device(source, target, stream),
        None => Ok(()),
    })
}

/// Returns the name of an error constant.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(error: c_uint, text: *mut *const c_char) -> Status {
    describe(error, text, |(_, name, _)| *name)
}

/// Returns the description of an error.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(error: c_uint, text: *mut *const c_char) -> Status {
    describe(error, text, |(_, _, text)| *text)
}

type Description = (Status, &'static CStr, &'static CStr);

const DESCRIPTIONS: &[Description] = &[
    (Status::Success, c"CUDA_SUCCESS", c"no error"),
    (Status::InvalidValue, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (Status::OutOfMemory, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (Status::NotInitialized, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (Status::Deinitialized, c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
    (Status::InvalidDevice, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (Status::InvalidImage, c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
    (
        Status::UnsupportedPtxVersion,
        c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        c"the provided PTX was compiled with an unsupported toolchain",
    ),
    (Status::InvalidContext, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (Status::NoBinaryForGpu, c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"no kernel image is available for the device"),
    (Status::InvalidHandle, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (Status::NotFound, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (Status::NotReady, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (Status::IllegalAddress, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
    (Status::LaunchOutOfResources, c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", c"too many resources requested for launch"),
    (
        Status::HostMemoryAlreadyRegistered,
        c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        c"part or all of the memory is registered already",
    ),
    (
        Status::HostMemoryNotRegistered,
        c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        c"the pointer is not the start of registered memory",
    ),
    (Status::NotSupported, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (
        Status::StreamCaptureUnsupported,
        c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        c"operation not permitted when stream is capturing",
    ),
    (
        Status::StreamCaptureInvalidated,
        c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        c"operation failed due to a previous error during capture",
    ),
    (Status::Unknown, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

fn describe(error: c_uint, text: *mut *const c_char, field: impl Fn(&Description) -> &'static CStr) -> Status {
    let found = DESCRIPTIONS.iter().find(|(status, _, _)| *status as c_uint == error);
    let result = store(text, found.map_or(std::ptr::null(), |description| field(description).as_ptr()));
    status(result.and(found.map(|_| ()).ok_or(Status::InvalidValue)))
}
