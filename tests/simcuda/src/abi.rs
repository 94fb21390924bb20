//! Plain types of the C interface: types of CUDA, and types of the control interface.

use std::ffi::CStr;

macro_rules! statuses {
    ($($(#[$doc:meta])* $status:ident = $number:literal: $name:literal, $text:literal;)*) => {
        /// Result of a driver call, with the numbers, names and texts of CUDA.
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs, reason = "most texts say enough")]
        pub enum Status { $($(#[$doc])* $status = $number,)* }

        impl Status {
            /// Every status.
            pub const ALL: &[Status] = &[$(Status::$status),*];

            /// Name of the constant in CUDA.
            pub fn name(self) -> &'static CStr {
                match self { $(Status::$status => $name),* }
            }

            /// Description by CUDA.
            pub fn text(self) -> &'static CStr {
                match self { $(Status::$status => $text),* }
            }
        }
    };
}

statuses! {
    Success = 0: c"CUDA_SUCCESS", c"no error";
    InvalidValue = 1: c"CUDA_ERROR_INVALID_VALUE", c"invalid argument";
    OutOfMemory = 2: c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory";
    NotInitialized = 3: c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error";
    /// The simulator was reset while the call waited.
    Deinitialized = 4: c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down";
    InvalidDevice = 101: c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal";
    InvalidImage = 200: c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid";
    /// The PTX is of a later version than the driver's.
    UnsupportedPtxVersion = 222: c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", c"the provided PTX was compiled with an unsupported toolchain";
    /// The calling thread has no context, or the context of another stream.
    InvalidContext = 201: c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context";
    NoBinaryForGpu = 209: c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"no kernel image is available for the device";
    InvalidHandle = 400: c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle";
    NotFound = 500: c"CUDA_ERROR_NOT_FOUND", c"named symbol not found";
    /// The work before the event is still pending.
    NotReady = 600: c"CUDA_ERROR_NOT_READY", c"device not ready";
    /// A copy or a kernel failed after it was queued, and the context is lost.
    IllegalAddress = 700: c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered";
    LaunchOutOfResources = 701: c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", c"too many resources requested for launch";
    HostMemoryAlreadyRegistered = 712: c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"part or all of the memory is registered already";
    HostMemoryNotRegistered = 713: c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"the pointer is not the start of registered memory";
    /// Pinning is not permitted, as in a container that may not lock memory.
    NotSupported = 801: c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported";
    StreamCaptureUnsupported = 900: c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing";
    /// An operation that is not permitted has ended the capture.
    StreamCaptureInvalidated = 901: c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"operation failed due to a previous error during capture";
    /// A copy could not be queued.
    Unknown = 999: c"CUDA_ERROR_UNKNOWN", c"unknown error";
}

impl Status {
    /// Converts the status to a `Result`.
    pub fn check(self) -> Result<(), Status> {
        if self == Status::Success { Ok(()) } else { Err(self) }
    }
}

/// `CUmemorytype` of host memory.
pub const MEMORY_TYPE_HOST: u32 = 1;
/// `CUmemorytype` of device memory.
pub const MEMORY_TYPE_DEVICE: u32 = 2;
/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context.
pub const REGISTER_PORTABLE: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub const EVENT_DISABLE_TIMING: u32 = 2;
/// `CUstreamCaptureMode`: which potentially unsafe calls are legal while a stream is captured.
///
/// The modes of the capture and of the calling thread decide together.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CaptureMode {
    /// Calls of all threads matter. The default of threads, and of PyTorch's captures.
    #[default]
    Global = 0,
    /// Calls of the thread that captures matter.
    ThreadLocal = 1,
    /// All calls are legal.
    Relaxed = 2,
}

/// Byte that fills new device memory.
pub const POISON: u8 = 0xA7;

/// `CUDA_MEMCPY2D_v2`. Pitches and widths are in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the fields are CUDA's")]
pub struct Memcpy2D {
    pub src_x_bytes: usize,
    pub src_y: usize,
    pub src_memory_type: u32,
    pub src_host: usize,
    pub src_device: u64,
    pub src_array: usize,
    pub src_pitch: usize,
    pub dst_x_bytes: usize,
    pub dst_y: usize,
    pub dst_memory_type: u32,
    pub dst_host: usize,
    pub dst_device: u64,
    pub dst_array: usize,
    pub dst_pitch: usize,
    pub width_bytes: usize,
    pub height: usize,
}

