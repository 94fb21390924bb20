//! Devices, their primary contexts, and the current context of each thread.

use crate::abi::{Kind, Status};
use crate::driver::{Driver, new_handle};
use std::cell::Cell;

/// Number of devices.
pub const DEVICES: usize = 5;

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// Returns the handle of the calling thread's context, or 0 without a context.
pub fn current() -> usize {
    CURRENT.get()
}

/// A device and its contexts.
#[derive(Debug)]
pub struct Device {
    /// Handle of the primary context.
    pub context: usize,
    /// Handle of the default stream of the primary context, to which callers refer by 0.
    pub default_stream: usize,
    /// Handle of another context, such as a green context's, and of its default stream. Work never fails there.
    pub other: (usize, usize),
    /// Retain count of the context, which is alive while the count is not 0.
    pub retained: u64,
    /// Error that every call returns after work of the context has failed.
    pub lost: Option<Status>,
}

impl Default for Device {
    fn default() -> Self {
        let other = (new_handle(), new_handle());
        Device { context: new_handle(), default_stream: new_handle(), other, retained: 0, lost: None }
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

    /// `cuDevicePrimaryCtxRelease_v2`. The last release destroys the context, its
    /// error and its modules.
    pub fn release_context(&mut self, ordinal: i32) -> Result<(), Status> {
        let device = self.device(ordinal)?;
        if self.devices[device].retained == 0 {
            self.report(
                Kind::DoubleFree,
                format!("the context of device {device} is released, but it is not retained"),
            );
            return Err(Status::InvalidContext);
        }
        self.devices[device].retained -= 1;
        if self.devices[device].retained == 0 {
            self.devices[device].lost = None;
            self.drop_modules(self.devices[device].context);
        }
        Ok(())
    }

    /// `cuCtxSetCurrent`. A `context` of 0 leaves the thread without a context.
    pub fn set_current(&mut self, context: usize) -> Result<(), Status> {
        if context != 0 {
            self.device_of(context)?;
        }
        CURRENT.set(context);
        Ok(())
    }

    /// Returns the device of the calling thread's context.
    ///
    /// # Errors
    /// `InvalidContext` without a live context, and the error of a lost context.
    pub fn current_device(&mut self) -> Result<usize, Status> {
        let context = self.current_healthy()?;
        self.device_of(context)
    }

    /// Returns the calling thread's context, with the errors of [`Driver::current_device`].
    pub fn current_healthy(&mut self) -> Result<usize, Status> {
        let context = current();
        self.device_of(context)?;
        self.healthy(context)?;
        Ok(context)
    }

    /// Returns the device of a live context.
    pub fn device_of(&mut self, context: usize) -> Result<usize, Status> {
        let Some(device) = self.devices.iter().position(|device| [device.context, device.other.0].contains(&context))
        else {
            return Err(Status::InvalidContext);
        };
        if self.devices[device].retained == 0 {
            self.report(Kind::UseAfterFree, format!("the context of device {device} is used, but it is not retained"));
            return Err(Status::InvalidContext);
        }
        Ok(device)
    }

    /// Returns whether a failure has ended all work of the context.
    pub fn is_lost(&self, context: usize) -> bool {
        self.devices.iter().any(|device| device.context == context && device.lost.is_some())
    }

    /// Returns the error of a lost context. The error tells the host that no work
    /// of the context will run, so the host has waited for all of that work.
    pub fn healthy(&mut self, context: usize) -> Result<(), Status> {
        let device = self.devices.iter().find(|device| device.context == context);
        let Some(error) = device.and_then(|device| device.lost) else {
            return Ok(());
        };
        for stream in self.streams.values().filter(|stream| stream.context == context) {
            self.order.set_host_waited(&stream.clock);
        }
        Err(error)
    }
}
