//! Plain types of the control interface.

/// Kind of failure that `simcufile_inject` requests.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// The n-th open of the driver fails.
    DriverOpen,
    /// The n-th registration of a file fails.
    HandleRegister,
    /// The n-th registration of a buffer and all later ones fail.
    RefuseBuffers,
    /// The n-th read and all later reads are short: they return at most a few blocks.
    ShortReads,
    /// A signal interrupts the n-th read (`EINTR`), and the next read returns `EAGAIN`.
    Interrupted,
    /// The n-th read fails with `EIO`.
    Disk,
    /// The n-th read fails with an error code of the library.
    Library,
}

/// Counts since the last reset.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Calls of `cuFileRead`.
    pub reads: u64,
    /// Reads into memory that is not entirely registered.
    pub unregistered_reads: u64,
    /// Reads whose range in the file or in memory is not aligned to blocks.
    pub unaligned_reads: u64,
    /// Registrations of buffers accepted.
    pub buffers: u64,
    /// Registered files.
    pub live_handles: u64,
    /// Registered buffers.
    pub live_buffers: u64,
    /// Calls with an unregistered handle or buffer, and calls before the driver is open.
    pub misuses: u64,
    /// Injected faults that have occurred.
    pub faults: u64,
}

/// Block size of direct reads, in bytes.
pub const BLOCK_BYTES: u64 = 4096;
