//! Copies from host memory to device memory.

use crate::abi::{Kind, MEMORY_TYPE_DEVICE, MEMORY_TYPE_HOST, Memcpy2D, Status};
use crate::context;
use crate::driver::{Driver, SharedDriver};
use crate::fault::Outcome;
use crate::host::{PinId, is_mapped, read_host};
use crate::random::Random;
use crate::region::Region;
use crate::stream::Work;

/// Largest pitch that the driver accepts (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
const PITCH_BYTES_MAX: usize = (1 << 31) - 1;

/// Queued copy from host memory to device memory.
#[derive(Debug)]
pub struct CopyToDevice {
    source: Region,
    target: Region,
    /// Bytes of the source when the copy was queued.
    expected: Vec<u8>,
    /// Registration of the source, or `None` for pageable memory.
    pin: Option<PinId>,
}

/// Returns the source and the target of a strided copy, or `None` for an empty copy.
///
/// # Errors
/// `InvalidValue` for arguments that `cuMemcpy2DAsync` rejects, and
/// `NotSupported` for a direction other than from the host to a device.
pub fn regions_of(copy: &Memcpy2D) -> Result<Option<(Region, Region)>, Status> {
    if copy.src_memory_type != MEMORY_TYPE_HOST || copy.dst_memory_type != MEMORY_TYPE_DEVICE {
        return Err(Status::NotSupported);
    }
    let rows = |start: u64, x: usize, y: usize, pitch: usize| {
        if pitch > PITCH_BYTES_MAX || x.checked_add(copy.width_bytes)? > pitch {
            return None;
        }
        let start = start.checked_add(x as u64)?.checked_add((y as u64).checked_mul(pitch as u64)?)?;
        Region::new(start, copy.width_bytes as u64, pitch as u64, copy.height as u64)
    };
    if copy.width_bytes == 0 || copy.height == 0 {
        return Ok(None);
    }
    let source = rows(copy.src_host as u64, copy.src_x_bytes, copy.src_y, copy.src_pitch);
    let target = rows(copy.dst_device, copy.dst_x_bytes, copy.dst_y, copy.dst_pitch);
    source.zip(target).map(Some).ok_or(Status::InvalidValue)
}

impl Driver {
    /// `cuMemcpyHtoDAsync_v2` and `cuMemcpy2DAsync_v2`.
    pub fn copy_to_device(&mut self, source: Region, target: Region, stream: usize) -> Result<(), Status> {
        let (stream, outcome, pin) = self.begin_copy("copy", &source, target, true, stream)?;
        let expected = read_host(&source).ok_or(Status::InvalidValue)?;
        self.memory.write_expected(&target, &expected);
        let id = self.push(stream, outcome.of(Work::CopyToDevice(CopyToDevice { source, target, expected, pin })));
        self.pinned.add_copy(pin, id);
        Ok(())
    }

    /// Checks a copy between host and device memory. Returns its stream, its outcome, and the registration of the host
    /// memory, or `None` for pageable memory.
    pub fn begin_copy(
        &mut self,
        operation: &str,
        host: &Region,
        device: Region,
        writes_device: bool,
        stream: usize,
    ) -> Result<(usize, Outcome, Option<PinId>), Status> {
        let stream = self.stream_for_work(operation, stream)?;
        let outcome = self.faults.copy();
        if outcome == Outcome::Rejected {
            return Err(Status::Unknown);
        }
        if !is_mapped(host) {
            self.report(Kind::HostReleased, format!("{operation} of {host}, which is not mapped"));
            return Err(Status::InvalidValue);
        }
        let pin = self.pinned.covering(host, context::current());
        if pin.is_none() && !self.faults.unpinned_allowed() {
            self.report(Kind::Unpinned, format!("{operation} of {host}, which is not registered"));
        }
        self.access_on_stream(stream, device, writes_device, operation)?;
        self.counters.copies += 1;
        self.counters.copied_bytes += host.bytes();
        let is_other = self.last_copy.replace(stream).is_some_and(|last| last != stream);
        self.counters.stream_changes += u64::from(is_other);
        Ok((stream, outcome, pin))
    }

    /// Ends all work of the context with an error.
    pub fn set_lost(&mut self, context: usize) {
        if let Some(device) = self.devices.iter_mut().find(|device| device.context == context) {
            device.lost = Some(Status::IllegalAddress);
        }
    }
}

impl CopyToDevice {
    /// Copies, unless the context is lost or a buffer is no longer valid.
    pub fn run(self, shared: &SharedDriver, epoch: u64, context: usize, random: &mut Random) {
        let Some(bytes) = self.read_source(shared, epoch, context) else {
            return;
        };
        let mut driver = shared.lock();
        if driver.epoch == epoch {
            // The free of a target was reported when it happened.
            driver.memory.write(&self.target, &bytes);
        }
        drop(driver);
        if bytes != self.expected {
            return;
        }
        // The copy engine owns the source until the program has waited for the
        // copy, even after the bytes have arrived.
        random.delay();
        self.read_source(shared, epoch, context);
    }

    /// Returns the bytes of the source, or `None` if the copy must not run.
    /// Reports a source that was freed or changed.
    fn read_source(&self, shared: &SharedDriver, epoch: u64, context: usize) -> Option<Vec<u8>> {
        // The unregistration of a source was reported when it happened.
        let is_registered = |driver: &Driver| self.pin.is_none_or(|pin| driver.pinned.is_live(pin));
        if !is_registered(&shared.lock()) {
            return None;
        }
        let bytes = read_host(&self.source);
        let mut driver = shared.lock();
        let is_current = driver.epoch == epoch && !driver.is_lost(context);
        if !is_current || !is_registered(&driver) {
            return None;
        }
        match &bytes {
            None => {
                let text = format!("{} was freed while a copy from it was pending", self.source);
                driver.report(Kind::HostReleased, text);
            }
            Some(bytes) if *bytes != self.expected => {
                let differs = bytes.iter().zip(&self.expected).position(|(now, then)| now != then);
                let text = format!(
                    "{} changed while a copy from it was pending, first at byte {}",
                    self.source,
                    differs.unwrap_or(0)
                );
                driver.report(Kind::SourceChanged, text);
            }
            Some(_) => {}
        }
        bytes
    }
}
