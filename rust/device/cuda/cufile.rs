//! libcufile, NVIDIA's library for reads from files straight into device
//! memory (GPUDirect Storage), with the lifetimes of what it hands out.
//!
//! The types are cudarc's, but the library is opened here: cudarc looks for
//! `libcufile.so`, which comes with the toolkit's development files alone, and
//! panics without it; what machines have is `libcufile.so.0`, and PyTorch has
//! opened that already. Errors are taken as numbers, since a later library may
//! know some that cudarc's enum does not.

use crate::error::{Error, Kind, Result};
use cudarc::cufile::sys::{self, CUfileOpError};
use libloading::Library;
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

/// The names under which the library may be found, the one that programs use first.
const LIBRARY_NAMES: [&str; 2] = ["libcufile.so.0", "libcufile.so"];

/// What most calls return: `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Status {
    code: u32,
    cuda_code: u32,
}

/// The library, its driver open.
pub struct Driver {
    handle_register: unsafe extern "C" fn(*mut sys::CUfileHandle_t, *mut sys::CUfileDescr_t) -> Status,
    handle_deregister: unsafe extern "C" fn(sys::CUfileHandle_t),
    buffer_register: unsafe extern "C" fn(*const c_void, usize, c_int) -> Status,
    buffer_deregister: unsafe extern "C" fn(*const c_void) -> Status,
    read: unsafe extern "C" fn(sys::CUfileHandle_t, *mut c_void, usize, sys::off_t, sys::off_t) -> isize,
    /// Never closed, since threads of its own run in it.
    _library: ManuallyDrop<Library>,
}

/// Open until the process ends, once it is: whoever else uses the library in this process shares it, and closing would
/// take it away from them.
static OPENED: Mutex<Option<Arc<Driver>>> = Mutex::new(None);

impl Driver {
    /// The library with its driver open. The context of a GPU must be current.
    ///
    /// # Errors
    /// `device` where there is no library or it refuses.
    pub fn open() -> Result<Arc<Driver>> {
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(driver) = &*opened {
            return Ok(Arc::clone(driver));
        }
        let driver = Arc::new(Driver::load()?);
        *opened = Some(Arc::clone(&driver));
        Ok(driver)
    }

    fn load() -> Result<Driver> {
        // SAFETY: NVIDIA's library does nothing that matters to others when it is opened.
        let library = LIBRARY_NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok()).ok_or_else(|| {
            let names = LIBRARY_NAMES.join(" or ");
            Error::new(Kind::Device, format!("{names}, the library of GPUDirect Storage, cannot be opened"))
        })?;
        let incomplete = |error: libloading::Error| Error::new(Kind::Device, format!("libcufile is too old: {error}"));
        // SAFETY: the types of all functions are those of cufile.h.
        let (open, driver) = unsafe {
            let open: unsafe extern "C" fn() -> Status = *library.get(b"cuFileDriverOpen").map_err(incomplete)?;
            let driver = Driver {
                handle_register: *library.get(b"cuFileHandleRegister").map_err(incomplete)?,
                handle_deregister: *library.get(b"cuFileHandleDeregister").map_err(incomplete)?,
                buffer_register: *library.get(b"cuFileBufRegister").map_err(incomplete)?,
                buffer_deregister: *library.get(b"cuFileBufDeregister").map_err(incomplete)?,
                read: *library.get(b"cuFileRead").map_err(incomplete)?,
                _library: ManuallyDrop::new(library),
            };
            (open, driver)
        };
        // SAFETY: may be called at any time.
        let status = unsafe { open() };
        // Somebody else in this process may have opened it.
        if status.code != CUfileOpError::CU_FILE_DRIVER_ALREADY_OPEN as u32 {
            check("cuFileDriverOpen", status)?;
        }
        Ok(driver)
    }
}

/// A file that the library reads.
pub struct Handle {
    handle: sys::CUfileHandle_t,
    driver: Arc<Driver>,
    _file: File,
}

// SAFETY: the library's handles may be used from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above; reads do not change a handle.
unsafe impl Sync for Handle {}

/// Why a read failed.
pub enum ReadError {
    /// The operating system's error.
    System(io::Error),
    /// The name of the library's own.
    Library(String),
}

