//! Handles of the CUDA driver with their lifetimes, and its errors.

use crate::device::CopyInFlight;
use crate::error::{Error, Kind, Result};
use cudarc::driver::sys;
use std::ffi::{CStr, c_char};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Functions of the driver that fst calls, all of which the driver of CUDA 12.0 has. cudarc panics where one is absent.
pub const FUNCTIONS: &str = "\
    cuCtxGetCurrent cuCtxGetDevice cuCtxSetCurrent cuDeviceGet cuDeviceGetPCIBusId cuDevicePrimaryCtxRelease_v2 \
    cuDevicePrimaryCtxRetain cuEventCreate cuEventDestroy_v2 cuEventQuery cuEventRecord cuEventSynchronize \
    cuGetErrorName cuGetErrorString cuInit cuLaunchKernel cuMemHostRegister_v2 cuMemHostUnregister \
    cuMemcpy2DAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2 cuModuleGetFunction cuModuleLoadData \
    cuModuleUnload cuStreamCreate cuStreamDestroy_v2 cuStreamIsCapturing cuStreamSynchronize cuStreamWaitEvent \
    cuThreadExchangeStreamCaptureMode";

/// Checks that the driver is installed and complete. The search tries many names, so it ends with the first success. After
/// a failure, which may be for lack of descriptors, the next load searches again.
fn check_driver() -> Result<()> {
    static IS_FOUND: AtomicBool = AtomicBool::new(false);
    if !IS_FOUND.load(Ordering::Relaxed) {
        // SAFETY: only opens the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::new(Kind::Device, "libcuda, the CUDA driver, cannot be opened; is it installed?"));
        }
        // SAFETY: only looks up symbols.
        check_functions(|name| unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok())?;
        IS_FOUND.store(true, Ordering::Relaxed);
    }
    Ok(())
}

/// Checks that a driver has all functions that fst calls.
///
/// # Errors
/// `device`, with the name of the first function that it lacks.
pub fn check_functions(has: impl Fn(&str) -> bool) -> Result<()> {
    FUNCTIONS.split_whitespace().find(|name| !has(name)).map_or(Ok(()), |name| {
        let message = format!("the CUDA driver is too old: it lacks {name}; install a driver for CUDA 12.0 or newer");
        Err(Error::new(Kind::Device, message))
    })
}

/// Name of `cuEventElapsedTime` in every driver. cudarc knows only the name that drivers have since CUDA 12.8.
const ELAPSED_TIME: &[u8] = b"cuEventElapsedTime";
type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// `CU_STREAM_LEGACY`: the default stream of the current context, as is 0.
const LEGACY_STREAM: u64 = 1;
/// `CU_STREAM_PER_THREAD`: the default stream of the current context and the calling thread.
const PER_THREAD_STREAM: u64 = 2;

/// Primary context of a GPU, which PyTorch also uses.
pub struct Context {
    pub(super) device: sys::CUdevice,
    handle: sys::CUcontext,
}

