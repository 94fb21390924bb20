//! An NVIDIA GPU, through the driver that is opened at run time. The only file
//! that names cudarc.
//!
//! Copies run on a stream of our own, so that they overlap with whatever the
//! caller does, and two events order them with the caller's current stream:
//! the copies come after what was queued before (the allocator may have handed
//! out a block whose last use is still queued), and what is queued afterwards
//! comes after the copies.

pub mod kernels;

use super::Device;
use crate::error::{Error, Kind, Result};
use crate::plan::Placement;
use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

/// A GPU and the stream of the caller for which tensors are loaded.
pub struct Cuda {
    // In this order: events and the stream end before the context is let go.
    events: Mutex<Vec<Event>>,
    copies: Stream,
    context: Context,
    current: sys::CUstream,
}

// SAFETY: driver handles may be used from any thread; the context is made current on it first.
unsafe impl Send for Cuda {}
// SAFETY: as above, and the driver serialises calls on one handle.
unsafe impl Sync for Cuda {}

impl Cuda {
    /// The GPU with this ordinal. `current` is the native handle of the caller's current stream on it.
    ///
    /// # Errors
    /// `device` where there is no driver or no such GPU.
    pub fn open(ordinal: i32, current: u64) -> Result<Cuda> {
        if !has_driver() {
            return Err(Error::new(Kind::Device, "libcuda, the CUDA driver, cannot be opened; is it installed?"));
        }
        // SAFETY: must be called before any other call of the driver, any number of times.
        check("cuInit", unsafe { sys::cuInit(0) })?;
        let context = Context::retain(ordinal)?;
        let _bound = context.bind()?;
        let copies = Stream::create(&context)?;
        let current = usize::try_from(current)
            .map_err(|_| Error::new(Kind::Internal, format!("{current:#x} is not the handle of a stream")))?;
        Ok(Cuda { events: Mutex::new(Vec::new()), copies, context, current: ptr::with_exposed_provenance_mut(current) })
    }

    /// Events are reused, since a load needs as many as it has slots and there are many more chunks.
    fn event(&self) -> Result<Event> {
        let spare = self.events.lock().unwrap_or_else(PoisonError::into_inner).pop();
        spare.map_or_else(|| Event::create(&self.context), Ok)
    }

    fn keep(&self, event: Event) {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }

    /// Makes `later` wait for all that is queued on `earlier`.
    fn order(&self, earlier: sys::CUstream, later: sys::CUstream) -> Result<()> {
        let _bound = self.context.bind()?;
        let event = self.event()?;
        // SAFETY: event and streams belong to the context, which is current.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.handle, earlier) })?;
        // SAFETY: as above.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(later, event.handle, 0) })?;
        self.keep(event);
        Ok(())
    }

    fn enqueue(&self, bytes: &[u8], placement: &Placement) -> Result<()> {
        let Placement { slot_begin, row_bytes, rows, slot_stride, address } = *placement;
        let last = slot_begin + rows.saturating_sub(1) * slot_stride + row_bytes;
        let from = bytes
            .get(slot_begin..last)
            .ok_or_else(|| Error::new(Kind::Internal, format!("{placement:?} does not fit its slot")))?
            .as_ptr()
            .cast::<c_void>();
        if rows == 1 {
            // SAFETY: `from` lies in the slot, which stays as it is until the copy has ended, and the
            // destination is memory that the caller gave to the load.
            let result = unsafe { sys::cuMemcpyHtoDAsync_v2(address, from, row_bytes, self.copies.handle) };
            return check("cuMemcpyHtoDAsync", result);
        }
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
            srcHost: from,
            srcDevice: 0,
            srcArray: ptr::null_mut(),
            srcPitch: slot_stride,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: ptr::null_mut(),
            dstDevice: address,
            dstArray: ptr::null_mut(),
            dstPitch: row_bytes,
            WidthInBytes: row_bytes,
            Height: rows,
        };
        // SAFETY: as above, row by row.
        check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.copies.handle) })
    }
}

impl Device for Cuda {
    type Ticket = Event;
    type Pinned = Pinned;

    fn pin(&self, address: *mut u8, length: usize) -> Option<Pinned> {
        let pinned = self.context.bind().and_then(|_bound| {
            // SAFETY: the range is memory of this process, which outlives the registration.
            let result = unsafe { sys::cuMemHostRegister_v2(address.cast(), length, sys::CU_MEMHOSTREGISTER_PORTABLE) };
            check("cuMemHostRegister", result)
        });
        match pinned {
            Ok(()) => Some(Pinned { address, context: self.context.handle }),
            Err(error) => {
                tracing::warn!(%error, length, "staging could not be pinned; copies to the GPU will be slow");
                None
            }
        }
    }

    fn is_host(&self) -> bool {
        false
    }

    fn begin(&self) -> Result<()> {
        self.order(self.current, self.copies.handle)
    }

    fn copy(&self, bytes: &[u8], placements: &[Placement]) -> Result<Event> {
        let _bound = self.context.bind()?;
        let event = self.event()?;
        let queued = placements.iter().try_for_each(|placement| self.enqueue(bytes, placement)).and_then(|()| {
            // SAFETY: event and stream belong to the context, which is current.
            check("cuEventRecord", unsafe { sys::cuEventRecord(event.handle, self.copies.handle) })
        });
        match queued {
            Ok(()) => Ok(event),
            Err(error) => {
                // The copies that were queued before the one that failed still read the slot.
                // SAFETY: the stream belongs to the context, which is current.
                let result = unsafe { sys::cuStreamSynchronize(self.copies.handle) };
                if let Err(also) = check("cuStreamSynchronize", result) {
                    tracing::debug!(error = %also, "after a failed copy");
                }
                Err(error)
            }
        }
    }