impl Handle {
    /// Makes a file known to the library.
    ///
    /// # Errors
    /// `device` where the library or the file system refuses.
    pub fn register(driver: &Arc<Driver>, file: File) -> Result<Handle> {
        let mut handle = ptr::null_mut();
        let mut description = sys::CUfileDescr_t {
            type_: sys::CUfileFileHandleType::CU_FILE_HANDLE_TYPE_OPAQUE_FD,
            handle: sys::CUfileDescr_t__bindgen_ty_1 { fd: file.as_raw_fd() },
            fs_ops: ptr::null(),
        };
        // SAFETY: writes the handle; the descriptor is open for as long as it is registered.
        let status = unsafe { (driver.handle_register)(&raw mut handle, &raw mut description) };
        check("cuFileHandleRegister", status)?;
        Ok(Handle { handle, driver: Arc::clone(driver), _file: file })
    }

    /// Reads up to `length` bytes of the file from `offset` on to `base + base_offset` in device memory, and says how
    /// many came; 0 at the end of the file. The context of the memory's GPU must be current.
    ///
    /// # Safety
    /// Nobody else uses that memory meanwhile, work that was queued before included: no stream orders this read.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub unsafe fn read(
        &self,
        offset: u64,
        length: u64,
        base: u64,
        base_offset: u64,
    ) -> std::result::Result<usize, ReadError> {
        let too_large = |_| ReadError::System(io::ErrorKind::InvalidInput.into());
        let length = usize::try_from(length).map_err(too_large)?;
        let offsets = (sys::off_t::try_from(offset), sys::off_t::try_from(base_offset));
        let (offset, base_offset) = (offsets.0.map_err(too_large)?, offsets.1.map_err(too_large)?);
        // SAFETY: the caller promises the memory, and the handle is registered.
        let count = unsafe { (self.driver.read)(self.handle, device_pointer(base), length, offset, base_offset) };
        match usize::try_from(count) {
            Ok(count) => Ok(count),
            Err(_) if count == -1 => Err(ReadError::System(io::Error::last_os_error())),
            Err(_) => Err(ReadError::Library(
                u32::try_from(count.unsigned_abs()).map_or_else(|_| format!("error {count}"), name_of),
            )),
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: registered once by this value, and nobody reads with it any more.
        unsafe { (self.driver.handle_deregister)(self.handle) };
    }
}

/// Device memory that the library may let a disk write to.
pub struct Registered {
    base: u64,
    driver: Arc<Driver>,
}

impl Registered {
    /// Registers memory, which stays allocated for as long as the registration lives. The context of its GPU must be
    /// current.
    ///
    /// # Errors
    /// `device` where the library refuses; reads work all the same, through memory of its own.
    pub fn new(driver: &Arc<Driver>, base: u64, bytes: u64) -> Result<Registered> {
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: only makes an address known; what is no device memory is refused.
        let status = unsafe { (driver.buffer_register)(device_pointer(base), length, 0) };
        check("cuFileBufRegister", status)?;
        Ok(Registered { base, driver: Arc::clone(driver) })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: registered once by this value, and no read uses the memory any more.
        let status = unsafe { (self.driver.buffer_deregister)(device_pointer(self.base)) };
        if let Err(error) = check("cuFileBufDeregister", status) {
            tracing::debug!(%error, "while letting go");
        }
    }
}

fn device_pointer(address: u64) -> *mut c_void {
    ptr::without_provenance_mut(usize::try_from(address).unwrap_or(0))
}

fn check(call: &str, status: Status) -> Result<()> {
    if status.code == CUfileOpError::CU_FILE_SUCCESS as u32 {
        return Ok(());
    }
    let mut text = format!("{call} failed with {}", name_of(status.code));
    if status.code == CUfileOpError::CU_FILE_CUDA_DRIVER_ERROR as u32 {
        text += &format!(", and the CUDA driver with error {}", status.cuda_code);
    }
    Err(Error::new(Kind::Device, text))
}

fn name_of(code: u32) -> String {
    let known = ERRORS.iter().find(|error| **error as u32 == code);
    known.map_or_else(|| format!("error {code}"), |error| format!("{error:?}"))
}

