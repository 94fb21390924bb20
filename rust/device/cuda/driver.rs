//! The driver's handles with their lifetimes, and its errors.

use crate::error::{Error, Kind, Result};
use cudarc::driver::sys;
use std::ffi::{CStr, c_char};
use std::ptr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Looks for the driver once, since the search goes through many names.
fn has_driver() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    // SAFETY: only opens the library.
    *FOUND.get_or_init(|| unsafe { sys::is_culib_present() })
}

/// The primary context of a GPU, the one that PyTorch uses.
pub struct Context {
    pub(super) device: sys::CUdevice,
    handle: sys::CUcontext,
}

// SAFETY: driver handles may be used from any thread; the context is made current on it first.
unsafe impl Send for Context {}
// SAFETY: as above, and the driver serialises calls on one handle.
unsafe impl Sync for Context {}

impl Context {
    /// The context of the GPU with this ordinal, kept alive for as long as somebody has it.
    ///
    /// # Errors
    /// `device` where there is no driver or no such GPU.
    pub fn retain(ordinal: i32) -> Result<Arc<Context>> {
        if !has_driver() {
            return Err(Error::new(Kind::Device, "libcuda, the CUDA driver, cannot be opened; is it installed?"));
        }
        // SAFETY: must be called before any other call of the driver, any number of times.
        check("cuInit", unsafe { sys::cuInit(0) })?;
        let mut device = 0;
        // SAFETY: writes the handle of a device.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes the handle of the context, which is released on drop.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut handle, device) })?;
        Ok(Arc::new(Context { device, handle }))
    }

    /// Makes the context current on this thread.
    ///
    /// # Errors
    /// `device`, from the driver.
    pub fn bind(&self) -> Result<Bound> {
        let context = self.handle;
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

    /// The PCI address of the GPU, such as `0000:3b:00.0`.
    ///
    /// # Errors
    /// `device`, from the driver.
    pub fn pci_id(&self) -> Result<String> {
        let mut text: [c_char; 32] = [0; 32];
        let length = i32::try_from(text.len()).unwrap_or(0);
        // SAFETY: writes at most that many characters, the last of them a zero.
        let result = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), length, self.device) };
        check("cuDeviceGetPCIBusId", result)?;
        // SAFETY: the driver has ended the text with a zero.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
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
pub struct Bound {
    before: sys::CUcontext,
    is_changed: bool,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if self.is_changed {
            // SAFETY: this context was current, and null is allowed.
            report("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.before) });
        }
    }
}

/// A queue of work for a GPU.
pub struct Stream {
    pub(super) handle: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above, and the driver serialises calls on one handle.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream.
    ///
    /// # Errors
    /// `device` or `out-of-memory`, from the driver.
    pub fn create(context: &Arc<Context>) -> Result<Stream> {
        let _bound = context.bind()?;
        let mut handle = ptr::null_mut();
        // Without NON_BLOCKING the stream would wait for the legacy default stream, and that for it.
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes the handle of a stream, which is destroyed on drop.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut handle, flags) })?;
        Ok(Stream { handle, context: Arc::clone(context) })
    }

    /// Lets all that is queued end after something has failed, which is the error to tell.
    pub fn settle(&self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: the stream belongs to the context, which is current.
            report("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle) });
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: created by this value; the driver lets queued work end first.
            report("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(self.handle) });
        }
    }
}

/// A point in the work of a stream.
pub struct Event {
    pub(super) handle: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above, and the driver serialises calls on one handle.
unsafe impl Sync for Event {}

impl Event {
    /// A new event, of which nothing is recorded yet.
    ///
    /// # Errors
    /// `device` or `out-of-memory`, from the driver.
    pub fn create(context: &Arc<Context>) -> Result<Event> {
        // A thread that waits sleeps instead of spinning; nobody asks for times.
        let flags =
            sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32 | sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        Event::with_flags(context, flags)
    }

    /// A new event that can be asked for times.
    ///
    /// # Errors
    /// `device` or `out-of-memory`, from the driver.
    pub fn timed(context: &Arc<Context>) -> Result<Event> {
        // A thread that waits spins, and so sees the end at once.
        Event::with_flags(context, sys::CUevent_flags::CU_EVENT_DEFAULT as u32)
    }

    /// As [`Event::timed`], in the context of this one.
    ///
    /// # Errors
    /// `device` or `out-of-memory`, from the driver.
    pub fn another(&self) -> Result<Event> {
        Event::timed(&self.context)
    }

    fn with_flags(context: &Arc<Context>, flags: u32) -> Result<Event> {
        let _bound = context.bind()?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes the handle of an event, which is destroyed on drop.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut handle, flags) })?;
        Ok(Event { handle, context: Arc::clone(context) })
    }

    /// Puts the event behind all that is queued on a stream of its context.
    ///
    /// # Errors
    /// `device`, from the driver.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: event and stream belong to the context, which is current.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.handle, stream.handle) })
    }

    /// Waits for the work before the event.
    ///
    /// # Errors
    /// `device` when that failed.
    pub fn wait(&self) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: the event belongs to the context, which is current.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.handle) })
    }

    /// The time from one timed event to this one, both of which have passed.
    ///
    /// # Errors
    /// `device`, from the driver.
    pub fn nanoseconds_since(&self, earlier: &Event) -> Result<u64> {
        let _bound = self.context.bind()?;
        let mut milliseconds = 0.0;
        // SAFETY: writes a number; both events belong to the context, which is current.
        let result = unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, earlier.handle, self.handle) };
        check("cuEventElapsedTime", result)?;
        let elapsed = Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default();
        Ok(u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: created by this value; the driver keeps it until queued work has used it.
            report("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(self.handle) });
        }
    }
}

/// Host memory that every GPU may read by itself.
pub struct Registered {
    address: *mut u8,
    context: Arc<Context>,
}

// SAFETY: only the address is used, to end the registration.
unsafe impl Send for Registered {}
// SAFETY: as above; nothing can be done with a shared one.
unsafe impl Sync for Registered {}

impl Registered {
    /// Registers memory.
    ///
    /// # Safety
    /// The memory must outlive the registration.
    ///
    /// # Errors
    /// `device` or `out-of-memory`, from the driver.
    pub unsafe fn new(context: &Arc<Context>, memory: &mut [u8]) -> Result<Registered> {
        let _bound = context.bind()?;
        let address = memory.as_mut_ptr();
        // SAFETY: the range is memory of this process, which outlives the registration.
        let result =
            unsafe { sys::cuMemHostRegister_v2(address.cast(), memory.len(), sys::CU_MEMHOSTREGISTER_PORTABLE) };
        check("cuMemHostRegister", result)?;
        Ok(Registered { address, context: Arc::clone(context) })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: registered once by this value.
            report("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(self.address.cast()) });
        }
    }
}

/// The error of a driver call that failed.
///
/// # Errors
/// `out-of-memory` or `device`, with the call, the name of the error and its meaning.
pub fn check(call: &str, result: sys::CUresult) -> Result<()> {
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
pub fn report(call: &str, result: sys::CUresult) {
    if let Err(error) = check(call, result) {
        tracing::debug!(%error, "while letting go");
    }
}
