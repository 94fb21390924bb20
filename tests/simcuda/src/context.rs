//! Devices, their primary contexts, and which context a thread has current.

use crate::abi::{Kind, Status};
use crate::driver::{Driver, new_handle};
use std::cell::Cell;

/// How many devices there are.
pub const DEVICES: usize = 2;

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// The handle of the calling thread's context, 0 if it has none.
pub fn current() -> usize {
    CURRENT.get()
}

/// A device and its primary context.
#[derive(Debug)]
pub struct Device {
    /// The primary context's handle.
    pub context: usize,
    /// The handle of its default stream, which callers name with 0.
    pub default_stream: usize,
    /// How often the context is retained. It is alive while this is not 0.
    pub retained: u64,
    /// The error that every call returns since a copy has failed.
    pub lost: Option<Status>,
}

impl Device {
    /// A device whose context nobody has retained.
    pub fn new() -> Device {
        Device { context: new_handle(), default_stream: new_handle(), retained: 0, lost: None }
    }
}

impl Default for Device {
    fn default() -> Self {
        Device::new()
    }
}

impl Driver {
    /// `cuDeviceGet`.
    pub fn device(&self, ordinal: i32) -> Result<usize, Status> {
        let device = usize::try_from(ordinal).map_err(|_| Status::InvalidDevice)?;
        (device < DEVICES).then_some(device).ok_or(Status::InvalidDevice)
    }

    /// `cuDevicePrimaryCtxRetain`.
    pub fn retain_context(&mut self, ordinal: i32) -> Result<usize, Status> {
        let device = self.device(ordinal)?;
        self.count_allocation()?;
        self.devices[device].retained += 1;
        Ok(self.devices[device].context)
    }

    /// `cuDevicePrimaryCtxRelease_v2`. A context that nobody retains any more
    /// is gone, and with it the error that it had and its modules.
    pub fn release_context(&mut self, ordinal: i32) -> Result<(), Status> {
        let device = self.device(ordinal)?;
        if self.devices[device].retained == 0 {
            self.report(Kind::DoubleFree, format!("the context of device {device} is released, but nobody retains it"));
            return Err(Status::InvalidContext);
        }
        self.devices[device].retained -= 1;
        if self.devices[device].retained == 0 {
            self.devices[device].lost = None;
            self.drop_modules(self.devices[device].context);
        }
        Ok(())
    }

    /// `cuCtxSetCurrent`; 0 leaves the thread without a context.
    pub fn set_current(&mut self, context: usize) -> Result<(), Status> {
        if context != 0 {
            self.device_of(context)?;
        }
        CURRENT.set(context);
        Ok(())
    }

    /// The device of the calling thread's context, if that context works.
    pub fn current_device(&mut self) -> Result<usize, Status> {
        let context = self.current_healthy()?;
        self.device_of(context)
    }

    /// The calling thread's context, if there is one and it works.
    pub fn current_healthy(&mut self) -> Result<usize, Status> {
        let context = current();
        self.device_of(context)?;
        self.healthy(context)?;
        Ok(context)
    }

    /// The device whose live context this is.
    pub fn device_of(&mut self, context: usize) -> Result<usize, Status> {
        let Some(device) = self.devices.iter().position(|device| device.context == context) else {
            return Err(Status::InvalidContext);
        };
        if self.devices[device].retained == 0 {
            self.report(Kind::UseAfterFree, format!("the context of device {device} is used, but nobody retains it"));
            return Err(Status::InvalidContext);
        }
        Ok(device)
    }

    /// Whether a failure has ended all work in the context.
    pub fn is_lost(&self, context: usize) -> bool {
        self.devices.iter().any(|device| device.context == context && device.lost.is_some())
    }

    /// The error of a lost context. Whoever gets it knows that nothing of that
    /// context will run any more.
    pub fn healthy(&mut self, context: usize) -> Result<(), Status> {
        let device = self.devices.iter().find(|device| device.context == context);
        let Some(error) = device.and_then(|device| device.lost) else {
            return Ok(());
        };
        for stream in self.streams.values().filter(|stream| stream.context == context) {
            self.order.host_learns(&stream.clock);
        }
        Err(error)
    }
}
