//! A libcufile without GPUDirect Storage, for tests.
//!
//! A test opens the simulated CUDA driver, and then this library, before any code
//! opens `libcufile.so.0`. The library exports the entry points that fst calls,
//! with the ABI of libcufile, and the control interface `simcufile_*`.
//!
//! A read writes device memory with `sim_write` of the simulated driver, which is
//! not ordered with any stream, like a real read. The driver reports a read
//! outside of an allocation, and a read into memory with pending work.

#![allow(non_snake_case, reason = "the names are NVIDIA's")]

pub mod abi;

use abi::{BLOCK_BYTES, Counters, Fault};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Status {
    /// `CUfileOpError`.
    pub code: u32,
    /// `CUresult`.
    pub cuda_code: u32,
}

/// `CUfileDescr_t` with a file descriptor.
#[repr(C)]
#[derive(Debug)]
pub struct Description {
    kind: u32,
    /// Padding before a union that contains a pointer.
    _padding: u32,
    descriptor: c_int,
    operations: *const c_void,
}

const OPAQUE_DESCRIPTOR: u32 = 1;
const SUCCESS: u32 = 0;
const NOT_INITIALIZED: u32 = 5001;
const ALREADY_OPEN: u32 = 5026;
const INVALID_VALUE: u32 = 5022;
const NVFS_ERROR: u32 = 5010;
const IO_NOT_SUPPORTED: u32 = 5008;
const NOT_REGISTERED: u32 = 5024;
const PINNING_FAILED: u32 = 5036;
const HANDLE_NOT_REGISTERED: isize = 5027;
const INTERNAL_ERROR: isize = 5030;

#[derive(Default)]
struct State {
    is_open: bool,
    handles: BTreeMap<usize, c_int>,
    buffers: BTreeMap<u64, u64>,
    next_handle: usize,
    /// Calls until each requested fault.
    countdowns: BTreeMap<Fault, i64>,
    /// Whether the next read fails with `EAGAIN`.
    is_busy: bool,
    counters: Counters,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Counts one call and returns whether the call fails with `fault`.
    fn count_call(&mut self, fault: Fault) -> bool {
        let Some(remaining) = self.countdowns.get_mut(&fault) else {
            return false;
        };
        *remaining -= 1;
        let lasts = matches!(fault, Fault::RefuseBuffers | Fault::ShortReads);
        let fails = *remaining == 0 || (lasts && *remaining < 0);
        self.counters.faults += u64::from(fails);
        fails
    }

    fn misuse(&mut self, code: u32) -> Status {
        self.counters.misuses += 1;
        status(code)
    }

    fn is_registered(&self, memory: &Range<u64>) -> bool {
        self.buffers.iter().any(|(&begin, &bytes)| begin <= memory.start && memory.end <= begin + bytes)
    }
}

fn status(code: u32) -> Status {
    Status { code, cuda_code: 0 }
}

/// Opens the driver. Every other call before this one is a misuse.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverOpen() -> Status {
    let mut state = state();
    if state.count_call(Fault::DriverOpen) {
        return status(NVFS_ERROR);
    }
    if state.is_open {
        return status(ALREADY_OPEN);
    }
    state.is_open = true;
    status(SUCCESS)
}

/// Registers a file, which must be open with `O_DIRECT`.
///
/// # Safety
/// `handle` is valid for writes, and `description` for reads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileHandleRegister(handle: *mut usize, description: *const Description) -> Status {
    let mut state = state();
    // SAFETY: guaranteed by the caller.
    let Description { kind, descriptor, .. } = *unsafe { &*description };
    // SAFETY: F_GETFL only reads the flags.
    let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
    if !state.is_open {
        return state.misuse(NOT_INITIALIZED);
    }
    if kind != OPAQUE_DESCRIPTOR || flags < 0 || flags & libc::O_DIRECT == 0 {
        return state.misuse(INVALID_VALUE);
    }
    if state.count_call(Fault::HandleRegister) {
        return status(IO_NOT_SUPPORTED);
    }
    state.next_handle += 1;
    let number = state.next_handle;
    state.handles.insert(number, descriptor);
    // SAFETY: guaranteed by the caller.
    unsafe { handle.write(number) };
    status(SUCCESS)
}

/// Deregisters a file, which must still be open.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileHandleDeregister(handle: usize) {
    let mut state = state();
    let descriptor = state.handles.remove(&handle);
    // SAFETY: F_GETFD only reads the flags.
    if descriptor.is_none_or(|descriptor| unsafe { libc::fcntl(descriptor, libc::F_GETFD) } < 0) {
        state.misuse(INVALID_VALUE);
    }
}

