//! Kernels of csrc/kernels, which are compiled into the library and loaded once into each GPU's context.
//!
//! The image is compiled and compressed by CUDA 13, which drivers of CUDA 12 need not accept. They compile PTX instead, and
//! keep the result on the disk.
//!
//! | kernel | parameters |
//! |---|---|
//! | [`SCATTER`] | address of the tasks (`u64`), number of tasks (`u32`), number of tiles (`u32`) |
//! | [`SCATTER_INLINE`] | a [`Batch`](crate::cast::scatter::Batch) |
//! | [`DEQUANTIZE`] | a [`MatrixBatch`](crate::cast::dequantize_task::MatrixBatch) |
//!
//! All take one-dimensional blocks of [`BLOCK_THREADS`], at most one block per tile, and no shared memory.

use super::driver::{Context, check, report};
use crate::cast::dequantize_task::MatrixBatch;
use crate::cast::scatter::{Batch, Table};
use crate::error::{Error, Kind, Result};
use crate::os::mutex::Mutex;
use crate::os::per_process::PerProcess;
use crate::profile;
use cudarc::driver::sys;
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Fatbin for compute capability 7.5 and up, for `cuModuleLoadData`; `None` in a build without nvcc.
pub const IMAGE: Option<&[u8]> = image();

/// The same kernels for drivers that refuse [`IMAGE`], as text that a zero terminates.
#[cfg(fst_kernels)]
const PTX: &[u8] = include_bytes!(env!("FST_KERNELS_PTX"));
#[cfg(not(fst_kernels))]
const PTX: &[u8] = &[];

/// Kernel that runs the tasks of a table in device memory: copies and casts of strided rows, and writes by position.
pub const SCATTER: &CStr = c"fst_scatter";

/// Kernel that runs the tasks in its parameters.
pub const SCATTER_INLINE: &CStr = c"fst_scatter_inline";

/// Kernel that dequantizes the matrices in its parameters.
pub const DEQUANTIZE: &CStr = c"fst_dequantize";

/// Number of threads in a block.
pub const BLOCK_THREADS: u32 = 256;

/// Number of blocks that keep the largest GPUs busy. If there are more tiles, each block runs several.
const BLOCKS_MAX: u32 = 2048;

/// Errors of `cuModuleLoadData` for an image that this driver can never load. Others may pass.
const PERMANENT_ERRORS: [sys::CUresult; 6] = [
    sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
    sys::CUresult::CUDA_ERROR_INVALID_IMAGE,
    sys::CUresult::CUDA_ERROR_INVALID_PTX,
    sys::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    sys::CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
    sys::CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED,
];

/// Reason why the kernels could not be loaded.
struct Refusal {
    error: Error,
    /// Whether each further attempt would fail, too.
    is_permanent: bool,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal { error, is_permanent: false }
    }
}

/// Kernels, loaded into one context.
pub struct Kernels {
    scatter: sys::CUfunction,
    scatter_inline: sys::CUfunction,
    dequantize: sys::CUfunction,
    /// Whether a launch may be queued, or be part of a CUDA graph, without an event after it. Then the module stays
    /// loaded.
    is_kept: AtomicBool,
    module: sys::CUmodule,
    context: Arc<Context>,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above; launches do not change a function.
unsafe impl Sync for Kernels {}

/// Kernels of each GPU in use, or the reason why there are none for the GPU.
type Loaded = Vec<(sys::CUdevice, std::result::Result<Arc<Kernels>, String>)>;

static LOADED: PerProcess<Mutex<Loaded>> = PerProcess::new(Mutex::default);

/// Unloads the kernels. The next load that needs them loads them again.
pub fn release() {
    LOADED
        .get()
        .lock()
        .retain(|(_, kernels)| kernels.as_ref().is_ok_and(|kernels| kernels.is_kept.load(Ordering::Relaxed)));
}

/// Returns why a GPU that was used has no kernels, or `None` if it has some.
pub fn missing(ordinal: i32) -> Option<String> {
    let loaded = LOADED.get().lock();
    let (_, kernels) = loaded.iter().find(|(device, _)| *device == ordinal)?;
    kernels.as_ref().err().cloned()
}

impl Kernels {
    /// Returns the kernels of the context's GPU, or `None` if they cannot be loaded; log and profile have the reason. The
    /// next call tries again, unless this driver has none for the GPU.
    pub fn of(context: &Arc<Context>) -> Option<Arc<Kernels>> {
        let mut loaded = LOADED.get().lock();
        if let Some((_, kernels)) = loaded.iter().find(|(device, _)| *device == context.device) {
            return kernels.as_ref().inspect_err(|why| profile::missing_kernels(context.device, why)).ok().cloned();
        }
        let (kernels, is_final) = match Kernels::load(context) {
            Ok(kernels) => (Ok(Arc::new(kernels)), true),
            Err(Refusal { error, is_permanent }) => {
                tracing::warn!(%error, "no device kernels: small tensors are copied one by one, PyTorch casts and the CPU dequantizes");
                let why = error.to_string();
                profile::missing_kernels(context.device, &why);
                (Err(why), is_permanent)
            }
        };
        if is_final {
            loaded.push((context.device, kernels.clone()));
        }
        kernels.ok()
    }

