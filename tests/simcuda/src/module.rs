//! Modules and their functions.

use crate::abi::{Kind, Status};
use crate::context;
use crate::driver::{Driver, new_handle};
use crate::host::read_host;
use crate::region::Region;
use std::ffi::CStr;

/// First bytes of a fatbin.
const FATBIN_MAGIC: [u8; 4] = 0xBA55_ED50_u32.to_le_bytes();
/// First bytes of PTX, which begins with a comment.
const PTX_MAGIC: [u8; 4] = *b"//\n/";
/// Bytes of PTX that state the version of CUDA 12.0.
const PTX_VERSION: &[u8] = b"\n.version 8.0\n";
/// Number of bytes at the beginning of PTX that contain the version.
const PTX_HEAD_BYTES: u64 = 400;

/// Image of fst's kernels, loaded into a context.
#[derive(Debug)]
pub struct Module {
    context: usize,
}

/// Function of a loaded module.
#[derive(Debug)]
pub struct Function {
    module: usize,
    kernel: Kernel,
}

/// Functions of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Scatter with the tasks in device memory.
    Scatter,
    /// Scatter with the tasks in the parameters.
    ScatterInline,
    /// Dequantization of the matrices in the parameters.
    Dequantize,
}

impl Driver {
    /// `cuModuleLoadData` of a fatbin or of PTX, of which only the first bytes are checked.
    pub fn load_module(&mut self, image: u64) -> Result<usize, Status> {
        let context = self.current_healthy()?;
        self.counters.allocations += 1;
        let head = |bytes: u64| Region::linear(image, bytes).and_then(|region| read_host(&region)).unwrap_or_default();
        let magic = head(FATBIN_MAGIC.len() as u64);
        self.faults.module(magic == FATBIN_MAGIC)?;
        if magic == PTX_MAGIC {
            let has_version = head(PTX_HEAD_BYTES).windows(PTX_VERSION.len()).any(|window| window == PTX_VERSION);
            has_version.then_some(()).ok_or(Status::UnsupportedPtxVersion)?;
        } else if magic != FATBIN_MAGIC {
            return Err(Status::InvalidImage);
        }
        self.counters.modules += 1;
        let handle = new_handle();
        self.modules.insert(handle, Module { context });
        Ok(handle)
    }

    /// `cuModuleUnload`.
    pub fn unload_module(&mut self, handle: usize) -> Result<(), Status> {
        let Some(module) = self.modules.remove(&handle) else {
            self.report(Kind::DoubleFree, format!("module {handle:#x} is unloaded, but there is no such module"));
            return Err(Status::InvalidHandle);
        };
        self.functions.retain(|_, function| function.module != handle);
        self.healthy(module.context)
    }

    /// `cuModuleGetFunction`.
    pub fn function(&mut self, module: usize, name: &CStr) -> Result<usize, Status> {
        if !self.modules.contains_key(&module) {
            self.report(Kind::UseAfterFree, format!("module {module:#x} is used, but there is no such module"));
            return Err(Status::InvalidHandle);
        }
        let kernel = match name.to_bytes() {
            b"fst_scatter" => Kernel::Scatter,
            b"fst_scatter_inline" => Kernel::ScatterInline,
            b"fst_dequantize" => Kernel::Dequantize,
            _ => return Err(Status::NotFound),
        };
        let handle = new_handle();
        self.functions.insert(handle, Function { module, kernel });
        Ok(handle)
    }

    /// Returns the kernel of a function, for a launch in the current context.
    pub fn kernel(&mut self, function: usize) -> Result<Kernel, Status> {
        let Some(Function { module, kernel }) = self.functions.get(&function) else {
            self.report(
                Kind::UseAfterFree,
                format!("function {function:#x} is launched, but there is no such function"),
            );
            return Err(Status::InvalidHandle);
        };
        let (kernel, context) = (*kernel, self.modules.get(module).map_or(0, |module| module.context));
        if context != context::current() {
            self.report(Kind::WrongContext, "a function of another context is launched".to_owned());
            return Err(Status::InvalidHandle);
        }
        Ok(kernel)
    }

    /// Removes the modules of a destroyed context.
    pub fn drop_modules(&mut self, context: usize) {
        self.modules.retain(|_, module| module.context != context);
        let modules = &self.modules;
        self.functions.retain(|_, function| modules.contains_key(&function.module));
    }
}
