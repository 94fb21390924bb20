//! What PyTorch holds of a GPU while it asks for tensors: the primary context,
//! a current stream, and blocks of memory.

use super::Sim;
use super::abi::Status;
use std::cell::RefCell;

/// Names the default stream of whichever context is current.
const DEFAULT_STREAM: usize = 0;

/// A GPU in use by a program. Dropping it frees its blocks, its stream and its
/// hold on the context, so that whatever is left over is somebody else's leak.
pub struct Gpu<'a> {
    sim: &'a Sim,
    pub ordinal: i32,
    pub context: usize,
    /// The stream that is current.
    pub stream: usize,
    blocks: RefCell<Vec<u64>>,
}

impl<'a> Gpu<'a> {
    /// The GPU with this number, current on this thread from now on, with a side stream as current stream.
    pub fn new(sim: &'a Sim, ordinal: i32) -> Gpu<'a> {
        let mut gpu = Gpu::with_default_stream(sim, ordinal);
        gpu.stream = sim.cuda.create_stream().expect("a stream");
        gpu
    }

    /// As [`Gpu::new`], with the default stream as current stream, as in a program that never sets one.
    pub fn with_default_stream(sim: &'a Sim, ordinal: i32) -> Gpu<'a> {
        let context = sim.cuda.retain_context(ordinal).expect("a context");
        sim.cuda.set_current(context).expect("the context is alive");
        Gpu { sim, ordinal, context, stream: DEFAULT_STREAM, blocks: RefCell::default() }
    }

    /// A block of device memory, full of poison.
    pub fn allocate(&self, bytes: usize) -> u64 {
        self.try_allocate(bytes).expect("device memory")
    }

    /// As [`Gpu::allocate`], where a test wants the memory to run out.
    pub fn try_allocate(&self, bytes: usize) -> Result<u64, Status> {
        let address = self.on_this(|| self.sim.cuda.allocate(bytes))?;
        self.blocks.borrow_mut().push(address);
        Ok(address)
    }

    /// Work of the caller on the current stream that still uses a block.
    pub fn use_for_long(&self, address: u64, bytes: usize) {
        let used = self.on_this(|| self.sim.launch_write(self.stream, address, bytes, 0x11));
        // A program whose context is lost cannot use anything any more, and so not too early.
        assert!(matches!(used, Ok(()) | Err(Status::IllegalAddress)), "{used:?}");
    }

    /// What the caller's next kernel on the current stream, and then the host, find in a block.
    pub fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        self.read_all([(address, bytes)]).swap_remove(0)
    }

    /// As [`Gpu::read`], of several blocks.
    pub fn read_all(&self, blocks: impl IntoIterator<Item = (u64, usize)> + Clone) -> Vec<Vec<u8>> {
        for (address, bytes) in blocks.clone() {
            self.on_this(|| self.sim.launch_read(self.stream, address, bytes)).expect("a kernel");
        }
        self.synchronize();
        let read = |(address, bytes)| self.sim.read(address, bytes).expect("device memory");
        blocks.into_iter().map(read).collect()
    }

    /// Waits for the current stream.
    pub fn synchronize(&self) {
        self.on_this(|| self.sim.cuda.synchronize_stream(self.stream)).expect("the context works");
    }

    fn on_this<T>(&self, body: impl FnOnce() -> T) -> T {
        let before = self.sim.cuda.current().expect("cuCtxGetCurrent");
        self.sim.cuda.set_current(self.context).expect("the context is alive");
        let result = body();
        self.sim.cuda.set_current(before).expect("the context was current before");
        result
    }
}

impl Drop for Gpu<'_> {
    fn drop(&mut self) {
        // A lost context refuses some of this, which is no concern of the test's.
        let cuda = &self.sim.cuda;
        let _ = self.on_this(|| cuda.synchronize_stream(self.stream));
        for block in self.blocks.take() {
            let _ = self.on_this(|| cuda.free(block));
        }
        if self.stream != DEFAULT_STREAM {
            let _ = cuda.destroy_stream(self.stream);
        }
        if cuda.current() == Ok(self.context) {
            let _ = cuda.set_current(0);
        }
        let _ = cuda.release_context(self.ordinal);
    }
}
