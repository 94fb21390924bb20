//! Whole tensors converted on the CPU, spread evenly over the cores whether they are few and huge or many and tiny.

use crate::convert::cast::Cast;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::os::compute_pool;
use std::ptr;
use std::slice;

/// Elements that lie one behind the other and go to another place as another dtype.
#[derive(Clone, Copy, Debug)]
pub struct Conversion {
    /// The address of the first element, of any alignment.
    pub source: u64,
    /// Where it goes.
    pub target: u64,
    /// How many there are.
    pub elements: u64,
    /// What they are.
    pub from: Dtype,
    /// What they become; the same dtype means a copy.
    pub to: Dtype,
}

/// Bytes of the wider side that one thread converts at a time: enough that handing them out costs nothing, and few
/// enough that no thread waits long for the last.
const PART_BYTES: u64 = 256 << 10;
/// Less work than this is done by the time that other threads have woken up.
const SHARED_BYTES_MIN: u64 = 1 << 20;

/// Whether one dtype can be made the other, or is.
pub fn is_possible(from: Dtype, to: Dtype) -> bool {
    from == to || Cast::new(from, to).is_some()
}

impl Conversion {
    fn item_bytes(&self) -> u64 {
        self.from.item_bytes().max(self.to.item_bytes())
    }

    fn bytes(&self) -> u64 {
        self.elements.saturating_mul(self.item_bytes())
    }

    /// The parts, in order, that together are this conversion.
    fn parts(self) -> impl Iterator<Item = Conversion> {
        let step = PART_BYTES / self.item_bytes();
        (0..self.elements.div_ceil(step)).map(move |part| {
            let first = part * step;
            Conversion {
                source: self.source + first * self.from.item_bytes(),
                target: self.target + first * self.to.item_bytes(),
                elements: step.min(self.elements - first),
                ..self
            }
        })
    }

    /// # Safety
    /// That of [`run`].
    unsafe fn run(&self) {
        let bytes = |dtype: Dtype| usize::try_from(self.elements * dtype.item_bytes()).unwrap_or(0);
        let address = |address| usize::try_from(address).unwrap_or(0);
        let source = ptr::with_exposed_provenance::<u8>(address(self.source));
        let target = ptr::with_exposed_provenance_mut::<u8>(address(self.target));
        // SAFETY: the caller says so.
        let source = unsafe { slice::from_raw_parts(source, bytes(self.from)) };
        // SAFETY: as above; fresh memory of bytes has a value, if none that matters.
        let target = unsafe { slice::from_raw_parts_mut(target, bytes(self.to)) };
        match Cast::new(self.from, self.to) {
            Some(cast) => cast.run(source, target),
            None => target.copy_from_slice(source),
        }
    }
}

/// Carries out all conversions, on up to `threads` threads.
///
/// # Safety
/// Sources are memory of this process that can be read, and targets memory that can be written, overlaps nothing else
/// and is used by no one else until this returns.
///
/// # Errors
/// `internal` where a conversion is not possible; then nothing has been done.
pub unsafe fn run(conversions: &[Conversion], threads: usize) -> Result<()> {
    if let Some(wrong) = conversions.iter().find(|conversion| !is_possible(conversion.from, conversion.to)) {
        return Err(Error::new(Kind::Internal, format!("{wrong:?} is not possible")));
    }
    let convert = |part: &Conversion| {
        // SAFETY: the caller's promise; a part of a conversion keeps within it.
        unsafe { part.run() }
    };
    let work = || conversions.iter().filter(|conversion| conversion.elements > 0);
    if threads > 1 && work().map(Conversion::bytes).sum::<u64>() >= SHARED_BYTES_MIN {
        let parts: Vec<Conversion> = work().flat_map(|conversion| conversion.parts()).collect();
        compute_pool::for_each(threads, &parts, convert);
    } else {
        work().for_each(convert);
    }
    Ok(())
}
