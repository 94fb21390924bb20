//! Casts and writes of many tensors on the CPU, distributed evenly over threads whether tensors are few and large or many and
//! small.

use crate::cast::elements::Cast;
use crate::cast::put::{POSITION_BYTES, Put};
use crate::cast::streaming_copy;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::os::compute_pool;
use std::{iter, ptr, slice};

/// Cast of contiguous elements to another address and dtype, or a write of them to positions of the destination.
#[derive(Clone, Copy, Debug)]
pub struct Conversion {
    /// Address of the first element, of any alignment.
    pub source: u64,
    /// Address of the destination.
    pub target: u64,
    /// Number of elements.
    pub elements: u64,
    /// Dtype of the source.
    pub from: Dtype,
    /// Dtype of the destination. The same dtype means a copy.
    pub to: Dtype,
    /// Address of the `u32` positions in the destination, or `None` if its elements are contiguous, too. Both dtypes are
    /// the same then.
    pub positions: Option<u64>,
    /// Number of elements of the destination, with positions.
    pub target_elements: u64,
}

/// Bytes of the wider side that a thread converts at a time: large enough that distribution costs nothing, small enough
/// that no thread waits long for the last part.
const PART_BYTES: u64 = 256 << 10;
/// Smallest work, in bytes, worth distributing: less is done before other threads have woken up.
const SHARED_BYTES_MIN: u64 = 1 << 20;
/// Smallest work, in bytes, whose copies bypass the caches: more than they hold.
const STREAMED_BYTES_MIN: u64 = 64 << 20;

/// Returns whether elements can be cast from one dtype to the other, or copied.
pub fn is_possible(from: Dtype, to: Dtype) -> bool {
    from == to || Cast::new(from, to).is_some()
}

impl Conversion {
    /// Returns whether the conversion exists.
    pub fn is_possible(&self) -> bool {
        match self.positions {
            None => is_possible(self.from, self.to),
            Some(_) => self.from == self.to && Put::is_possible(self.from.item_bytes()),
        }
    }

    /// Returns the write by position, or `None` for a cast.
    pub fn put(&self) -> Option<Put> {
        let Conversion { source: values, target, elements, target_elements, .. } = *self;
        let item_bytes = self.from.item_bytes();
        self.positions.map(|positions| Put { positions, values, target, elements, target_elements, item_bytes })
    }

    /// Returns the bytes that an element moves.
    fn item_bytes(&self) -> u64 {
        if self.positions.is_some() {
            to_u64(streaming_copy::LINE_BYTES)
        } else {
            self.from.item_bytes().max(self.to.item_bytes())
        }
    }

    fn bytes(&self) -> u64 {
        self.elements.saturating_mul(self.item_bytes())
    }

    /// Splits the conversion into parts of at most [`PART_BYTES`], in order.
    fn parts(self) -> impl Iterator<Item = Conversion> {
        let step = PART_BYTES / self.item_bytes();
        (0..self.elements.div_ceil(step)).map(move |part| {
            let first = part * step;
            Conversion {
                source: self.source + first * self.from.item_bytes(),
                target: self.target + if self.positions.is_some() { 0 } else { first * self.to.item_bytes() },
                elements: step.min(self.elements - first),
                positions: self.positions.map(|positions| positions + first * POSITION_BYTES),
                ..self
            }
        })
    }

    /// Runs the conversion. Copies bypass the caches if `is_streamed`.
    ///
    /// # Safety
    /// The caller meets the conditions of [`run`].
    unsafe fn run(&self, is_streamed: bool) {
        if let Some(put) = self.put() {
            // SAFETY: the caller guarantees readable positions and values, and a target that is writable there.
            return unsafe { put.run() };
        }
        let bytes = |dtype: Dtype| to_usize(self.elements * dtype.item_bytes());
        let source = ptr::with_exposed_provenance::<u8>(to_usize(self.source));
        let target = ptr::with_exposed_provenance_mut::<u8>(to_usize(self.target));
        // SAFETY: the caller guarantees a readable source.
        let source = unsafe { slice::from_raw_parts(source, bytes(self.from)) };
        // SAFETY: the caller guarantees a writable target; uninitialized bytes are overwritten, never read.
        let target = unsafe { slice::from_raw_parts_mut(target, bytes(self.to)) };
        match Cast::new(self.from, self.to) {
            Some(cast) => cast.run(source, target),
            None if is_streamed => streaming_copy::copy_all(iter::once((source, target))),
            None => target.copy_from_slice(source),
        }
    }
}

/// Runs all conversions on up to `threads` threads.
///
/// # Safety
/// Sources must be readable memory of this process. Targets must be writable, must not overlap anything else, and must
/// not be used by other code until this returns. Positions must be readable, and ascending without duplicates.
///
/// # Errors
/// `internal` for a conversion that does not exist. Nothing has been written then.
pub unsafe fn run(conversions: &[Conversion], threads: usize) -> Result<()> {
    if let Some(wrong) = conversions.iter().find(|conversion| !conversion.is_possible()) {
        return Err(Error::new(Kind::Internal, format!("no cast for {wrong:?}")));
    }
    let work = || conversions.iter().filter(|conversion| conversion.elements > 0);
    let bytes = work().map(Conversion::bytes).sum::<u64>();
    let convert = |part: &Conversion| {
        // SAFETY: the caller's guarantee; a part stays within its conversion.
        unsafe { part.run(bytes >= STREAMED_BYTES_MIN) }
    };
    if threads > 1 && bytes >= SHARED_BYTES_MIN {
        let parts: Vec<Conversion> = work().flat_map(|conversion| conversion.parts()).collect();
        compute_pool::for_each(threads, &parts, convert);
    } else {
        work().for_each(convert);
    }
    Ok(())
}
