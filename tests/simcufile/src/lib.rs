//! A libcufile without GPUDirect Storage, for tests.
//!
//! A test opens the simulated CUDA driver, and then this library, before
//! anything looks for `libcufile.so.0`. It exports the entry points that fst
//! calls, with the real ABI, and beside them the control interface
//! `simcufile_*`.
//!
//! A read goes through the simulated driver's own write from the host, which
//! follows no stream, as the real thing: the driver finds it where it reaches
//! outside of an allocation, or where work that uses the memory may still be
//! pending.

#![allow(non_snake_case, reason = "the names are NVIDIA's")]

pub mod abi;

use abi::{BLOCK_BYTES, Counters, Fault};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Status {
    code: u32,
    cuda_code: u32,
}

/// `CUfileDescr_t`, of a file descriptor.
#[repr(C)]
#[derive(Debug)]
pub struct Description {
    kind: u32,
    /// What follows is a union with a pointer.
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
    countdowns: BTreeMap<u32, u64>,
    /// Faults that go on once they have struck.
    lasting: BTreeSet<u32>,
    counters: Counters,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Counts one call of this sort; true if it is the one to fail.
    fn strikes(&mut self, fault: Fault) -> bool {
        let left = self.countdowns.entry(fault as u32).or_default();
        let strikes = *left == 1;
        *left = left.saturating_sub(1);
        self.counters.faults += u64::from(strikes);
        strikes
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

/// Must come before every other call, once.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverOpen() -> Status {
    let mut state = state();
    if state.strikes(Fault::DriverOpen) {
        return status(NVFS_ERROR);
    }
    if state.is_open {
        return status(ALREADY_OPEN);
    }
    state.is_open = true;
    status(SUCCESS)
}

/// Makes a file known. It must have been opened for direct reads.
///
/// # Safety
/// `handle` can be written, and `description` read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileHandleRegister(handle: *mut usize, description: *const Description) -> Status {
    let mut state = state();
    // SAFETY: the caller promises that it can be read.
    let Description { kind, descriptor, .. } = *unsafe { &*description };
    // SAFETY: only asks.
    let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
    if !state.is_open {
        return state.misuse(NOT_INITIALIZED);
    }
    if kind != OPAQUE_DESCRIPTOR || flags < 0 || flags & libc::O_DIRECT == 0 {
        return state.misuse(INVALID_VALUE);
    }
    if state.strikes(Fault::HandleRegister) {
        return status(IO_NOT_SUPPORTED);
    }
    state.next_handle += 1;
    let number = state.next_handle;
    state.handles.insert(number, descriptor);
    // SAFETY: the caller promises that it can be written.
    unsafe { handle.write(number) };
    status(SUCCESS)
}

/// Forgets a file, which must still be open.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileHandleDeregister(handle: usize) {
    let mut state = state();
    let descriptor = state.handles.remove(&handle);
    // SAFETY: only asks.
    if descriptor.is_none_or(|descriptor| unsafe { libc::fcntl(descriptor, libc::F_GETFD) } < 0) {
        state.misuse(INVALID_VALUE);
    }
}

/// Makes device memory known.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufRegister(base: u64, bytes: usize, _flags: c_int) -> Status {
    let mut state = state();
    if !state.is_open || bytes == 0 {
        return state.misuse(INVALID_VALUE);
    }
    if state.lasting.contains(&(Fault::RefuseBuffers as u32)) {
        state.counters.faults += 1;
        return status(PINNING_FAILED);
    }
    if state.buffers.insert(base, bytes as u64).is_some() {
        return state.misuse(INVALID_VALUE);
    }
    state.counters.buffers += 1;
    status(SUCCESS)
}

/// Forgets device memory, which must still be allocated.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufDeregister(base: u64) -> Status {
    let mut state = state();
    match state.buffers.remove(&base) {
        Some(_) => status(SUCCESS),
        None => state.misuse(NOT_REGISTERED),
    }
}

