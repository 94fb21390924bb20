//! Context, copy streams and events of each GPU, which the process keeps between loads. Creating them takes longer than
//! loading a small tensor.

use super::COPY_STREAMS;
use super::driver::{Context, Event, Stream};
use crate::error::Result;
use crate::options::experiments::{self, Switch};
use crate::os::mutex::Mutex;
use crate::os::numa::{self, Node};
use crate::os::per_process::PerProcess;
use cudarc::driver::sys;
use rustix::thread::CpuSet;
use std::mem::{self, ManuallyDrop};
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

/// Copy streams of one load at a time: two loads on one stream would wait for each other's callers.
pub type CopyStreams = [Stream; COPY_STREAMS];

/// A GPU that loads and saves have used.
pub struct Gpu {
    ordinal: i32,
    pub(super) context: Arc<Context>,
    pub(super) node: Option<Node>,
    /// CPUs on which readers run, if an experiment asks for it.
    pub(super) reader_cpus: Option<CpuSet>,
    spare: Mutex<Spare>,
}

/// Driver objects that nothing uses.
#[derive(Default)]
pub struct Spare {
    events: Vec<Event>,
    copy_streams: Vec<CopyStreams>,
}

static GPUS: PerProcess<Mutex<Vec<Arc<Gpu>>>> = PerProcess::new(Mutex::default);

/// Forgets all GPUs. Each is given back to the driver when the last load that uses it has ended.
pub fn release() {
    let forgotten = mem::take(&mut *GPUS.get().lock());
    // The driver may take its time, and no lock is held.
    drop(forgotten);
}

impl Gpu {
    /// Returns the GPU with this ordinal.
    ///
    /// # Errors
    /// `device` if there is no driver or no such GPU.
    pub fn of(ordinal: i32) -> Result<Arc<Gpu>> {
        let mut gpus = GPUS.get().lock();
        if let Some(gpu) = gpus.iter().find(|gpu| gpu.ordinal == ordinal) {
            return Ok(Arc::clone(gpu));
        }
        let context = Context::retain(ordinal)?;
        let id = context.pci_id().inspect_err(|error| tracing::debug!(%error, "the GPU has no PCI address"));
        let node = id.as_ref().ok().and_then(|id| numa::of_pci_device(id));
        let places_readers = experiments::value(Switch::ReaderNode) == Some(1);
        let near = |id: &String| numa::cpus_near(Path::new("/sys"), id);
        let reader_cpus = id.as_ref().ok().filter(|_| places_readers).and_then(near);
        let gpu = Arc::new(Gpu { ordinal, context, node, reader_cpus, spare: Mutex::default() });
        gpus.push(Arc::clone(&gpu));
        Ok(gpu)
    }

    /// Returns an event that nothing else uses.
    pub fn event(self: &Arc<Gpu>) -> Result<Lent<Event>> {
        self.lend(|| Event::create(&self.context))
    }

    /// Waits for all work on a stream after an error. An error of this wait is only logged.
    pub fn settle(&self, stream: sys::CUstream) {
        if let Err(error) = self.context.settle(stream) {
            tracing::debug!(%error, "while ending failed work");
        }
    }

    /// Returns copy streams that nothing else uses. Work of an earlier load may be queued on them.
    pub fn copy_streams(self: &Arc<Gpu>) -> Result<Lent<CopyStreams>> {
        self.lend(|| Ok([Stream::create(&self.context)?, Stream::create(&self.context)?]))
    }

    fn lend<T: Kept>(self: &Arc<Gpu>, create: impl FnOnce() -> Result<T>) -> Result<Lent<T>> {
        let spare = T::list(&mut self.spare.lock()).pop();
        Ok(Lent { object: ManuallyDrop::new(spare.map_or_else(create, Ok)?), gpu: Arc::clone(self) })
    }
}

/// Driver object that its GPU keeps for the next user when this is dropped.
///
/// An event may be lent again while streams wait for it: they wait for the work before the record that was the last one
/// when the wait was queued.
pub struct Lent<T: Kept> {
    object: ManuallyDrop<T>,
    gpu: Arc<Gpu>,
}

/// Driver object that a GPU keeps.
pub trait Kept: Sized {
    /// Returns the objects of this type that nothing uses.
    fn list(spare: &mut Spare) -> &mut Vec<Self>;
}

impl Kept for Event {
    fn list(spare: &mut Spare) -> &mut Vec<Event> {
        &mut spare.events
    }
}

impl Kept for CopyStreams {
    fn list(spare: &mut Spare) -> &mut Vec<CopyStreams> {
        &mut spare.copy_streams
    }
}

impl<T: Kept> Deref for Lent<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.object
    }
}

impl<T: Kept> Drop for Lent<T> {
    fn drop(&mut self) {
        // SAFETY: the object is not used any more.
        let object = unsafe { ManuallyDrop::take(&mut self.object) };
        T::list(&mut self.gpu.spare.lock()).push(object);
    }
}
