//! The one loop of saves: threads take ranges of files, gather their bytes in slots of staging memory, hash and write them.

use super::DeviceStream;
use super::planned_file::PlannedFile;
use crate::device::{Fetch, Scratch};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::os::mutex::Mutex;
use crate::os::retry::Check;
use crate::os::sigint::Watch;
use crate::os::threads;
use crate::staging::pool;
use crate::staging::{PAGE_BYTES, Request, Slot};
use std::iter;
use std::ops::Range;

/// Range of a file to write.
pub(super) struct FileRange<'a> {
    pub(super) file: &'a PlannedFile,
    pub(super) range: Range<u64>,
    /// First bytes of the range, which an earlier call has gathered and hashed.
    pub(super) carried: &'a [u8],
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

    /// Writes ranges of files on several threads, and returns the bytes at the end of the last range that do not fill a
    /// block, unless the file ends there.
    ///
    /// `gather` adds the bytes of tensors in a chunk of a range, which it gets by its index, to the pieces.
    pub(super) fn write(
        &self,
        ranges: &[FileRange<'_>],
        watch: &Watch,
        gather: impl Fn(usize, &Range<u64>, &mut Pieces) -> Result<()> + Sync,
    ) -> Result<Vec<u8>> {
        let bytes = self.request.bytes;
        // For each range, the number of chunks up to its end.
        let mut ends = Vec::with_capacity(ranges.len());
        let mut count = 0;
        for range in ranges {
            count += to_usize((range.range.end - range.range.start).div_ceil(to_u64(bytes.max(1))));
            ends.push(count);
            range.file.digester.as_ref().inspect(|digester| digester.turns.restart());
        }
        let rest = Mutex::new(Vec::new());
        threads::for_each(self.threads, count, |job| {
            watch.check()?;
            let index = ends.partition_point(|&end| end <= job);
            let before = index.checked_sub(1).and_then(|before| ends.get(before)).copied().unwrap_or(0);
            let missing = || Error::new(Kind::Internal, format!("chunk {job} of {count} has no range"));
            let range = ranges.get(index).ok_or_else(missing)?;
            let first = range.range.start.saturating_add(to_u64(job - before).saturating_mul(to_u64(bytes)));
            let chunk = first..first.saturating_add(to_u64(bytes)).min(range.range.end);
            let written = self.write_chunk(range, &chunk, job, watch, |pieces| gather(index, &chunk, pieces));
            match (written, &range.file.digester) {
                (Ok(partial), _) if partial.is_empty() => Ok(()),
                (Ok(partial), _) => {
                    *rest.lock() = partial;
                    Ok(())
                }
                (Err(error), Some(digester)) => Err(digester.turns.fail(error)),
                (Err(error), None) => Err(error),
            }
        })?;
        Ok(rest.into_inner())
    }

    /// Gathers a chunk in a slot, hashes it and writes its whole blocks. Returns the other bytes.
    fn write_chunk(
        &self,
        range: &FileRange<'_>,
        chunk: &Range<u64>,
        job: usize,
        watch: &Watch,
        gather: impl FnOnce(&mut Pieces) -> Result<()>,
    ) -> Result<Vec<u8>> {
        let FileRange { file, range, carried } = range;
        let check: Check<'_> = &|| watch.check();
        let length = to_usize(chunk.end - chunk.start);
        let mut slot = match &file.digester {
            Some(digester) => digester.acquire(job, check, || self.acquire(watch))?,
            None => self.acquire(watch)?,
        };
        let written = match chunk.end == file.layout.file_bytes() {
            true => file.output.last_bytes(length),
            false => length - length % file.output.alignment(),
        };
        let mut pieces = Pieces { of_device: self.streams.iter().map(|_| Vec::new()).collect(), bytes: 0 };
        gather(&mut pieces)?;
        let carried_end = range.start.saturating_add(to_u64(carried.len()));
        let known_end = carried_end.max(file.header_bytes()).min(chunk.end);
        if known_end.saturating_sub(chunk.start).saturating_add(pieces.bytes) != to_u64(length) {
            let message = "the ranges do not hold each byte of the tensor once; check the index regions";
            return Err(file.locate(Error::new(Kind::InvalidArgument, message).offset(0), chunk.start));
        }
        let misfit = || Error::new(Kind::Internal, format!("bytes {chunk:?} do not fit a slot"));
        let memory = slot.bytes_mut().get_mut(..length).ok_or_else(misfit)?;
        copy_start(file.layout.header().get(to_usize(chunk.start)..), memory);
        copy_start(carried.get(to_usize(chunk.start - range.start)..), memory);
        let used = self.streams.iter().zip(&pieces.of_device).filter(|(_, fetches)| !fetches.is_empty());
        used.into_iter()
            .try_for_each(|(stream, fetches)| stream.memory.fetch(&mut slot, fetches, check))
            .map_err(|error| file.locate(error, chunk.start))?;
        let (memory, beyond) = slot.bytes_mut().split_at_mut_checked(length).ok_or_else(misfit)?;
        if let Some(padding) = beyond.get_mut(..written.saturating_sub(length)) {
            padding.fill(0);
        }
        if let Some(digester) = &file.digester {
            let new = carried_end.clamp(chunk.start, chunk.end);
            digester.add(new, memory.get(to_usize(new - chunk.start)..).unwrap_or_default(), check)?;
        }
        let partial = memory.get(written..).unwrap_or_default().to_vec();
        if written > 0 {
            file.write(slot, written, chunk.start, check)?;
        }
        Ok(partial)
    }

    /// Acquires a slot of staging, and pins it for all devices of the save.
    fn acquire(&self, watch: &Watch) -> Result<Slot> {
        let mut slot = pool::acquire(&self.request, &|| watch.check())?;
        slot.pin(|bytes| self.streams.iter().find_map(|stream| stream.memory.pin(bytes)));
        Ok(slot)
    }
}

/// Copies as many of these bytes as fit to the start of a chunk.
fn copy_start(bytes: Option<&[u8]>, chunk: &mut [u8]) {
    let bytes = bytes.unwrap_or_default();
    let length = bytes.len().min(chunk.len());
    if let (Some(target), Some(source)) = (chunk.get_mut(..length), bytes.get(..length)) {
        target.copy_from_slice(source);
    }
}

/// Bytes to fetch for a chunk.
pub(super) struct Pieces {
    of_device: Vec<Vec<Fetch>>,
    bytes: u64,
}

impl Pieces {
    /// Adds bytes at `address` of a device for the position `slot_begin` of the chunk.
    pub(super) fn add(&mut self, device: usize, address: u64, slot_begin: u64, length: u64) -> Result<()> {
        let misfit = || Error::new(Kind::Internal, format!("{length} bytes of device {device} do not fit a chunk"));
        let fetches = self.of_device.get_mut(device).ok_or_else(misfit)?;
        fetches.push(Fetch { address, slot_begin: to_usize(slot_begin), length: to_usize(length) });
        self.bytes = self.bytes.saturating_add(length);
        Ok(())
    }
}