/// Reads, and returns the bytes that came, -1 with `errno` set, or the negative code of an error of the library's own.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileRead(handle: usize, base: u64, bytes: usize, offset: i64, base_offset: i64) -> isize {
    let mut state = state();
    state.counters.reads += 1;
    let (address, offset) = (base.wrapping_add_signed(base_offset), offset as u64);
    let memory = address..address + bytes as u64;
    if state.is_registered(&memory) {
        // The offset counts from where the registration begins.
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
    if state.strikes(Fault::Interrupted) {
        state.countdowns.insert(BUSY, 1);
        return failed(libc::EINTR);
    }
    if state.countdowns.remove(&BUSY).is_some() {
        return failed(libc::EAGAIN);
    }
    if state.strikes(Fault::Disk) {
        return failed(libc::EIO);
    }
    if state.strikes(Fault::Library) {
        return -INTERNAL_ERROR;
    }
    if state.strikes(Fault::ShortReads) {
        state.lasting.insert(Fault::ShortReads as u32);
    }
    let most = match state.lasting.contains(&(Fault::ShortReads as u32)) {
        true => [1, 700, 4096, 5000][state.counters.reads as usize % 4],
        false => bytes,
    };
    drop(state);
    read(descriptor, address, bytes.min(most), offset)
}

/// In the countdowns, a read that finds the file busy.
const BUSY: u32 = u32::MAX;

fn read(descriptor: c_int, address: u64, bytes: usize, offset: u64) -> isize {
    let mut found = vec![0; bytes];
    // Once more without O_DIRECT, which is not for memory of any alignment.
    let Ok(file) = std::fs::File::open(format!("/proc/self/fd/{descriptor}")) else {
        return failed(libc::EBADF);
    };
    let mut count = 0;
    while count < bytes {
        match file.read_at(&mut found[count..], offset + count as u64) {
            Ok(0) => break,
            Ok(more) => count += more,
            Err(error) => return failed(error.raw_os_error().unwrap_or(libc::EIO)),
        }
    }
    if count > 0 && device_write(address, &found[..count]) != SUCCESS {
        return -(INVALID_VALUE as isize);
    }
    count as isize
}

/// As a copy from the host that follows no stream; the simulated driver's status.
fn device_write(address: u64, bytes: &[u8]) -> u32 {
    static DRIVER: LazyLock<Option<libloading::Library>> = LazyLock::new(|| {
        // SAFETY: the test has opened the simulated driver, which has this name.
        unsafe { libloading::Library::new("libcuda.so") }.ok()
    });
    type Write = unsafe extern "C" fn(u64, *const u8, usize) -> u32;
    // SAFETY: the type is that in the simulated driver's control.rs.
    let write = DRIVER.as_ref().and_then(|driver| unsafe { driver.get::<Write>(b"sim_write") }.ok());
    // SAFETY: the slice is that long.
    write.map_or(u32::MAX, |write| unsafe { write(address, bytes.as_ptr(), bytes.len()) })
}

fn failed(errno: c_int) -> isize {
    // SAFETY: the address is this thread's own.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// Forgets all that happened; what is registered stays, and so does an open driver, as in a process.
#[unsafe(no_mangle)]
pub extern "C" fn simcufile_reset() {
    let mut state = state();
    state.countdowns.clear();
    state.lasting.clear();
    state.counters = Counters::default();
}

/// Makes the `at`-th call of a sort fail, counted from 1 and from now.
#[unsafe(no_mangle)]
pub extern "C" fn simcufile_inject(fault: Fault, at: u64) {
    let mut state = state();
    match fault {
        Fault::RefuseBuffers => drop(state.lasting.insert(fault as u32)),
        _ => drop(state.countdowns.insert(fault as u32, at)),
    }
}

/// What has happened since the reset.
#[unsafe(no_mangle)]
pub extern "C" fn simcufile_counters() -> Counters {
    let state = state();
    let (live_handles, live_buffers) = (state.handles.len() as u64, state.buffers.len() as u64);
    Counters { live_handles, live_buffers, ..state.counters }
}