// SAFETY: driver handles may be used from any thread; the context is made current on it first.
unsafe impl Send for Context {}
// SAFETY: as above, and the driver serializes calls on one handle.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the context of the GPU with this ordinal until the last reference is dropped.
    ///
    /// # Errors
    /// `device` if there is no driver or no such GPU.
    pub fn retain(ordinal: i32) -> Result<Arc<Context>> {
        check_driver()?;
        // SAFETY: the first call of the driver; it may be repeated.
        check("cuInit", unsafe { sys::cuInit(0) })?;
        let mut device = 0;
        // SAFETY: writes the handle of a device.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes the handle of the context, which `drop` releases.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut handle, device) })?;
        Ok(Arc::new(Context { device, handle }))
    }

    /// Waits for all work on a stream on which the driver records no event, as after a fault of the GPU: the driver then
    /// returns at once. No signal ends the wait.
    pub(super) fn settle(&self, stream: sys::CUstream) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: the stream belongs to the context, which is current.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })
    }

    /// Returns whether the work before an event is complete.
    ///
    /// # Safety
    /// The event must belong to the context.
    pub(super) unsafe fn is_done(&self, event: sys::CUevent) -> Result<bool> {
        let _bound = self.bind()?;
        // SAFETY: the caller's promise; the context is current.
        match unsafe { sys::cuEventQuery(event) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Makes the context current on this thread, and all calls of the driver legal while a graph is captured.
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
        let mut bound = Bound { before, is_changed, mode: RELAXED };
        bound.mode = exchange_capture_mode(RELAXED)?;
        Ok(bound)
    }

    /// Returns the driver's handle of the caller's current stream, which crossed the FFI boundary as a number. Must be
    /// called on the caller's thread.
    ///
    /// Three handles are not streams, but refer to the default stream of the context that is current where they are used,
    /// or of the thread. Copies are queued in this context, and on any thread.
    ///
    /// # Errors
    /// `invalid-argument` if the handle would refer to another stream there, `device` from the driver, `internal` if the
    /// number is not an address.
    pub(super) fn stream_of_caller(&self, stream: u64) -> Result<sys::CUstream> {
        let refuse = |what| {
            let advice = "make a stream of torch.cuda.Stream() current";
            Err(Error::new(Kind::InvalidArgument, format!("the current stream is {what}; {advice}")))
        };
        match stream {
            PER_THREAD_STREAM => refuse("the per-thread default stream, which is another one on each thread of fst"),
            0 | LEGACY_STREAM if self.is_hidden()? => {
                refuse("the default stream of another CUDA context than the primary one, such as a green context")
            }
            _ => {
                let wrong = |_| Error::new(Kind::Internal, format!("{stream:#x} is not the handle of a stream"));
                Ok(ptr::with_exposed_provenance_mut(usize::try_from(stream).map_err(wrong)?))
            }
        }
    }

    /// Returns whether another context of the same GPU is current on this thread.
    fn is_hidden(&self) -> Result<bool> {
        let mut current = ptr::null_mut();
        // SAFETY: writes the handle of the current context.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&raw mut current) })?;
        if current.is_null() || current == self.handle {
            return Ok(false);
        }
        let mut device = 0;
        // SAFETY: writes the handle of the device of the current context.
        check("cuCtxGetDevice", unsafe { sys::cuCtxGetDevice(&raw mut device) })?;
        Ok(device == self.device)
    }

    /// Refuses a stream that is being captured into a CUDA graph.
    ///
    /// A replay of the graph would repeat the copies, but not the reads, from slots that hold other bytes by then.
    ///
    /// # Errors
    /// `invalid-argument` if the stream is being captured, `device` from the driver.
    pub(super) fn refuse_capture(&self, stream: sys::CUstream) -> Result<()> {
        let _bound = self.bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: writes the status of a stream of the context, which is current.
        check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(stream, &raw mut status) })?;
        if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Ok(());
        }
        Err(Error::new(
            Kind::InvalidArgument,
            "the current stream is being captured into a CUDA graph, which cannot read or write files; load before \
             the capture, and save after it",
        ))
    }

    /// Returns the PCI address of the GPU, such as `0000:3b:00.0`.
    pub fn pci_id(&self) -> Result<String> {
        let mut text: [c_char; 32] = [0; 32];
        let length = i32::try_from(text.len()).unwrap_or(0);
        // SAFETY: writes at most `length` characters, including the terminating zero.
        let result = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), length, self.device) };
        check("cuDeviceGetPCIBusId", result)?;
        // SAFETY: the driver has terminated the text with a zero.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: this value retained the context once.
        report("cuDevicePrimaryCtxRelease", unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) });
    }
}

/// Mode of a thread in which its calls of the driver do not end captures of CUDA graphs.
///
/// In the default mode of threads and of PyTorch's captures, a query of an event, a wait or the registration of memory
/// on any thread makes all captures invalid, and fails. No capture depends on fst's calls: a captured stream is refused.
const RELAXED: sys::CUstreamCaptureMode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;

/// Sets the capture mode of this thread and returns the one before.
fn exchange_capture_mode(mut mode: sys::CUstreamCaptureMode) -> Result<sys::CUstreamCaptureMode> {
    // SAFETY: reads a mode and writes another one.
    check("cuThreadExchangeStreamCaptureMode", unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) })?;
    Ok(mode)
}

/// Guard that makes a context current and the capture mode of this thread relaxed. It restores the previous ones when it
/// is dropped.
///
/// PyTorch's current device is the current context, so a thread of the caller must get it back.
pub struct Bound {
    before: sys::CUcontext,
    is_changed: bool,
    /// Capture mode of the thread before.
    mode: sys::CUstreamCaptureMode,
}

