//! Overwrites memory that held keys: values without their own `Zeroize`, and the stack below a function.
//!
//! A moved value stays where it was. So keys are on the heap, where they do not move, and what computes with them
//! overwrites its part of the stack at the end, and the vector registers, which the ciphers use for expanded keys: the
//! dynamic linker, for example, saves them on the stack of a later call. Copies that the kernel makes, such as pages in
//! swap and registers of a thread that waits, are not overwritten.

use std::hint::black_box;
use std::mem::{MaybeUninit, needs_drop};
use std::ops::Deref;
use zeroize::Zeroize;

/// Size of the stack that is overwritten, in bytes. The functions of the ciphers and hashes take more than 16 KiB and less
/// than 32 KiB in development builds.
const STACK_BYTES: usize = 48 << 10;

/// Value without a destructor, such as an expanded key. It does not move, and is overwritten when it is dropped.
pub(super) struct Wiped<T>(Box<MaybeUninit<T>>);

impl<T> Wiped<T> {
    pub(super) fn new(value: T) -> Wiped<T> {
        const { assert!(!needs_drop::<T>()) };
        Wiped(Box::new(MaybeUninit::new(value)))
    }
}

impl<T> Deref for Wiped<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the value is there until it is dropped.
        unsafe { self.0.assume_init_ref() }
    }
}

impl<T> Drop for Wiped<T> {
    fn drop(&mut self) {
        // SAFETY: the memory belongs to the value, which has no destructor, and which nothing reads any more.
        unsafe { zeroize::zeroize_flat_type(self.0.as_mut_ptr()) };
    }
}

/// Runs a function that has keys on its stack, and overwrites that stack. The result must not contain keys, but may lead
/// to those on the heap.
pub fn with_wiped_stack<T>(function: impl FnOnce() -> T) -> T {
    let result = below(function);
    wipe_registers();
    wipe_stack();
    result
}

#[inline(never)]
fn below<T>(function: impl FnOnce() -> T) -> T {
    function()
}

#[inline(never)]
fn wipe_stack() {
    let mut stack = [0_u64; STACK_BYTES / size_of::<u64>()];
    stack.zeroize();
    black_box(&stack);
}

/// Overwrites the vector registers.
#[cfg(target_arch = "x86_64")]
fn wipe_registers() {
    use std::arch::{asm, is_x86_feature_detected};
    let (has_avx, has_avx512) = (is_x86_feature_detected!("avx"), is_x86_feature_detected!("avx512f"));
    if has_avx {
        // SAFETY: the CPU has the instruction, which changes registers only that a function may change.
        unsafe { asm!("vzeroall", clobber_abi("sysv64"), options(nomem, nostack, preserves_flags)) };
    }
    // Code that is compiled for all CPUs uses these registers only in assembly, such as in `memcpy`.
    if has_avx512 {
        // SAFETY: as above.
        unsafe {
            asm!(
                ".irp number, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31",
                "vpxord zmm\\number, zmm\\number, zmm\\number",
                ".endr",
                options(nomem, nostack, preserves_flags),
            );
        }
    }
}

/// Leaves the vector registers of other processors as they are.
#[cfg(not(target_arch = "x86_64"))]
fn wipe_registers() {}