/// The errors that have a name, which the library itself does not tell.
const ERRORS: [CUfileOpError; 48] = [
    CUfileOpError::CU_FILE_DRIVER_NOT_INITIALIZED,
    CUfileOpError::CU_FILE_DRIVER_INVALID_PROPS,
    CUfileOpError::CU_FILE_DRIVER_UNSUPPORTED_LIMIT,
    CUfileOpError::CU_FILE_DRIVER_VERSION_MISMATCH,
    CUfileOpError::CU_FILE_DRIVER_VERSION_READ_ERROR,
    CUfileOpError::CU_FILE_DRIVER_CLOSING,
    CUfileOpError::CU_FILE_PLATFORM_NOT_SUPPORTED,
    CUfileOpError::CU_FILE_IO_NOT_SUPPORTED,
    CUfileOpError::CU_FILE_DEVICE_NOT_SUPPORTED,
    CUfileOpError::CU_FILE_NVFS_DRIVER_ERROR,
    CUfileOpError::CU_FILE_CUDA_DRIVER_ERROR,
    CUfileOpError::CU_FILE_CUDA_POINTER_INVALID,
    CUfileOpError::CU_FILE_CUDA_MEMORY_TYPE_INVALID,
    CUfileOpError::CU_FILE_CUDA_POINTER_RANGE_ERROR,
    CUfileOpError::CU_FILE_CUDA_CONTEXT_MISMATCH,
    CUfileOpError::CU_FILE_INVALID_MAPPING_SIZE,
    CUfileOpError::CU_FILE_INVALID_MAPPING_RANGE,
    CUfileOpError::CU_FILE_INVALID_FILE_TYPE,
    CUfileOpError::CU_FILE_INVALID_FILE_OPEN_FLAG,
    CUfileOpError::CU_FILE_DIO_NOT_SET,
    CUfileOpError::CU_FILE_INVALID_VALUE,
    CUfileOpError::CU_FILE_MEMORY_ALREADY_REGISTERED,
    CUfileOpError::CU_FILE_MEMORY_NOT_REGISTERED,
    CUfileOpError::CU_FILE_PERMISSION_DENIED,
    CUfileOpError::CU_FILE_DRIVER_ALREADY_OPEN,
    CUfileOpError::CU_FILE_HANDLE_NOT_REGISTERED,
    CUfileOpError::CU_FILE_HANDLE_ALREADY_REGISTERED,
    CUfileOpError::CU_FILE_DEVICE_NOT_FOUND,
    CUfileOpError::CU_FILE_INTERNAL_ERROR,
    CUfileOpError::CU_FILE_GETNEWFD_FAILED,
    CUfileOpError::CU_FILE_NVFS_SETUP_ERROR,
    CUfileOpError::CU_FILE_IO_DISABLED,
    CUfileOpError::CU_FILE_BATCH_SUBMIT_FAILED,
    CUfileOpError::CU_FILE_GPU_MEMORY_PINNING_FAILED,
    CUfileOpError::CU_FILE_BATCH_FULL,
    CUfileOpError::CU_FILE_ASYNC_NOT_SUPPORTED,
    CUfileOpError::CU_FILE_INTERNAL_BATCH_SETUP_ERROR,
    CUfileOpError::CU_FILE_INTERNAL_BATCH_SUBMIT_ERROR,
    CUfileOpError::CU_FILE_INTERNAL_BATCH_GETSTATUS_ERROR,
    CUfileOpError::CU_FILE_INTERNAL_BATCH_CANCEL_ERROR,
    CUfileOpError::CU_FILE_NOMEM_ERROR,
    CUfileOpError::CU_FILE_IO_ERROR,
    CUfileOpError::CU_FILE_INTERNAL_BUF_REGISTER_ERROR,
    CUfileOpError::CU_FILE_HASH_OPR_ERROR,
    CUfileOpError::CU_FILE_INVALID_CONTEXT_ERROR,
    CUfileOpError::CU_FILE_NVFS_INTERNAL_DRIVER_ERROR,
    CUfileOpError::CU_FILE_BATCH_NOCOMPAT_ERROR,
    CUfileOpError::CU_FILE_IO_MAX_ERROR,
];