/// Kind of failure that `sim_inject` requests.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// The n-th call that creates an object fails with out of memory. Objects are
    /// streams, events, registrations, device allocations, modules and retained
    /// contexts.
    OutOfMemory,
    /// The n-th copy is rejected when it is queued.
    CopyEnqueue,
    /// The n-th copy is queued, fails when it runs, and its context is lost.
    CopyAsync,
    /// Every later registration is rejected. The number is ignored.
    RefusePinning,
    /// The first n modules are rejected for a reason that passes.
    ModulesPass,
    /// Every later module is rejected, like a module without code for the device. The number is ignored.
    RefuseModules,
    /// Every later fatbin is rejected, as by a driver that is older than the compiler. The number is ignored.
    RefuseFatbins,
    /// The n-th launch is rejected when it is queued.
    LaunchEnqueue,
    /// The n-th launch is queued, fails when it runs, and its context is lost.
    LaunchAsync,
}

/// Time at which queued work runs.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// Work runs after a random delay.
    #[default]
    Random,
    /// Work runs as late as possible: while a host thread waits for work. A query
    /// of an event lets one item of work run.
    Lazy,
    /// No work runs, as behind a kernel of the program that does not end.
    Busy,
}

/// Counts since the last reset.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Copies accepted.
    pub copies: u64,
    /// Copies that are on another stream than the copy before them.
    pub stream_changes: u64,
    /// Bytes of the copies accepted.
    pub copied_bytes: u64,
    /// Launches accepted.
    pub launches: u64,
    /// Calls that blocked the host on a stream or an event.
    pub syncs: u64,
    /// Modules loaded.
    pub modules: u64,
    /// Streams created.
    pub streams: u64,
    /// Events created.
    pub events: u64,
    /// Records of events.
    pub records: u64,
    /// Waits of streams for events.
    pub waits: u64,
    /// Queries of events.
    pub queries: u64,
    /// Calls that create an object, as counted by [`Fault::OutOfMemory`].
    pub allocations: u64,
    /// Injected faults that have occurred.
    pub faults: u64,
    /// Registrations of host memory accepted.
    pub registrations: u64,
    /// Bytes of host memory that are registered.
    pub registered_bytes: u64,
    /// Peak of `registered_bytes`.
    pub registered_bytes_peak: u64,
    /// Live streams, without default streams.
    pub live_streams: u64,
    /// Live events.
    pub live_events: u64,
    /// Sum of the retain counts of all contexts.
    pub live_contexts: u64,
    /// Live registrations.
    pub live_registrations: u64,
    /// Loaded modules of live contexts.
    pub live_modules: u64,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $tag:literal,)*) => {
        /// Kind of a violation.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind { $($(#[$doc])* $kind,)* }

        impl Kind {
            /// Every kind.
            pub const ALL: &[Kind] = &[$(Kind::$kind),*];

            /// Prefix of the text of a violation.
            pub const fn tag(self) -> &'static str {
                match self { $(Kind::$kind => $tag),* }
            }
        }
    };
}

kinds! {
    /// Host memory changed while a copy from it was pending.
    SourceChanged = "source-changed",
    /// A copy used host memory that is not pinned, although pinning is available.
    Unpinned = "unpinned",
    /// Host memory was unregistered or freed before the host had waited for a copy
    /// that uses the memory.
    HostReleased = "host-released",
    /// Host memory was written while a copy to it was pending.
    TargetChanged = "target-changed",
    /// Device work accessed memory outside of an allocation.
    OutOfBounds = "out-of-bounds",
    /// Work of two streams accessed the same bytes without an order, and at least
    /// one of the accesses was a write.
    MissingWait = "missing-wait",
    /// An object was still alive at the end.
    Leak = "leak",
    /// Work was queued on a stream whose context is not current.
    WrongContext = "wrong-context",
    /// Work on a stream of one device used memory of another device.
    WrongDevice = "wrong-device",
    /// A stream or an event was destroyed, and the program never waited for its work.
    WorkLost = "work-lost",
    /// Device memory was freed while work that uses the memory was possibly pending.
    FreedInUse = "freed-in-use",
    /// An object was freed, unregistered, destroyed or released twice.
    DoubleFree = "double-free",
    /// A handle or an address was used after the end of its object.
    UseAfterFree = "use-after-free",
    /// A call made the capture of a graph invalid.
    CaptureInvalidated = "capture-invalidated",
    /// A launch was invalid: unsupported grid sizes, an inconsistent table of
    /// tasks, or a table that changed before the kernel ran.
    BadLaunch = "bad-launch",
}
