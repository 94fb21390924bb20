//! State that each process has of its own, so that a forked child needs nothing of its parent.
//!
//! A forked child has a copy of its parent's memory, but only the thread that forked. A lock that another thread held
//! at that time stays locked in the child for ever, and what it guards may be half changed. Every lock that outlives a
//! call is therefore inside a [`PerProcess`], which a child replaces at its first access. The replacement takes no
//! lock: it swaps a pointer, and what the pointer refers to never changes its process. Settings of the program, which a
//! child needs, too, are copied.

use super::mutex::Mutex;
use memmap2::{MmapMut, MmapRaw};
use std::marker::PhantomData;
use std::mem;
use std::process;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// Value that is created at the first access in each process.
///
/// The value of a parent process is leaked in a forked child: nothing there may lock it, and dropping it could wait for
/// threads that do not exist.
pub struct PerProcess<T> {
    current: AtomicPtr<Owned<T>>,
    create: fn() -> T,
    /// Returns a copy of the parent's value.
    inherit: Option<fn(&T) -> T>,
    // Any thread may create, use and drop the value.
    _owned: PhantomData<Arc<T>>,
}

struct Owned<T> {
    process: u32,
    value: T,
}

impl<T> PerProcess<T> {
    /// Creates the state. Threads that access it first at the same time may each call `create`; all but one of the
    /// values are dropped.
    pub const fn new(create: fn() -> T) -> Self {
        PerProcess { current: AtomicPtr::new(ptr::null_mut()), create, inherit: None, _owned: PhantomData }
    }

    /// Returns the value of this process.
    pub fn get(&self) -> &T {
        let process = process_id();
        let mut found = self.current.load(Ordering::Acquire);
        loop {
            // SAFETY: the pointer is null, or points to a box that lives as long as `self`.
            let owned = unsafe { found.as_ref() };
            if let Some(owned) = owned.filter(|owned| owned.process == process) {
                return &owned.value;
            }
            let value = match (self.inherit, owned) {
                (Some(inherit), Some(owned)) => inherit(&owned.value),
                _ => (self.create)(),
            };
            let created = Box::into_raw(Box::new(Owned { process, value }));
            match self.current.compare_exchange(found, created, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => found = created,
                Err(other) => {
                    // SAFETY: no other thread has seen this box.
                    drop(unsafe { Box::from_raw(created) });
                    found = other;
                }
            }
        }
    }
}

impl<T: Clone + Default> PerProcess<Mutex<T>> {
    /// Creates settings of the program, which a forked child keeps. They are lost if another thread changes them during
    /// the fork.
    pub const fn settings() -> Self {
        let (current, create) = (AtomicPtr::new(ptr::null_mut()), Mutex::default as fn() -> Mutex<T>);
        PerProcess { current, create, inherit: Some(copied), _owned: PhantomData }
    }
}

/// Returns a copy of the parent's settings. Waits for no lock: the thread that holds it may not exist any more.
fn copied<T: Clone + Default>(settings: &Mutex<T>) -> Mutex<T> {
    Mutex::new(settings.try_lock().map(|settings| settings.clone()).unwrap_or_default())
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        let current = *self.current.get_mut();
        // SAFETY: as in `get`.
        if unsafe { current.as_ref() }.is_some_and(|owned| owned.process == process_id()) {
            // SAFETY: the box belongs to this state, and nothing borrows it any more.
            drop(unsafe { Box::from_raw(current) });
        }
    }
}

/// Returns the id of this process, without the system call of [`process::id`]: the kernel sets the page that holds it to
/// zero in a forked child.
fn process_id() -> u32 {
    static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        page = page_wiped_on_fork().unwrap_or(ptr::null_mut());
        if page.is_null() {
            return process::id();
        }
        // Threads that come first at the same time each have a page, of which one stays in use.
        PAGE.store(page, Ordering::Release);
    }
    // SAFETY: a page is never unmapped, and zero is a valid number.
    let known = unsafe { &*page };
    match known.load(Ordering::Relaxed) {
        0 => {
            let id = process::id();
            known.store(id, Ordering::Relaxed);
            id
        }
        id => id,
    }
}

/// Returns a page of zeros that a forked child has as zeros, too, or `None` if the kernel has no such pages.
fn page_wiped_on_fork() -> Option<*mut AtomicU32> {
    let page = MmapRaw::from(MmapMut::map_anon(size_of::<AtomicU32>()).ok()?);
    // memmap2 does not know this advice.
    // SAFETY: the range is the mapping that `page` owns, of which nothing uses the content yet.
    let refused = unsafe { libc::madvise(page.as_mut_ptr().cast(), page.len(), libc::MADV_WIPEONFORK) };
    if refused != 0 {
        return None;
    }
    let address = page.as_mut_ptr().cast();
    mem::forget(page);
    Some(address)
}
