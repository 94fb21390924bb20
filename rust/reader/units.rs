//! Reader that decrypts, or compares with hashes, what another reader reads.
//!
//! A unit is read as a whole. The units of a read are opened in place; of a unit that is only partly requested, at either
//! end of a read, the reader opens a copy:
//!
//! ```text
//! units   |    0    |    1    |    2    |    3    |
//! read          [:::::---------:::::::::::::]
//!               copy   in place   copy
//! ```
//!
//! A read may also have bytes between tensors, which no unit has. They are returned as they are stored.
//!
//! Columns of a matrix are read in slots of several rows each, and several slots may need parts of one unit. So the reader
//! keeps the last copies, and a thread waits for a copy that another one opens.

use super::{ReadLimits, Reader, pieces_of};
use crate::encryption::chunks::CHUNK_BYTES_MAX;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::os::mutex::Mutex;
use crate::os::retry::Check;
use crate::plan::Read;
use crate::source::{Protection, UnitSource};
use crate::units::{Unit, Units};
use std::collections::VecDeque;
use std::sync::Arc;

/// Number of copies of units that a reader keeps: one for each thread that reads by default, at most.
const COPY_COUNT: usize = 16;
/// Size of the copies after which a reader keeps only the last one beside a new one, in bytes. A tensor of a
/// `.tensors` file may be one unit, of any size.
const COPY_BYTES: u64 = COPY_COUNT as u64 * CHUNK_BYTES_MAX;

/// Reader of a file in units.
pub(super) struct UnitReader {
    /// Reader of the file as it is stored.
    reader: Arc<dyn Reader>,
    source: Arc<UnitSource>,
    /// Copies of units. The one that was used last is at the end.
    copies: Mutex<VecDeque<(Unit, Arc<Mutex<UnitCopy>>)>>,
}

/// Copy of a unit.
struct UnitCopy {
    bytes: Vec<u8>,
    is_open: bool,
}

impl UnitCopy {
    fn resize(&mut self, size: usize) -> Result<()> {
        self.bytes.try_reserve_exact(size.saturating_sub(self.bytes.len())).map_err(|_| {
            let message = format!("no memory of {size} bytes for a unit of which a part is requested");
            Error::new(Kind::OutOfMemory, message)
        })?;
        self.bytes.resize(size, 0);
        Ok(())
    }
}

