//! The control interface: what a test can arrange, do and ask.

use crate::abi::{Counters, Fault, Schedule, Status};
use crate::driver::{DRIVER, Driver};
use crate::region::Region;

/// Forgets everything that was; `seed` decides the delays from here on.
#[unsafe(no_mangle)]
pub extern "C" fn sim_reset(seed: u64) {
    DRIVER.reset(seed);
}

/// Chooses when queued work runs; after a reset it is [`Schedule::Random`].
#[unsafe(no_mangle)]
pub extern "C" fn sim_schedule(schedule: Schedule) {
    DRIVER.lock().schedule = schedule;
    DRIVER.announce();
}

/// Makes the `at`-th call of a sort fail, counted from 1 and from now.
#[unsafe(no_mangle)]
pub extern "C" fn sim_inject(fault: Fault, at: u64) {
    DRIVER.lock().faults.plan(fault, at);
}

/// What has happened since the reset.
#[unsafe(no_mangle)]
pub extern "C" fn sim_counters() -> Counters {
    DRIVER.lock().count()
}

/// Queues a kernel that fills device memory, as if somebody still used it.
#[unsafe(no_mangle)]
pub extern "C" fn sim_launch_write(stream: usize, address: u64, bytes: usize, value: u8) -> Status {
    launch(stream, address, bytes, Some(value))
}

/// Queues a kernel that reads device memory, as the caller's next step would.
#[unsafe(no_mangle)]
pub extern "C" fn sim_launch_read(stream: usize, address: u64, bytes: usize) -> Status {
    launch(stream, address, bytes, None)
}

fn launch(stream: usize, address: u64, bytes: usize, value: Option<u8>) -> Status {
    call(|driver| {
        let region = Region::linear(address, bytes as u64).ok_or(Status::InvalidValue)?;
        driver.launch_other(stream, region, value)
    })
}

/// Makes `cuStreamIsCapturing` say that a graph captures the stream, or that none does.
#[unsafe(no_mangle)]
pub extern "C" fn sim_capture(stream: usize, capturing: bool) -> Status {
    call(|driver| {
        driver.stream_mut(stream)?.capturing = capturing;
        Ok(())
    })
}

/// Runs the scatter kernel's code on host memory, now and without any check.
///
/// # Safety
/// `tasks` points to that many tasks, and they to memory of the lengths that they say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sim_scatter(tasks: *const u8, task_count: u32, tile_count: u32, blocks: u32, threads: u32) {
    // SAFETY: the caller promises it.
    unsafe { crate::launch::run_on_host(tasks, task_count, tile_count, blocks, threads) };
}

/// Copies device memory to `target` at once. It is a violation if the host has
/// not waited for whoever wrote it.
///
/// # Safety
/// `target` has room for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sim_read(address: u64, target: *mut u8, bytes: usize) -> Status {
    call(|driver| {
        let found = driver.read_memory(address, bytes as u64)?;
        // SAFETY: the caller promises the room, and `found` is that long.
        unsafe { target.copy_from_nonoverlapping(found.as_ptr(), found.len()) };
        Ok(())
    })
}

/// Copies from `source` to device memory at once. It is a violation if the host
/// has not waited for whoever uses it.
///
/// # Safety
/// `source` holds `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sim_write(address: u64, source: *const u8, bytes: usize) -> Status {
    // SAFETY: the caller promises the bytes.
    let source = unsafe { std::slice::from_raw_parts(source, bytes) };
    call(|driver| driver.write_memory(address, source))
}

/// Waits until all work has run, reports leaks and work that nobody waited for,
/// and tells how many violations there are in all.
#[unsafe(no_mangle)]
pub extern "C" fn sim_finish() -> usize {
    DRIVER.finish()
}

/// Writes as much as fits of the violations' texts, one a line, in UTF-8, and
/// tells how many bytes all of them need.
///
/// # Safety
/// `target` has room for `capacity` bytes, or `capacity` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sim_violations(target: *mut u8, capacity: usize) -> usize {
    let text = DRIVER.lock().violations.join("\n");
    if capacity > 0 {
        // SAFETY: the caller promises the room, and no more than that is used.
        unsafe { target.copy_from_nonoverlapping(text.as_ptr(), text.len().min(capacity)) };
    }
    text.len()
}

fn call(body: impl FnOnce(&mut Driver) -> Result<(), Status>) -> Status {
    let result = body(&mut DRIVER.lock());
    DRIVER.announce();
    result.err().unwrap_or(Status::Success)
}
