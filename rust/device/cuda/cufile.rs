//! Handles of libcufile, NVIDIA's library for GPUDirect Storage, with their lifetimes.
//!
//! The types are cudarc's, but this file opens the library. cudarc looks for `libcufile.so`, which only the
//! development files of the toolkit contain, and panics without it. Machines have `libcufile.so.0`, which PyTorch has
//! opened already. Error codes are plain numbers, because a newer library may have codes that cudarc's enum lacks.

use crate::error::{Error, Kind, Result};
use crate::num::to_usize;
use crate::os::mutex::Mutex;
use crate::os::per_process::PerProcess;
use cudarc::cufile::sys::{self, CUfileOpError};
use libloading::Library;
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;

/// Names of the library, the runtime package's name first.
const LIBRARY_NAMES: [&str; 2] = ["libcufile.so.0", "libcufile.so"];

/// Result of most calls: `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Status {
    code: u32,
    cuda_code: u32,
}

/// The library, with its driver open.
pub struct Driver {
    handle_register: unsafe extern "C" fn(*mut sys::CUfileHandle_t, *mut sys::CUfileDescr_t) -> Status,
    handle_deregister: unsafe extern "C" fn(sys::CUfileHandle_t),
    buffer_register: unsafe extern "C" fn(*const c_void, usize, c_int) -> Status,
    buffer_deregister: unsafe extern "C" fn(*const c_void) -> Status,
    read: unsafe extern "C" fn(sys::CUfileHandle_t, *mut c_void, usize, sys::off_t, sys::off_t) -> isize,
    /// Never closed, because threads of the library run its code.
    _library: ManuallyDrop<Library>,
}

/// The open driver. It stays open until the process ends, because other users of the library in this process share it.
static OPENED: PerProcess<Mutex<Option<Arc<Driver>>>> = PerProcess::new(Mutex::default);

impl Driver {
    /// Opens the library and its driver, if they are not open. The context of a GPU must be current. Fails with
    /// `device` if the library is missing or its driver does not open.
    pub fn open() -> Result<Arc<Driver>> {
        let mut opened = OPENED.get().lock();
        if let Some(driver) = &*opened {
            return Ok(Arc::clone(driver));
        }
        let driver = Arc::new(Driver::load()?);
        *opened = Some(Arc::clone(&driver));
        Ok(driver)
    }

    fn load() -> Result<Driver> {
        // SAFETY: opening NVIDIA's library has no side effects on the rest of the process.
        let library = LIBRARY_NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok()).ok_or_else(|| {
            let names = LIBRARY_NAMES.join(" or ");
            Error::new(Kind::Device, format!("{names}, the library of GPUDirect Storage, cannot be opened"))
        })?;
        let incomplete = |error: libloading::Error| Error::new(Kind::Device, format!("libcufile is too old: {error}"));
        // SAFETY: the types of all functions are as in cufile.h.
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
        // Another user in this process may have opened the driver.
        if status.code != CUfileOpError::CU_FILE_DRIVER_ALREADY_OPEN as u32 {
            check("cuFileDriverOpen", status)?;
        }
        Ok(driver)
    }
}

/// Registration of a file with the library.
pub struct Handle {
    handle: sys::CUfileHandle_t,
    driver: Arc<Driver>,
    _file: File,
}

// SAFETY: the library's handles may be used from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above; reads do not change a handle.
unsafe impl Sync for Handle {}

/// Error of a read.
pub enum ReadError {
    /// Error of the operating system.
    System(io::Error),
    /// Name of an error of the library.
    Library(String),
}

impl Handle {
    /// Registers a file. Fails with `device` if the library or the file system refuses.
    pub fn register(driver: &Arc<Driver>, file: File) -> Result<Handle> {
        let mut handle = ptr::null_mut();
        let mut description = sys::CUfileDescr_t {
            type_: sys::CUfileFileHandleType::CU_FILE_HANDLE_TYPE_OPAQUE_FD,
            handle: sys::CUfileDescr_t__bindgen_ty_1 { fd: file.as_raw_fd() },
            fs_ops: ptr::null(),
        };
        // SAFETY: writes the handle. The descriptor stays open while it is registered.
        let status = unsafe { (driver.handle_register)(&raw mut handle, &raw mut description) };
        check("cuFileHandleRegister", status)?;
        Ok(Handle { handle, driver: Arc::clone(driver), _file: file })
    }

    /// Reads up to `length` bytes of the file from `offset` to `base + base_offset` in device memory.
    ///
    /// Returns the number of bytes read, 0 at the end of the file. The context of the memory's GPU must be current.
    ///
    /// # Safety
    /// Nothing else may use that memory during the read, including work queued before: no stream orders the read.
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
        // SAFETY: the caller's promise; the handle is registered.
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
        // SAFETY: this value registered the file once, and no read is in progress.
        unsafe { (self.driver.handle_deregister)(self.handle) };
    }
}

/// Registration of device memory, which lets a disk write to it.
pub struct RegisteredBuffer {
    base: u64,
    driver: Arc<Driver>,
}

impl RegisteredBuffer {
    /// Registers memory, which must outlive the registration. The context of its GPU must be current. Fails with
    /// `device` if the library refuses. Reads work without it, through buffers of the library.
    pub fn new(driver: &Arc<Driver>, base: u64, bytes: u64) -> Result<RegisteredBuffer> {
        // SAFETY: registers an address. The library refuses an address that is not device memory.
        let status = unsafe { (driver.buffer_register)(device_pointer(base), to_usize(bytes), 0) };
        check("cuFileBufRegister", status)?;
        Ok(RegisteredBuffer { base, driver: Arc::clone(driver) })
    }
}

impl Drop for RegisteredBuffer {
    fn drop(&mut self) {
        // SAFETY: this value registered the memory once, and no read uses it.
        let status = unsafe { (self.driver.buffer_deregister)(device_pointer(self.base)) };
        if let Err(error) = check("cuFileBufDeregister", status) {
            tracing::debug!(%error, "device memory could not be unregistered");
        }
    }
}

fn device_pointer(address: u64) -> *mut c_void {
    ptr::without_provenance_mut(to_usize(address))
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

/// Errors with a name. The library has no function for names.
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