/// Part of a piece: whole units and bytes between them, or a part of one unit.
enum Part<'a> {
    Whole(u64, &'a mut [u8]),
    Partial(Unit, u64, &'a mut [u8]),
}

impl UnitReader {
    /// Creates a reader of `source`, whose bytes as they are stored come from `reader`.
    pub(super) fn new(reader: Arc<dyn Reader>, source: Arc<UnitSource>) -> Self {
        UnitReader { reader, source, copies: Mutex::default() }
    }

    /// Fills pieces of memory, in ascending order of their offsets.
    fn read_units(&self, pieces: Vec<(u64, &mut [u8])>, check: Check<'_>) -> Result<()> {
        let protection = &self.source.protection;
        let (mut whole, mut partial) = (Vec::new(), Vec::new());
        for (offset, into) in pieces {
            for part in divide(protection.units(), offset, into)? {
                match part {
                    Part::Whole(offset, into) => whole.push((offset, into)),
                    Part::Partial(unit, offset, into) => partial.push((unit, offset, into)),
                }
            }
        }
        let at = |error: Error| error.at(self.source.stored.path());
        self.reader.scatter(whole.iter_mut().map(|(offset, into)| (*offset, &mut **into)).collect(), check)?;
        for (offset, into) in whole {
            open_all(protection, offset, into).map_err(at)?;
        }
        // Parts of the same unit follow each other.
        for parts in partial.chunk_by_mut(|(one, ..), (two, ..)| one == two) {
            let Some((unit, ..)) = parts.first() else { continue };
            let copy = self.copy_of(unit);
            let mut copy = copy.lock();
            if !copy.is_open {
                copy.resize(to_usize(unit.range.end - unit.range.start)).map_err(at)?;
                self.reader.read(unit.range.start, &mut copy.bytes, check)?;
                protection.open(unit, &mut copy.bytes).map_err(at)?;
                copy.is_open = true;
            }
            for (unit, offset, into) in parts {
                let begin = to_usize(*offset - unit.range.start);
                let from = copy.bytes.get(begin..begin.saturating_add(into.len()));
                into.copy_from_slice(from.ok_or_else(|| misfit(*offset))?);
            }
        }
        Ok(())
    }

    /// Returns the copy of a unit, or a new one with the memory of the oldest.
    fn copy_of(&self, unit: &Unit) -> Arc<Mutex<UnitCopy>> {
        let mut copies = self.copies.lock();
        let known = copies.iter().position(|(known, _)| known == unit);
        let copy = match known.and_then(|index| copies.remove(index)) {
            Some((_, copy)) => copy,
            None => {
                let mut oldest = None;
                while is_full(&copies, unit) {
                    oldest = copies.pop_front();
                }
                // A thread may still use it, and keep its memory.
                let oldest = oldest.and_then(|(_, copy)| Arc::into_inner(copy));
                let oldest = oldest.map(|copy| copy.into_inner());
                let bytes = oldest.map(|copy| copy.bytes).filter(|bytes| to_u64(bytes.capacity()) <= CHUNK_BYTES_MAX);
                let bytes = bytes.unwrap_or_default();
                Arc::new(Mutex::new(UnitCopy { bytes, is_open: false }))
            }
        };
        copies.push_back((unit.clone(), Arc::clone(&copy)));
        copy
    }
}

/// Returns whether a copy must be removed before one of `unit` is added.
fn is_full(copies: &VecDeque<(Unit, Arc<Mutex<UnitCopy>>)>, unit: &Unit) -> bool {
    let units = copies.iter().map(|(unit, _)| unit).chain([unit]);
    let total_bytes = units.map(|unit| unit.range.end - unit.range.start).fold(0, u64::saturating_add);
    copies.len() >= COPY_COUNT || (copies.len() > 1 && total_bytes > COPY_BYTES)
}

impl Reader for UnitReader {
    fn limits(&self) -> ReadLimits {
        ReadLimits { unit_bytes: self.source.protection.units().slot_bytes(), ..self.reader.limits() }
    }

    fn refusal(&self) -> Option<&str> {
        self.reader.refusal()
    }

    fn read(&self, offset: u64, into: &mut [u8], check: Check<'_>) -> Result<()> {
        self.read_units(vec![(offset, into)], check)
    }

    fn fill(&self, reads: &[Read], slot: &mut [u8], check: Check<'_>) -> Result<()> {
        self.read_units(pieces_of(slot, reads)?, check)
    }

    fn scatters(&self) -> bool {
        self.reader.scatters()
    }

    fn scatter(&self, pieces: Vec<(u64, &mut [u8])>, check: Check<'_>) -> Result<()> {
        self.read_units(pieces, check)
    }
}

/// Divides memory for bytes from `offset` at the units that it covers only in part.
fn divide<'a>(units: &Units, offset: u64, into: &'a mut [u8]) -> Result<Vec<Part<'a>>> {
    let end = offset.saturating_add(to_u64(into.len()));
    let (mut at, mut rest) = (offset, into);
    let mut parts = Vec::new();
    while at < end {
        let mut stop = at;
        let mut partial = None;
        // Whole units, and bytes between them, stay together, to be read at once.
        while stop < end && partial.is_none() {
            match units.at_or_after(stop) {
                None => stop = end,
                Some(unit) if unit.range.start > stop => stop = unit.range.start.min(end),
                Some(unit) if unit.range.start == stop && unit.range.end <= end => stop = unit.range.end,
                Some(unit) => partial = Some(unit),
            }
        }
        // A part of a unit that follows whole ones is found again in the next turn.
        let partial = partial.filter(|_| stop == at);
        stop = partial.as_ref().map_or(stop, |unit| unit.range.end.min(end));
        let (part, left) = rest.split_at_mut_checked(to_usize(stop - at)).ok_or_else(|| misfit(at))?;
        parts.push(match partial {
            Some(unit) => Part::Partial(unit, at, part),
            None => Part::Whole(at, part),
        });
        (at, rest) = (stop, left);
    }
    Ok(parts)
}

/// Opens whole units in place.
fn open_all(protection: &Protection, mut offset: u64, into: &mut [u8]) -> Result<()> {
    let end = offset.saturating_add(to_u64(into.len()));
    let mut rest = into;
    while let Some(unit) = protection.units().at_or_after(offset).filter(|unit| unit.range.start < end) {
        let between = to_usize(unit.range.start.saturating_sub(offset));
        let (_, data) = rest.split_at_mut_checked(between).ok_or_else(|| misfit(offset))?;
        let length = to_usize(unit.range.end - unit.range.start);
        let (data, left) = data.split_at_mut_checked(length).ok_or_else(|| misfit(offset))?;
        protection.open(&unit, data)?;
        (offset, rest) = (unit.range.end, left);
    }
    Ok(())
}

fn misfit(offset: u64) -> Error {
    Error::new(Kind::Internal, format!("the memory does not fit the unit at byte {offset}"))
}
