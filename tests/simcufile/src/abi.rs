//! The plain types of the control interface, which the tests' harness compiles, too.

/// What `simcufile_inject` makes fail.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The n-th attempt to open the driver is refused.
    DriverOpen,
    /// The n-th file is refused.
    HandleRegister,
    /// Every buffer is refused, from now on. The number is not used.
    RefuseBuffers,
    /// The n-th read, and each after it, stops after at most a few bytes or blocks.
    ShortReads,
    /// The n-th read is interrupted by a signal, and the one after it finds the file busy.
    Interrupted,
    /// The n-th read fails with an error of the disk.
    Disk,
    /// The n-th read fails with an error of the library's own.
    Library,
}

/// What has happened since the last reset.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reads asked for.
    pub reads: u64,
    /// Reads into memory that was not registered, in whole or in part.
    pub unregistered_reads: u64,
    /// Reads that did not begin and end at blocks of the file and of memory.
    pub unaligned_reads: u64,
    /// Buffers accepted.
    pub buffers: u64,
    /// Files registered now.
    pub live_handles: u64,
    /// Buffers registered now.
    pub live_buffers: u64,
    /// Calls with a handle or a buffer that is not registered, or before the driver is open.
    pub misuses: u64,
    /// Faults that were injected and have struck.
    pub faults: u64,
}

/// Reads of whole blocks of this size are direct.
pub const BLOCK_BYTES: u64 = 4096;
