//! Chunks of files that a save gathers in slots and writes: threads, staging memory and sources.

use super::DeviceStream;
use crate::device::{Fetch, Scratch};
use crate::error::{Error, Kind, Result};
use crate::format::layout::Layout;
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::os::sigint::Watch;
use crate::os::threads;
use crate::profile::{self, Stage};
use crate::staging::pool;
use crate::staging::{PAGE_BYTES, Request, Slot};
use std::iter;
use std::ops::Range;
use std::path::Path;

/// File as the errors of its chunks name it.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) path: &'a Path,
    pub(super) layout: &'a Layout,
}

impl Target<'_> {
    /// Adds to an error at a byte of the file the name of the tensor whose byte could not be written.
    pub(super) fn name_tensor(&self, error: Error) -> Error {
        match error.position().and_then(|position| self.layout.tensor_at(position)) {
            Some(name) => error.tensor(name),
            None => error,
        }
    }

    /// Writes `length` bytes of the file with `write`.
    pub(super) fn write(&self, length: usize, write: impl FnOnce() -> Result<()>) -> Result<()> {
        let _span = profile::span(Stage::Write).bytes(length);
        write().map_err(|error| self.name_tensor(error))
    }

    /// Adds the file and the tensor to an error at a byte of the chunk at `first`.
    fn locate(&self, error: Error, first: u64) -> Error {
        match error.position() {
            Some(byte) => self.name_tensor(error.offset(first.saturating_add(byte)).at(self.path)),
            None => error,
        }
    }
}

/// Threads and slots of a save, and the devices whose memory it reads.
pub(super) struct Chunks {
    streams: Vec<DeviceStream>,
    threads: usize,
    request: Request,
}

impl Chunks {
    /// Prepares for chunks of `part_bytes` bytes, or of the best size for the devices, at most `most` bytes.
    pub(super) fn new(streams: Vec<DeviceStream>, part_bytes: Option<usize>, most: u64, options: &Options) -> Chunks {
        let slot_bytes = streams.iter().map(|stream| stream.memory.slot_bytes(options.chunk_bytes)).min();
        let slot_bytes = slot_bytes.unwrap_or(options.chunk_bytes);
        let most = to_usize(most).checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX);
        let bytes = part_bytes.unwrap_or((slot_bytes - slot_bytes % PAGE_BYTES).max(PAGE_BYTES)).min(most);
        let node = streams.iter().find_map(|stream| stream.memory.node());
        Chunks {
            streams,
            threads: options.threads.min((options.staging_bytes / bytes.max(1)).max(1)),
            request: Request { bytes, node, staging_bytes: options.staging_bytes },
        }
    }

    /// Returns the size of a chunk in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.request.bytes
    }

    /// Returns, for each device, how much scratch memory makes it faster to fetch this number of pieces, in bytes.
    pub(super) fn scratch_bytes(&self, count: impl Fn(usize) -> usize) -> Vec<usize> {
        let bytes =
            |(device, stream): (usize, &DeviceStream)| stream.memory.gather_bytes(self.request.bytes, count(device));
        self.streams.iter().enumerate().map(bytes).collect()
    }

    /// Orders later fetches after the work that is queued on the streams.
    pub(super) fn begin(&self, scratch: &[Scratch]) -> Result<()> {
        let scratch = scratch.iter().copied().chain(iter::repeat(Scratch::default()));
        self.streams.iter().zip(scratch).try_for_each(|(stream, scratch)| stream.memory.begin(stream.stream, scratch))
    }

    /// Runs a job for each of `count` chunks on several threads. Each checks for Ctrl-C first.
    pub(super) fn for_each(&self, count: usize, watch: &Watch, job: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
        threads::for_each(self.threads, count, |index| watch.check().and_then(|()| job(index)))
    }

    /// Acquires a slot of staging, and pins it for all devices of the save.
    pub(super) fn acquire(&self, watch: &Watch) -> Result<Slot> {
        let mut slot = pool::acquire(&self.request, || watch.check())?;
        slot.pin(|bytes| self.streams.iter().find_map(|stream| stream.memory.pin(bytes)));
        Ok(slot)
    }

    /// Gathers a range of a file in a slot, which is padded with zeros to `padded` bytes. `gather` adds the bytes to fetch
    /// to the pieces of each device, and may write others itself.
    pub(super) fn fill(
        &self,
        slot: &mut Slot,
        range: &Range<u64>,
        padded: usize,
        target: Target<'_>,
        gather: impl FnOnce(&mut [u8], &mut Pieces) -> Result<()>,
    ) -> Result<()> {
        let misfit = || Error::new(Kind::Internal, format!("bytes {range:?} do not fit a slot"));
        let length = usize::try_from(range.end - range.start).map_err(|_| misfit())?;
        let (chunk, beyond) = slot.bytes_mut().split_at_mut_checked(length).ok_or_else(misfit)?;
        let mut pieces = Pieces(self.streams.iter().map(|_| Vec::new()).collect());
        gather(chunk, &mut pieces)?;
        let used = self.streams.iter().zip(&pieces.0).filter(|(_, fetches)| !fetches.is_empty());
        used.into_iter()
            .try_for_each(|(stream, fetches)| stream.memory.fetch(chunk, fetches))
            .map_err(|error| target.locate(error, range.start))?;
        if let Some(padding) = beyond.get_mut(..padded.saturating_sub(length)) {
            padding.fill(0);
        }
        Ok(())
    }
}

/// Bytes to fetch of each device for a chunk.
pub(super) struct Pieces(Vec<Vec<Fetch>>);

impl Pieces {
    /// Adds bytes at `address` of a device for the position `slot_begin` of the chunk.
    pub(super) fn add(&mut self, device: usize, address: u64, slot_begin: u64, length: u64) -> Result<()> {
        let misfit = || Error::new(Kind::Internal, format!("{length} bytes of device {device} do not fit a chunk"));
        let (slot_begin, length) = (usize::try_from(slot_begin), usize::try_from(length));
        let (slot_begin, length) = (slot_begin.map_err(|_| misfit())?, length.map_err(|_| misfit())?);
        self.0.get_mut(device).ok_or_else(misfit)?.push(Fetch { address, slot_begin, length });
        Ok(())
    }
}

/// Returns the number of chunks of a range.
pub(super) fn count(range: &Range<u64>, bytes: usize) -> usize {
    to_usize((range.end - range.start).div_ceil(to_u64(bytes.max(1))))
}

/// Returns the bytes of a chunk of a range.
pub(super) fn chunk(range: &Range<u64>, bytes: usize, index: usize) -> Range<u64> {
    let first = range.start.saturating_add(to_u64(index).saturating_mul(to_u64(bytes)));
    first..first.saturating_add(to_u64(bytes)).min(range.end)
}