/// Registers device memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufRegister(base: u64, bytes: usize, _flags: c_int) -> Status {
    let mut state = state();
    if !state.is_open || bytes == 0 {
        return state.misuse(INVALID_VALUE);
    }
    if state.count_call(Fault::RefuseBuffers) {
        return status(PINNING_FAILED);
    }
    if state.buffers.insert(base, bytes as u64).is_some() {
        return state.misuse(INVALID_VALUE);
    }
    state.counters.buffers += 1;
    status(SUCCESS)
}

/// Deregisters device memory, which must still be allocated.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufDeregister(base: u64) -> Status {
    let mut state = state();
    match state.buffers.remove(&base) {
        Some(_) => status(SUCCESS),
        None => state.misuse(NOT_REGISTERED),
    }
}

/// Reads from a file into device memory. Returns the number of bytes read, -1 with `errno` set, or the negative error
/// code of the library.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileRead(handle: usize, base: u64, bytes: usize, offset: i64, base_offset: i64) -> isize {
    let mut state = state();
    state.counters.reads += 1;
    let (address, offset) = (base.wrapping_add_signed(base_offset), offset as u64);
    let memory = address..address + bytes as u64;
    if state.is_registered(&memory) {
        // `base_offset` is relative to the start of the registration.
        state.counters.misuses += u64::from(!state.buffers.contains_key(&base));
    } else {
        state.counters.unregistered_reads += 1;
    }
    let edges = [memory.start, memory.end, offset];
    state.counters.unaligned_reads += u64::from(edges.iter().any(|edge| edge % BLOCK_BYTES != 0));
    let Some(&descriptor) = state.handles.get(&handle) else {
        state.misuse(INVALID_VALUE);
        return -HANDLE_NOT_REGISTERED;
    };
    if state.count_call(Fault::Interrupted) {
        state.is_busy = true;
        return failed(libc::EINTR);
    }
    if std::mem::take(&mut state.is_busy) {
        return failed(libc::EAGAIN);
    }
    if state.count_call(Fault::Disk) {
        return failed(libc::EIO);
    }
    if state.count_call(Fault::Library) {
        return -INTERNAL_ERROR;
    }
    let bytes_max = match state.count_call(Fault::ShortReads) {
        true => [1, 700, 4096, 5000][state.counters.reads as usize % 4],
        false => bytes,
    };
    drop(state);
    read(descriptor, address, bytes.min(bytes_max), offset)
}

fn read(descriptor: c_int, address: u64, bytes: usize, offset: u64) -> isize {
    let mut found = vec![0; bytes];
    // Reopen the file without O_DIRECT, because `found` is not aligned.
    let Ok(file) = std::fs::File::open(format!("/proc/self/fd/{descriptor}")) else {
        return failed(libc::EBADF);
    };
    let mut count = 0;
    while count < bytes {
        match file.read_at(&mut found[count..], offset + count as u64) {
            Ok(0) => break,
            Ok(bytes_read) => count += bytes_read,
            Err(error) => return failed(error.raw_os_error().unwrap_or(libc::EIO)),
        }
    }
    if count > 0 && device_write(address, &found[..count]) != SUCCESS {
        return -(INVALID_VALUE as isize);
    }
    count as isize
}

/// Copies from the host without stream order, and returns the status of the simulated driver.
fn device_write(address: u64, bytes: &[u8]) -> u32 {
    static DRIVER: LazyLock<Option<libloading::Library>> = LazyLock::new(|| {
        // SAFETY: the test has loaded the simulated driver, which has this SONAME.
        unsafe { libloading::Library::new("libcuda.so") }.ok()
    });
    type Write = unsafe extern "C" fn(u64, *const u8, usize) -> u32;
    // SAFETY: the type matches control.rs of the simulated driver.
    let write = DRIVER.as_ref().and_then(|driver| unsafe { driver.get::<Write>(b"sim_write") }.ok());
    // SAFETY: the pointer and the length belong to one slice.
    write.map_or(u32::MAX, |write| unsafe { write(address, bytes.as_ptr(), bytes.len()) })
}

fn failed(errno: c_int) -> isize {
    // SAFETY: the address of `errno` is valid in the calling thread.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// Resets the faults and the counters. Registrations and the open driver stay, because they belong to the process.
#[unsafe(no_mangle)]
pub extern "C" fn simcufile_reset() {
    let mut state = state();
    state.countdowns.clear();
    state.is_busy = false;
    state.counters = Counters::default();
}

/// Makes the `at`-th later call of a kind fail, counted from 1.
#[unsafe(no_mangle)]
pub extern "C" fn simcufile_inject(fault: Fault, at: u64) {
    state().countdowns.insert(fault, at as i64);
}

/// Returns the counts since the last reset.
#[unsafe(no_mangle)]
pub extern "C" fn simcufile_counters() -> Counters {
    let state = state();
    let (live_handles, live_buffers) = (state.handles.len() as u64, state.buffers.len() as u64);
    Counters { live_handles, live_buffers, ..state.counters }
}