    fn load(context: &Arc<Context>) -> std::result::Result<Kernels, Refusal> {
        let without_nvcc = || Error::new(Kind::Device, "the library was built without nvcc, and so without kernels");
        let image = IMAGE.ok_or_else(|| Refusal { error: without_nvcc(), is_permanent: true })?;
        let _bound = context.bind()?;
        let module = load_image(image).or_else(|refusal| {
            if refusal.error.kind() == Kind::OutOfMemory {
                return Err(refusal);
            }
            tracing::info!(error = %refusal.error, "the driver refuses the image of the kernels, and compiles their PTX");
            load_image(PTX)
        })?;
        let mut kernels = Kernels {
            scatter: ptr::null_mut(),
            scatter_inline: ptr::null_mut(),
            dequantize: ptr::null_mut(),
            is_kept: AtomicBool::new(false),
            module,
            context: Arc::clone(context),
        };
        kernels.scatter = kernels.function(SCATTER)?;
        kernels.scatter_inline = kernels.function(SCATTER_INLINE)?;
        kernels.dequantize = kernels.function(DEQUANTIZE)?;
        Ok(kernels)
    }

    fn function(&self, name: &CStr) -> Result<sys::CUfunction> {
        let mut function = ptr::null_mut();
        // SAFETY: the module is loaded in the current context.
        let result = unsafe { sys::cuModuleGetFunction(&raw mut function, self.module, name.as_ptr()) };
        check("cuModuleGetFunction", result)?;
        Ok(function)
    }

    /// Queues the kernel for a table, which is at `address` on the device when the kernel runs.
    pub fn scatter(&self, address: u64, table: &Table, stream: sys::CUstream) -> Result<()> {
        let task_count = u32::try_from(table.tasks().len());
        let mut task_count = task_count.map_err(|_| Error::new(Kind::Internal, "a table has too many tasks"))?;
        let (mut address, mut tile_count) = (address, table.tile_count());
        if tile_count == 0 {
            return Ok(());
        }
        let mut arguments: [*mut c_void; 3] =
            [(&raw mut address).cast(), (&raw mut task_count).cast(), (&raw mut tile_count).cast()];
        self.launch(self.scatter, tile_count, &mut arguments, stream)
    }

    /// Keeps the module loaded from now on. Must be called before a launch without an event after it.
    pub fn keep(&self) {
        self.is_kept.store(true, Ordering::Relaxed);
    }

    /// Queues the kernel for a batch, on a stream of the current context.
    pub fn scatter_inline(&self, mut batch: Batch, stream: sys::CUstream) -> Result<()> {
        let tile_count = batch.tile_count;
        self.launch(self.scatter_inline, tile_count, &mut [(&raw mut batch).cast()], stream)
    }

    /// Queues the kernel for matrices, on a stream of the current context.
    pub fn dequantize(&self, mut batch: MatrixBatch, stream: sys::CUstream) -> Result<()> {
        let tile_count = batch.tile_count;
        self.launch(self.dequantize, tile_count, &mut [(&raw mut batch).cast()], stream)
    }

    /// Queues a kernel. `arguments` must match its parameters.
    fn launch(
        &self,
        function: sys::CUfunction,
        tile_count: u32,
        arguments: &mut [*mut c_void],
        stream: sys::CUstream,
    ) -> Result<()> {
        // SAFETY: the callers pass matching arguments, which the driver copies before it returns.
        let result = unsafe {
            sys::cuLaunchKernel(
                function,
                tile_count.min(BLOCKS_MAX),
                1,
                1,
                BLOCK_THREADS,
                1,
                1,
                0,
                stream,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", result)
    }
}

/// Loads a module into the current context.
fn load_image(image: &'static [u8]) -> std::result::Result<sys::CUmodule, Refusal> {
    let mut module = ptr::null_mut();
    // SAFETY: the image is a complete fatbin or PTX with a terminating zero. The driver copies it.
    let result = unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
    check("cuModuleLoadData", result)
        .map_err(|error| Refusal { error, is_permanent: PERMANENT_ERRORS.contains(&result) })?;
    Ok(module)
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: this value loaded the module, and every owner of a queued launch still holds a reference to it.
            report("cuModuleUnload", unsafe { sys::cuModuleUnload(self.module) });
        }
    }
}

#[cfg(fst_kernels)]
const fn image() -> Option<&'static [u8]> {
    // The driver reads the image in words.
    #[repr(align(16))]
    struct Aligned<T: ?Sized>(T);
    static IMAGE: &Aligned<[u8]> = &Aligned(*include_bytes!(env!("FST_KERNELS")));
    Some(&IMAGE.0)
}

#[cfg(not(fst_kernels))]
const fn image() -> Option<&'static [u8]> {
    None
}
