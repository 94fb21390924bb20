//! Search of Python's modules. Python passes its own functions, so the core links no Python.

use hashbrown::HashSet;
use std::ffi::{c_char, c_int, c_void};
use std::{ptr, slice};

/// Functions of Python's C interface.
#[repr(C)]
pub struct Python {
    /// `PyDict_Next`.
    next: unsafe extern "C" fn(*mut c_void, *mut isize, *mut *mut c_void, *mut *mut c_void) -> c_int,
    /// `PyDict_Size`.
    size: unsafe extern "C" fn(*mut c_void) -> isize,
    /// `PyUnicode_AsUTF8AndSize`.
    text: unsafe extern "C" fn(*mut c_void, *mut isize) -> *const c_char,
    /// `PyModule_GetDict`.
    namespace: unsafe extern "C" fn(*mut c_void) -> *mut c_void,
    /// `PyErr_Clear`.
    clear_error: unsafe extern "C" fn(),
}

impl Python {
    /// Calls `use_item` for the items of a dictionary, until it returns `false`.
    ///
    /// # Safety
    /// The caller holds the GIL, and `use_item` does not change the dictionary.
    unsafe fn each_item(&self, dictionary: *mut c_void, mut use_item: impl FnMut(*mut c_void, *mut c_void) -> bool) {
        let (mut position, mut key, mut value) = (0, ptr::null_mut(), ptr::null_mut());
        // SAFETY: the caller vouches for the dictionary.
        while unsafe { (self.next)(dictionary, &mut position, &mut key, &mut value) } != 0 && use_item(key, value) {}
    }

    /// Returns the name of the package of a module, or `None` if the name of the module is not text.
    ///
    /// # Safety
    /// The caller holds the GIL. The bytes are valid for as long as the name.
    unsafe fn package<'a>(&self, name: *mut c_void) -> Option<&'a [u8]> {
        let mut length = 0;
        // SAFETY: the caller vouches for the object.
        let text = unsafe { (self.text)(name, &mut length) };
        if text.is_null() {
            // SAFETY: the GIL is held.
            unsafe { (self.clear_error)() };
            return None;
        }
        // SAFETY: Python returns this number of bytes.
        let text = unsafe { slice::from_raw_parts(text.cast::<u8>(), usize::try_from(length).ok()?) };
        text.split(|&byte| byte == b'.').next()
    }
}

/// What the search before found out about a module, or zeros.
#[repr(C)]
pub struct Known {
    /// Address of the module.
    module: *mut c_void,
    /// Number of its names, or [`PASSED_OVER`].
    names: isize,
}

/// Number of names of a module that is not searched.
const PASSED_OVER: isize = -1;

/// Marks the modules whose names refer to one of the objects, among those that are new or have another number of names
/// than in `known`, which this updates. Marks objects that are no modules, too. Does not touch the values of names, which
/// would take longer. Returns `false`, and marks nothing of use, if `known` has other modules.
///
/// # Safety
/// The caller holds the GIL. `modules` is a dictionary with `count` items, as many as `known` and `marks` have. `packages`
/// has the names of packages that are not searched, with zeros between them. The arrays have the lengths that follow them.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "Python passes arrays as addresses and lengths")]
pub unsafe extern "C" fn fst_mark_holders(
    python: &Python,
    modules: *mut c_void,
    known: *mut Known,
    marks: *mut bool,
    count: usize,
    packages: *const u8,
    packages_bytes: usize,
    objects: *const *mut c_void,
    object_count: usize,
) -> bool {
    // Addresses of empty arrays may be null.
    if count == 0 || packages_bytes == 0 || object_count == 0 {
        return true;
    }
    // SAFETY: the caller passes arrays of these lengths.
    let (known, marks, packages, objects) = unsafe {
        (
            slice::from_raw_parts_mut(known, count),
            slice::from_raw_parts_mut(marks, count),
            slice::from_raw_parts(packages, packages_bytes),
            slice::from_raw_parts(objects, object_count),
        )
    };
    let packages: HashSet<&[u8]> = packages.split(|&byte| byte == 0).collect();
    // Most values are compared with one number.
    let bit = |object: *mut c_void| 1_u64 << ((object.addr() >> 4 ^ object.addr() >> 10) & 63);
    let filter = objects.iter().fold(0, |filter, &object| filter | bit(object));
    let (mut places, mut is_known) = (known.iter_mut().zip(marks), true);
    let look = |name: *mut c_void, module: *mut c_void| {
        let Some((known, mark)) = places.next() else { return false };
        is_known = known.module.is_null() || known.module == module;
        // SAFETY: the GIL is held, and nothing here runs Python, so all dictionaries stay as they are.
        unsafe {
            if known.module.is_null() && python.package(name).is_some_and(|package| packages.contains(package)) {
                known.names = PASSED_OVER;
            }
            known.module = module;
            if known.names == PASSED_OVER || !is_known {
                return is_known;
            }
            let namespace = (python.namespace)(module);
            if namespace.is_null() {
                (python.clear_error)();
                *mark = true;
                return true;
            }
            let names = (python.size)(namespace);
            if names != known.names {
                known.names = names;
                python.each_item(namespace, |_, value| {
                    *mark = filter & bit(value) != 0 && objects.contains(&value);
                    !*mark
                });
            }
        }
        true
    };
    // SAFETY: as above.
    unsafe { python.each_item(modules, look) };
    is_known
}