    fn wait(&self, ticket: Event) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: the event belongs to the context, which is current.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(ticket.handle) })?;
        self.keep(ticket);
        Ok(())
    }

    fn end(&self) -> Result<()> {
        self.order(self.copies.handle, self.current)
    }
}

/// Looks for the driver once, since the search goes through many names.
fn has_driver() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    // SAFETY: only opens the library.
    *FOUND.get_or_init(|| unsafe { sys::is_culib_present() })
}

/// The primary context of a GPU, the one that PyTorch uses.
struct Context {
    device: sys::CUdevice,
    handle: sys::CUcontext,
}

impl Context {
    fn retain(ordinal: i32) -> Result<Context> {
        let mut device = 0;
        // SAFETY: writes the handle of a device.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes the handle of the context, which is released on drop.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut handle, device) })?;
        Ok(Context { device, handle })
    }

    fn bind(&self) -> Result<Bound> {
        bind(self.handle)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by this value.
        report("cuDevicePrimaryCtxRelease", unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) });
    }
}

/// A context that is current on this thread until the one before it is again. PyTorch's notion of the
/// current device is the current context, so a thread of the caller must get it back.
struct Bound {
    before: sys::CUcontext,
    is_changed: bool,
}

fn bind(context: sys::CUcontext) -> Result<Bound> {
    let mut before = ptr::null_mut();
    // SAFETY: writes the handle of the current context.
    check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&raw mut before) })?;
    let is_changed = before != context;
    if is_changed {
        // SAFETY: the context is retained.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })?;
    }
    Ok(Bound { before, is_changed })
}

impl Drop for Bound {
    fn drop(&mut self) {
        if self.is_changed {
            // SAFETY: this context was current, and null is allowed.
            report("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.before) });
        }
    }
}

struct Stream {
    handle: sys::CUstream,
    context: sys::CUcontext,
}

impl Stream {
    fn create(context: &Context) -> Result<Stream> {
        let mut handle = ptr::null_mut();
        // Without NON_BLOCKING the stream would wait for the legacy default stream, and that for it.
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes the handle of a stream, which is destroyed on drop.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut handle, flags) })?;
        Ok(Stream { handle, context: context.handle })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_bound) = bind(self.context) {
            // SAFETY: created by this value; the driver lets queued work end first.
            report("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(self.handle) });
        }
    }
}

/// A point in the work of a stream.
pub struct Event {
    handle: sys::CUevent,
    context: sys::CUcontext,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    fn create(context: &Context) -> Result<Event> {
        let mut handle = ptr::null_mut();
        // A thread that waits sleeps instead of spinning; nobody asks for times.
        let flags =
            sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32 | sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: writes the handle of an event, which is destroyed on drop.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut handle, flags) })?;
        Ok(Event { handle, context: context.handle })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_bound) = bind(self.context) {
            // SAFETY: created by this value; the driver keeps it until queued work has used it.
            report("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(self.handle) });
        }
    }
}

/// Host memory that the GPU may read by itself.
pub struct Pinned {
    address: *mut u8,
    context: sys::CUcontext,
}

// SAFETY: only the address is used, to end the registration.
unsafe impl Send for Pinned {}
// SAFETY: as above; nothing can be done with a shared one.
unsafe impl Sync for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(_bound) = bind(self.context) {
            // SAFETY: registered once by this value.
            report("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(self.address.cast()) });
        }
    }
}

fn check(call: &str, result: sys::CUresult) -> Result<()> {
    let kind = match result {
        sys::CUresult::CUDA_SUCCESS => return Ok(()),
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Kind::OutOfMemory,
        _ => Kind::Device,
    };
    let name = text_of(result, |result, text| {
        // SAFETY: writes the address of a static string.
        unsafe { sys::cuGetErrorName(result, text) }
    });
    let meaning = text_of(result, |result, text| {
        // SAFETY: writes the address of a static string.
        unsafe { sys::cuGetErrorString(result, text) }
    });
    let advice = match result {
        sys::CUresult::CUDA_ERROR_STUB_LIBRARY => "; take the folder of driver stubs out of LD_LIBRARY_PATH",
        _ => "",
    };
    Err(Error::new(kind, format!("{call} failed with {name}: {meaning}{advice}")))
}

fn text_of(result: sys::CUresult, ask: impl Fn(sys::CUresult, *mut *const c_char) -> sys::CUresult) -> String {
    let mut text = ptr::null();
    match ask(result, &raw mut text) {
        sys::CUresult::CUDA_SUCCESS if !text.is_null() => {
            // SAFETY: the driver gave a string that ends in zero and lives for ever.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        }
        _ => format!("{result:?}"),
    }
}

/// For clean-up, where an error can only be told: the one that matters was returned before.
fn report(call: &str, result: sys::CUresult) {
    if let Err(error) = check(call, result) {
        tracing::debug!(%error, "while letting go");
    }
}
