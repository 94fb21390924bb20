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

/// Exports calls, each with its parameters and what it does to the driver.
macro_rules! calls {
    (legal during captures: $($name:ident($($parameter:ident: $type:ty),*) $body:expr;)*) => {
        $(calls!(@ $name($($parameter: $type),*) call($body));)*
    };
    (potentially unsafe during captures: $($name:ident($($parameter:ident: $type:ty),*) $body:expr;)*) => {
        $(calls!(@ $name($($parameter: $type),*) call_potentially_unsafe(stringify!($name), $body));)*
    };
    (@ $name:ident($($parameter:ident: $type:ty),*) $call:expr) => {
        #[doc = concat!("`", stringify!($name), "`")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($parameter: $type),*) -> Status {
            $call
        }
    };
}

calls! {
    legal during captures:
    cuDeviceGetCount(count: *mut c_int) |_| store(count, DEVICES as c_int);
    cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int)
        |driver| store(context, driver.retain_context(device)?);
    cuDevicePrimaryCtxRelease_v2(device: c_int) |driver| driver.release_context(device);
    cuCtxSetCurrent(context: usize) |driver| driver.set_current(context);
    cuCtxGetCurrent(context: *mut usize) |_| store(context, context::current());
    cuCtxGetDevice(device: *mut c_int) |driver| store(device, driver.device_of(context::current())? as c_int);
    cuStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) |driver| driver.wait_event(stream, event);
    cuStreamIsCapturing(stream: usize, status: *mut c_uint) |driver| store(status, driver.capture_status(stream)?);
    cuStreamBeginCapture_v2(stream: usize, mode: CaptureMode) |driver| driver.begin_capture(stream, mode);
    // The graph is null.
    cuStreamEndCapture(stream: usize, graph: *mut usize)
        |driver| driver.end_capture(stream).and_then(|()| store(graph, 0));
    cuEventRecord(event: usize, stream: usize) |driver| driver.record_event(event, stream);
}

calls! {
    potentially unsafe during captures:
    // The flags have no effect: no stream synchronizes with the default stream.
    cuStreamCreate(stream: *mut usize, _flags: c_uint) |driver| store(stream, driver.create_stream()?);
    cuStreamDestroy_v2(stream: usize) |driver| driver.destroy_stream(stream);
    cuModuleLoadData(module: *mut usize, image: usize) |driver| store(module, driver.load_module(image as u64)?);
    cuModuleUnload(module: usize) |driver| driver.unload_module(module);
    // Only the flag `CU_EVENT_DISABLE_TIMING` has an effect.
    cuEventCreate(event: *mut usize, flags: c_uint) |driver| store(event, driver.create_event(flags)?);
    cuEventQuery(event: usize) |driver| driver.query_event(event);
    cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize)
        |driver| store(milliseconds, driver.elapsed_time(start, end)?);
    cuEventDestroy_v2(event: usize) |driver| driver.destroy_event(event);
    cuMemAlloc_v2(address: *mut u64, bytes: usize) |driver| store(address, driver.allocate(bytes as u64)?);
    cuMemFree_v2(address: u64) |driver| driver.free(address);
    cuMemHostRegister_v2(start: usize, bytes: usize, flags: c_uint)
        |driver| driver.register(start as u64, bytes as u64, flags);
    cuMemHostUnregister(start: usize) |driver| driver.unregister(start as u64);
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

/// Waits until all work on the stream has run.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: usize) -> Status {
    status(DRIVER.synchronize_stream(stream))
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

/// Waits until the work before the event has run.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: usize) -> Status {
    status(DRIVER.synchronize_event(event))
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
    describe(error, text, Status::name)
}

/// Returns the description of an error.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(error: c_uint, text: *mut *const c_char) -> Status {
    describe(error, text, Status::text)
}

/// Stores a text of an error, which is null for an unknown error.
fn describe(error: c_uint, text: *mut *const c_char, of: impl Fn(Status) -> &'static CStr) -> Status {
    let found = Status::ALL.iter().find(|status| **status as c_uint == error);
    let result = store(text, found.map_or(std::ptr::null(), |&found| of(found).as_ptr()));
    status(result.and(found.map(|_| ()).ok_or(Status::InvalidValue)))
}
