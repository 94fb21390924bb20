//! Search of Python's dictionaries. Python passes its own function, so the core links no Python.

use std::ffi::{c_int, c_void};
use std::{ptr, slice};

/// `PyDict_Next`.
type DictNext = unsafe extern "C" fn(*mut c_void, *mut isize, *mut *mut c_void, *mut *mut c_void) -> c_int;

/// Marks the dictionaries that have one of the objects as a value. Does not touch the values, which would take longer.
///
/// # Safety
///
/// The caller holds the GIL. `dictionaries` and `marks` have `count` elements, `objects` has `object_count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fst_mark_holders(
    next: DictNext,
    dictionaries: *const *mut c_void,
    marks: *mut bool,
    count: usize,
    objects: *const *mut c_void,
    object_count: usize,
) {
    // Addresses of empty arrays may be null.
    if count == 0 || object_count == 0 {
        return;
    }
    // SAFETY: The caller passes arrays of these lengths.
    let (dictionaries, marks, objects) = unsafe {
        (
            slice::from_raw_parts(dictionaries, count),
            slice::from_raw_parts_mut(marks, count),
            slice::from_raw_parts(objects, object_count),
        )
    };
    for (dictionary, mark) in dictionaries.iter().zip(marks) {
        let (mut position, mut value) = (0, ptr::null_mut());
        // SAFETY: The GIL is held, and nothing here runs Python, so the dictionary stays as it is.
        while !*mark && unsafe { next(*dictionary, &mut position, ptr::null_mut(), &mut value) } != 0 {
            *mark = objects.contains(&value);
        }
    }
}
