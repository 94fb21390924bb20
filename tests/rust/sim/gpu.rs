//! GPU state that PyTorch holds during a load: the primary context, a current
//! stream, and blocks of device memory.

use super::Sim;
use super::abi::{CaptureMode, Status};
use std::cell::RefCell;

/// Handle of the default stream of the current context.
const DEFAULT_STREAM: usize = 0;

/// GPU in use by a program. Dropping the `Gpu` frees its blocks and its stream and
/// releases the context, so that remaining objects are leaks of the tested code.
pub struct Gpu<'a> {
    sim: &'a Sim,
    pub ordinal: i32,
    pub context: usize,
    /// Current stream.
    pub stream: usize,
    blocks: RefCell<Vec<u64>>,
}

impl<'a> Gpu<'a> {
    /// Makes the GPU `ordinal` current on this thread, with a new stream as current stream.
    pub fn new(sim: &'a Sim, ordinal: i32) -> Gpu<'a> {
        let mut gpu = Gpu::with_default_stream(sim, ordinal);
        gpu.stream = gpu.with_context(|| sim.cuda.create_stream()).expect("a stream");
        gpu
    }

    /// Like [`Gpu::new`], with the default stream as current stream, as in a program that never sets a stream.
    pub fn with_default_stream(sim: &'a Sim, ordinal: i32) -> Gpu<'a> {
        let context = sim.cuda.retain_context(ordinal).expect("a context");
        sim.cuda.set_current(context).expect("the context is alive");
        Gpu { sim, ordinal, context, stream: DEFAULT_STREAM, blocks: RefCell::default() }
    }

    /// Allocates a block of device memory, filled with poison.
    pub fn allocate(&self, bytes: usize) -> u64 {
        self.try_allocate(bytes).expect("device memory")
    }

    /// Like [`Gpu::allocate`], but returns an error without free memory.
    pub fn try_allocate(&self, bytes: usize) -> Result<u64, Status> {
        let address = self.with_context(|| self.sim.cuda.allocate(bytes))?;
        self.blocks.borrow_mut().push(address);
        Ok(address)
    }

    /// Queues a kernel on the current stream that fills a block with 0x11.
    pub fn queue_fill(&self, address: u64, bytes: usize) {
        let status = self.with_context(|| self.sim.launch_write(self.stream, address, bytes, 0x11));
        // A lost context rejects the kernel.
        assert!(matches!(status, Ok(()) | Err(Status::IllegalAddress)), "{status:?}");
    }

    /// Reads a block with a kernel on the current stream, synchronizes, and returns the bytes.
    pub fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        self.read_all([(address, bytes)]).swap_remove(0)
    }

    /// Like [`Gpu::read`], for several blocks.
    pub fn read_all(&self, blocks: impl IntoIterator<Item = (u64, usize)> + Clone) -> Vec<Vec<u8>> {
        for (address, bytes) in blocks.clone() {
            self.with_context(|| self.sim.launch_read(self.stream, address, bytes)).expect("a kernel");
        }
        self.synchronize();
        let read = |(address, bytes)| self.sim.read(address, bytes).expect("device memory");
        blocks.into_iter().map(read).collect()
    }

    /// Synchronizes the current stream.
    pub fn synchronize(&self) {
        self.with_context(|| self.sim.cuda.synchronize_stream(self.stream)).expect("the context works");
    }

    /// Runs calls in the context, and in the capture mode in which PyTorch's allocator calls the driver.
    pub fn with_context<T>(&self, body: impl FnOnce() -> T) -> T {
        let mode = self.sim.cuda.exchange_capture_mode(CaptureMode::Relaxed);
        let before = self.sim.cuda.current().expect("cuCtxGetCurrent");
        self.sim.cuda.set_current(self.context).expect("the context is alive");
        let result = body();
        self.sim.cuda.set_current(before).expect("the context was current before");
        self.sim.cuda.exchange_capture_mode(mode);
        result
    }
}

impl Drop for Gpu<'_> {
    fn drop(&mut self) {
        // A lost context rejects some of these calls; the errors are irrelevant to the test.
        let cuda = &self.sim.cuda;
        let _ = self.with_context(|| cuda.synchronize_stream(self.stream));
        for block in self.blocks.take() {
            let _ = self.with_context(|| cuda.free(block));
        }
        if self.stream != DEFAULT_STREAM {
            let _ = self.with_context(|| cuda.destroy_stream(self.stream));
        }
        if cuda.current() == Ok(self.context) {
            let _ = cuda.set_current(0);
        }
        let _ = cuda.release_context(self.ordinal);
    }
}