impl Drop for Bound {
    fn drop(&mut self) {
        // A guard inside of another one finds the mode relaxed.
        if self.mode != RELAXED
            && let Err(error) = exchange_capture_mode(self.mode)
        {
            tracing::debug!(%error, "the capture mode of a thread could not be restored");
        }
        if self.is_changed {
            // SAFETY: this context was current before; null is allowed.
            report("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.before) });
        }
    }
}

/// CUDA stream.
pub struct Stream {
    pub(super) handle: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above, and the driver serializes calls on one handle.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream.
    pub fn create(context: &Arc<Context>) -> Result<Stream> {
        let _bound = context.bind()?;
        let mut handle = ptr::null_mut();
        // Without NON_BLOCKING, this stream and the legacy default stream would wait for each other.
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes the handle of a stream, which `drop` destroys.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut handle, flags) })?;
        Ok(Stream { handle, context: Arc::clone(context) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: this value created the stream. The driver finishes queued work first.
            report("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(self.handle) });
        }
    }
}

/// CUDA event: a point in the work of a stream.
pub struct Event {
    pub(super) handle: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above, and the driver serializes calls on one handle.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event without timing, which costs the GPU least. Its users query it.
    pub fn create(context: &Arc<Context>) -> Result<Event> {
        Event::with_flags(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
    }

    /// Creates an event with timing.
    pub fn timed(context: &Arc<Context>) -> Result<Event> {
        // A waiting thread spins, so that it sees the event without delay.
        Event::with_flags(context, sys::CUevent_flags::CU_EVENT_DEFAULT as u32)
    }

    fn with_flags(context: &Arc<Context>, flags: u32) -> Result<Event> {
        let _bound = context.bind()?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes the handle of an event, which `drop` destroys.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut handle, flags) })?;
        Ok(Event { handle, context: Arc::clone(context) })
    }

    /// Records the event after all work queued on a stream of its context.
    pub(super) fn record(&self, stream: sys::CUstream) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: event and stream belong to the context, which is current.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.handle, stream) })
    }

    /// Waits in the driver for the work before the event, which must be short: the thread spins, and no signal ends the wait.
    pub fn synchronize(&self) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: the event belongs to the context, which is current.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.handle) })
    }

    /// Returns the nanoseconds from an earlier event to this one. Both have timing and are complete.
    pub fn nanoseconds_since(&self, earlier: &Event) -> Result<u64> {
        let _bound = self.context.bind()?;
        let mut milliseconds = 0.0;
        // SAFETY: the driver is open, and the function has this type.
        let found = unsafe { sys::culib().get::<ElapsedTime>(ELAPSED_TIME) };
        let elapsed_time =
            found.map_err(|error| Error::new(Kind::Device, format!("the driver is too old: {error}")))?;
        // SAFETY: writes a number. Both events belong to the context, which is current.
        check("cuEventElapsedTime", unsafe { elapsed_time(&raw mut milliseconds, earlier.handle, self.handle) })?;
        let elapsed = Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default();
        Ok(u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl CopyInFlight for Event {
    fn is_done(&self) -> Result<bool> {
        // SAFETY: the event belongs to the context.
        unsafe { self.context.is_done(self.handle) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: this value created the event. The driver keeps it until queued work has used it.
            report("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(self.handle) });
        }
    }
}

/// Registration of host memory, which lets every GPU access it directly.
pub struct Registered {
    address: *mut u8,
    context: Arc<Context>,
}

// SAFETY: only the address is used, to end the registration.
unsafe impl Send for Registered {}
// SAFETY: as above; a shared reference has no methods.
unsafe impl Sync for Registered {}

impl Registered {
    /// Registers memory.
    ///
    /// # Safety
    /// The memory must outlive the registration.
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
            // SAFETY: this value registered the memory once.
            report("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(self.address.cast()) });
        }
    }
}

/// Turns the result of a driver call into an error.
///
/// # Errors
/// `out-of-memory` or `device`, with the call, the name of the error and its description.
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
        sys::CUresult::CUDA_ERROR_STUB_LIBRARY => "; remove the directory of driver stubs from LD_LIBRARY_PATH",
        _ => "",
    };
    Err(Error::new(kind, format!("{call} failed with {name}: {meaning}{advice}")))
}

fn text_of(result: sys::CUresult, ask: impl Fn(sys::CUresult, *mut *const c_char) -> sys::CUresult) -> String {
    let mut text = ptr::null();
    match ask(result, &raw mut text) {
        sys::CUresult::CUDA_SUCCESS if !text.is_null() => {
            // SAFETY: the driver returned a static string that a zero terminates.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        }
        _ => format!("{result:?}"),
    }
}

/// Logs the error of a driver call during clean-up, where it cannot be returned.
pub fn report(call: &str, result: sys::CUresult) {
    if let Err(error) = check(call, result) {
        tracing::debug!(%error, "a resource could not be released");
    }
}
