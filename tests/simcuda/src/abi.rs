//! The plain types that cross the border: CUDA's own, and the control
//! interface's. The tests' harness compiles this same file, so the two sides
//! cannot disagree.

/// What a driver call returns. The numbers are CUDA's.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The call succeeded, or the work was queued.
    Success = 0,
    /// An argument is null, zero or out of range.
    InvalidValue = 1,
    /// No memory for what the call would have created.
    OutOfMemory = 2,
    /// `cuInit` was not called.
    NotInitialized = 3,
    /// The simulator was reset while the call waited.
    Deinitialized = 4,
    /// There is no device of this number.
    InvalidDevice = 101,
    /// The bytes given as a module are none.
    InvalidImage = 200,
    /// The calling thread's context is missing or the wrong one.
    InvalidContext = 201,
    /// The module holds no code for the device.
    NoBinaryForGpu = 209,
    /// The handle names nothing that is alive.
    InvalidHandle = 400,
    /// The module has no function of this name.
    NotFound = 500,
    /// The event's work is still running.
    NotReady = 600,
    /// A copy or a kernel failed after it was queued. The context is lost.
    IllegalAddress = 700,
    /// A kernel could not be queued.
    LaunchOutOfResources = 701,
    /// The range is registered already, in whole or in part.
    HostMemoryAlreadyRegistered = 712,
    /// The address is not the start of a registration.
    HostMemoryNotRegistered = 713,
    /// Pinning was refused, as in a container without the right to lock memory.
    NotSupported = 801,
    /// A copy could not be queued.
    Unknown = 999,
}

/// `CUmemorytype` of host memory.
pub const MEMORY_TYPE_HOST: u32 = 1;
/// `CUmemorytype` of device memory.
pub const MEMORY_TYPE_DEVICE: u32 = 2;
/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context.
pub const REGISTER_PORTABLE: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub const EVENT_DISABLE_TIMING: u32 = 2;
/// What fresh device memory is full of.
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

/// What `sim_inject` makes fail.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The n-th call that creates something fails with out of memory: a stream,
    /// an event, a registration, a device allocation, a module, a retained context.
    OutOfMemory,
    /// The n-th copy is refused when it is queued.
    CopyEnqueue,
    /// The n-th copy is queued, fails when it runs, and its context is lost.
    CopyAsync,
    /// Every registration is refused, from now on. The number is not used.
    RefusePinning,
    /// The n-th module is refused, as one without code for the device.
    ModuleLoad,
    /// The n-th launch is refused when it is queued.
    LaunchEnqueue,
    /// The n-th launch is queued, fails when it runs, and its context is lost.
    LaunchAsync,
}

/// When queued work runs.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// Soon, after a random delay.
    Random,
    /// As late as it can: only while some host thread waits for work, or one
    /// piece at a time when it asks whether an event is done.
    Lazy,
}

/// What has happened since the last reset.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Copies accepted.
    pub copies: u64,
    /// Bytes of the copies accepted.
    pub copied_bytes: u64,
    /// Kernels accepted.
    pub launches: u64,
    /// Calls that waited on the host for a stream or an event.
    pub syncs: u64,
    /// Calls that create something, as [`Fault::OutOfMemory`] counts them.
    pub allocations: u64,
    /// Faults that were injected and have struck.
    pub faults: u64,
    /// Registrations of host memory accepted.
    pub registrations: u64,
    /// Bytes of host memory registered now.
    pub registered_bytes: u64,
    /// The most that was ever registered at once.
    pub registered_bytes_peak: u64,
    /// Streams alive, without the default ones.
    pub live_streams: u64,
    /// Events alive.
    pub live_events: u64,
    /// Contexts retained, each as many times as it is.
    pub live_contexts: u64,
    /// Registrations alive.
    pub live_registrations: u64,
    /// Device allocations alive.
    pub live_allocations: u64,
    /// Modules loaded in contexts that are alive.
    pub live_modules: u64,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $tag:literal,)*) => {
        /// What kind of rule was broken.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind { $($(#[$doc])* $kind,)* }

        impl Kind {
            /// Every kind.
            pub const ALL: &[Kind] = &[$(Kind::$kind),*];

            /// The word that a violation's text begins with.
            pub const fn tag(self) -> &'static str {
                match self { $(Kind::$kind => $tag),* }
            }
        }
    };
}

kinds! {
    /// Host memory changed while a copy from it was pending.
    SourceChanged = "source-changed",
    /// A copy from or to host memory that is not pinned, though pinning works.
    Unpinned = "unpinned",
    /// Host memory was unregistered or freed before a copy from it or to it was
    /// known to be finished.
    HostReleased = "host-released",
    /// Host memory was written to while a copy to it was pending.
    TargetChanged = "target-changed",
    /// Device work that reaches outside of an allocation.
    OutOfBounds = "out-of-bounds",
    /// Work on one stream that uses bytes that another stream's work uses too,
    /// one of them to write, and nothing orders the two.
    MissingWait = "missing-wait",
    /// Something was alive at the end.
    Leak = "leak",
    /// Work was queued on a stream of a context that is not current.
    WrongContext = "wrong-context",
    /// Work on a stream of one device uses memory of another.
    WrongDevice = "wrong-device",
    /// A stream or event was destroyed and nobody ever waited for its work.
    WorkLost = "work-lost",
    /// Device memory was freed while work that uses it may be pending.
    FreedInUse = "freed-in-use",
    /// Freed, unregistered, destroyed or released for a second time.
    DoubleFree = "double-free",
    /// A handle or an address was used after its end.
    UseAfterFree = "use-after-free",
    /// A kernel was launched in a way that it cannot run: sizes of the grid, or
    /// a table of tasks that contradicts itself or changed before the kernel ran.
    BadLaunch = "bad-launch",
}
