//! Control interface: functions with which a test configures and inspects the simulator.

use crate::abi::{CaptureMode, Counters, Fault, Schedule, Status};
use crate::driver::{DRIVER, Driver};
use crate::region::Region;

/// Resets the simulator. `seed` determines the later delays.
#[unsafe(no_mangle)]
pub extern "C" fn sim_reset(seed: u64) {
    DRIVER.reset(seed);
}

/// Sets the schedule of queued work. A reset sets [`Schedule::Random`].
#[unsafe(no_mangle)]
pub extern "C" fn sim_schedule(schedule: Schedule) {
    DRIVER.lock().schedule = schedule;
    DRIVER.notify_all();
}

/// Makes the `at`-th later call of a kind fail, counted from 1.
#[unsafe(no_mangle)]
pub extern "C" fn sim_inject(fault: Fault, at: u64) {
    DRIVER.lock().faults.plan(fault, at);
}

/// Returns the counts since the last reset.
#[unsafe(no_mangle)]
pub extern "C" fn sim_counters() -> Counters {
    DRIVER.lock().count()
}

/// Queues a kernel that fills device memory, as pending work of another program would.
#[unsafe(no_mangle)]
pub extern "C" fn sim_launch_write(stream: usize, address: u64, bytes: usize, value: u8) -> Status {
    launch(stream, address, bytes, Some(value))
}

/// Queues a kernel that reads device memory, as the caller's next work would.
#[unsafe(no_mangle)]
pub extern "C" fn sim_launch_read(stream: usize, address: u64, bytes: usize) -> Status {
    launch(stream, address, bytes, None)
}

fn launch(stream: usize, address: u64, bytes: usize, value: Option<u8>) -> Status {
    call(|driver| {
        let region = Region::linear(address, bytes as u64).ok_or(Status::InvalidValue)?;
        driver.launch_test_kernel(stream, region, value)
    })
}

/// Returns a context of a device beside the primary one, such as a green context's, or 0 for another ordinal.
#[unsafe(no_mangle)]
pub extern "C" fn sim_other_context(ordinal: i32) -> usize {
    let driver = DRIVER.lock();
    driver.device(ordinal).map_or(0, |device| driver.devices[device].other.0)
}

/// Begins a capture by the calling thread, in PyTorch's default mode, of a stream that the test does not use. It lasts
/// until the next reset.
#[unsafe(no_mangle)]
pub extern "C" fn sim_capture() {
    DRIVER.lock().add_capture(None, CaptureMode::Global);
}

/// Copies device memory to `target` immediately. A host that has not waited for
/// the last write of the memory violates [`MissingWait`](crate::abi::Kind).
///
/// # Safety
/// `target` is valid for writes of `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sim_read(address: u64, target: *mut u8, bytes: usize) -> Status {
    call(|driver| {
        let found = driver.read_memory(address, bytes as u64)?;
        // SAFETY: the caller guarantees that `target` is valid for `bytes` bytes, which is the length of `found`.
        unsafe { target.copy_from_nonoverlapping(found.as_ptr(), found.len()) };
        Ok(())
    })
}

/// Copies from `source` to device memory immediately. A host that has not waited
/// for all uses of the memory violates [`MissingWait`](crate::abi::Kind).
///
/// # Safety
/// `source` is valid for reads of `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sim_write(address: u64, source: *const u8, bytes: usize) -> Status {
    // SAFETY: guaranteed by the caller.
    let source = unsafe { std::slice::from_raw_parts(source, bytes) };
    call(|driver| driver.write_memory(address, source))
}

/// Waits until all work has run, and reports leaks and work without a wait.
/// Returns the total number of violations.
#[unsafe(no_mangle)]
pub extern "C" fn sim_finish() -> usize {
    DRIVER.finish()
}

/// Writes the texts of the violations to `target`, one per line, in UTF-8,
/// truncated to `capacity` bytes. Returns the untruncated number of bytes.
///
/// # Safety
/// `target` is valid for writes of `capacity` bytes, or `capacity` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sim_violations(target: *mut u8, capacity: usize) -> usize {
    let text = DRIVER.lock().violations.join("\n");
    if capacity > 0 {
        // SAFETY: `target` is valid for `capacity` bytes, and at most `capacity` bytes are written.
        unsafe { target.copy_from_nonoverlapping(text.as_ptr(), text.len().min(capacity)) };
    }
    text.len()
}

fn call(body: impl FnOnce(&mut Driver) -> Result<(), Status>) -> Status {
    let result = body(&mut DRIVER.lock());
    DRIVER.notify_all();
    result.err().unwrap_or(Status::Success)
}
