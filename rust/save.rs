//! Saves tensors to a file: worker threads gather chunks of the file in slots and write them.
//!
//! A chunk is a range of the file, not of a tensor, so that every write is aligned for direct I/O, or is a part of an
//! upload:
//!
//! ```text
//! file     | header | tensor a | b |   tensor c      | d | e |  tensor f |
//! chunks   |        0       |        1       |       2       |    3    ...
//! ```

pub mod atomic_file;
mod digester;
mod encryptor;
pub mod file_kernel;
pub mod file_save;
pub mod memory;
pub mod output;
pub mod rotate;
mod temp_file;
mod write_threads;
pub mod writer;

use crate::device::{Fetch, Scratch};
use crate::error::{Error, Kind, Result};
use crate::format::layout::Layout;
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::os::sigint::Watch;
use crate::os::threads;
use crate::profile::{self, Stage};
use crate::save::digester::Digester;
use crate::save::memory::SourceMemory;
use crate::save::output::Output;
use crate::staging::pool;
use crate::staging::{PAGE_BYTES, Request, Slot};
use std::iter;
use std::sync::{Arc, Mutex, PoisonError};

/// Device that holds tensors of a file, and the caller's stream on which they are ready.
pub struct DeviceStream {
    /// Memory of the device.
    pub memory: Arc<dyn SourceMemory>,
    /// Native handle of the stream. Ignored on the host.
    pub stream: u64,
}

/// Contiguous bytes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Index of the device in the streams of the save.
    pub device: usize,
    /// Address of the first byte.
    pub address: u64,
    /// Number of bytes.
    pub length: u64,
}

/// Sequential write of one file or object. Dropping an unfinished save leaves nothing behind.
pub struct Save {
    layout: Layout,
    output: Output,
    streams: Vec<DeviceStream>,
    threads: usize,
    request: Request,
    /// End of the bytes that were appended. They are written, except for those in `rest`.
    position: u64,
    /// The last bytes before `position`, which do not fill a block or part.
    rest: Vec<u8>,
    /// Digests of the tensors, if the file gets digests.
    digester: Option<Digester>,
    watch: Watch,
}

impl Save {
    /// Begins a file with the header of `layout`.
    ///
    /// # Errors
    /// `io` if the disk has too little space; those of [`Output::prepare`]; `interrupted`.
    pub fn begin(
        layout: Layout,
        output: impl Into<Output>,
        streams: Vec<DeviceStream>,
        options: &Options,
    ) -> Result<Save> {
        let mut output = output.into();
        let file_bytes = layout.file_bytes();
        let watch = Watch::begin();
        output.prepare(file_bytes, options, &|| watch.check()).map_err(|error| output.abandon(error))?;
        let slot_bytes = streams.iter().map(|stream| stream.memory.slot_bytes(options.chunk_bytes)).min();
        let slot_bytes = slot_bytes.unwrap_or(options.chunk_bytes);
        let most = to_usize(file_bytes).checked_next_multiple_of(PAGE_BYTES);
        let bytes = output.part_bytes(0)?.unwrap_or((slot_bytes - slot_bytes % PAGE_BYTES).max(PAGE_BYTES));
        let bytes = bytes.min(most.unwrap_or(usize::MAX));
        let node = streams.iter().find_map(|stream| stream.memory.node());
        let rest = layout.header().to_vec();
        let digester = layout.digests().map(|algorithm| Digester::new(algorithm, &layout));
        Ok(Save {
            digester,
            position: to_u64(rest.len()),
            rest,
            layout,
            output,
            streams,
            threads: options.threads.min((options.staging_bytes / bytes).max(1)),
            request: Request { bytes, node, staging_bytes: options.staging_bytes },
            watch,
        })
    }

    /// Returns the layout of the file.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns, for each device, how much scratch memory makes it faster to append these extents, in bytes.
    pub fn scratch_bytes(&self, extents: &[Extent]) -> Vec<usize> {
        let count = |device| extents.iter().filter(|extent| extent.device == device).count();
        let bytes =
            |(device, stream): (usize, &DeviceStream)| stream.memory.gather_bytes(self.request.bytes, count(device));
        self.streams.iter().enumerate().map(bytes).collect()
    }

    /// Writes the next bytes of the file. `scratch` has memory of each device, or less or none of it.
    ///
    /// # Safety
    /// Each extent is valid memory of its device. Until this returns, nothing writes to it except work that is already
    /// queued on the stream of that device, and nothing but such work uses the scratch memory.
    ///
    /// # Errors
    /// `io` with path, tensor and byte; `device`, `out-of-memory`, `interrupted`. After an error the save can only be
    /// dropped.
    pub unsafe fn append(&mut self, extents: &[Extent], scratch: &[Scratch]) -> Result<()> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.append_all(extents, scratch) }.map_err(|error| self.output.abandon(error))
    }

    /// # Safety
    /// That of [`append`](Save::append).
    unsafe fn append_all(&mut self, extents: &[Extent], scratch: &[Scratch]) -> Result<()> {
        let scratch = scratch.iter().copied().chain(iter::repeat(Scratch::default()));
        for (stream, scratch) in self.streams.iter().zip(scratch) {
            stream.memory.begin(stream.stream, scratch)?;
        }
        let rest = std::mem::take(&mut self.rest);
        let appended_begin = self.position;
        let begin = self.position - to_u64(rest.len());
        let mut ends = Vec::with_capacity(extents.len());
        for extent in extents {
            self.position = self.position.saturating_add(extent.length);
            ends.push(self.position);
        }
        let is_last = self.position == self.layout.file_bytes();
        let step = to_u64(self.request.bytes);
        let count = to_usize((self.position - begin).div_ceil(step));
        let remainder = Mutex::new(Vec::new());
        let digester = self.digester.as_ref();
        digester.inspect(|digester| digester.turns.restart());
        let write = |index: usize| {
            self.watch.check()?;
            let first = begin + to_u64(index) * step;
            let range = first..self.position.min(first + step);
            let misfit = || Error::new(Kind::Internal, format!("bytes {range:?} do not fit a slot"));
            let length = usize::try_from(range.end - first).map_err(|_| misfit())?;
            let mut slot = match digester {
                Some(digester) => digester.acquire(index, &|| self.watch.check(), || self.acquire())?,
                None => self.acquire()?,
            };
            let (chunk, beyond) = slot.bytes_mut().split_at_mut_checked(length).ok_or_else(misfit)?;
            // A long header fills several chunks.
            let carried = rest.chunks(self.request.bytes).nth(index).unwrap_or_default();
            chunk.get_mut(..carried.len()).ok_or_else(misfit)?.copy_from_slice(carried);
            self.gather(chunk, first, extents, &ends).map_err(|error| match error.position() {
                Some(byte) => self.name_tensor(error.offset(first.saturating_add(byte)).at(self.output.path())),
                None => error,
            })?;
            if let Some(digester) = digester {
                let is_new = first.max(appended_begin)..range.end;
                let bytes = chunk.get(to_usize(is_new.start.saturating_sub(first))..).unwrap_or_default();
                digester.add(is_new.start, bytes, &|| self.watch.check())?;
            }
            let write_bytes =
                if is_last { self.output.last_bytes(length) } else { length - length % self.output.alignment() };
            if let Some(padding) = beyond.get_mut(..write_bytes.saturating_sub(length)) {
                padding.fill(0);
            }
            let partial = slot.bytes_mut().get(write_bytes..length).unwrap_or_default();
            if !partial.is_empty() {
                *remainder.lock().unwrap_or_else(PoisonError::into_inner) = partial.to_vec();
            }
            if write_bytes == 0 {
                return Ok(());
            }
            if let Some(digester) = digester.filter(|_| first < to_u64(self.layout.header().len())) {
                digester.keep(first, slot.bytes_mut().get(..write_bytes).unwrap_or_default());
                return Ok(());
            }
            let _span = profile::span(Stage::Write).bytes(write_bytes);
            let written = self.output.write(slot, write_bytes, first, &|| self.watch.check());
            written.map(drop).map_err(|error| self.name_tensor(error))
        };
        threads::for_each(self.threads, count, |index| {
            write(index).map_err(|error| match digester {
                Some(digester) => digester.turns.fail(error),
                None => error,
            })
        })?;
        self.rest = remainder.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(())
    }

    /// Gives the complete file or object its name, replacing an older one.
    ///
    /// # Errors
    /// `io`, as in [`Output::publish`]; `interrupted`; `internal` if bytes are missing.
    pub fn finish(mut self) -> Result<()> {
        let file_bytes = self.layout.file_bytes();
        if !self.rest.is_empty() {
            // The file has only a header, or its tensors have no bytes.
            // SAFETY: the list of extents is empty.
            unsafe { self.append(&[], &[]) }?;
        }
        if self.position != file_bytes {
            let message = format!("{} of {file_bytes} bytes were appended to the file", self.position);
            return Err(Error::new(Kind::Internal, message));
        }
        self.write_header().map_err(|error| self.output.abandon(error))?;
        self.watch.check().map_err(|error| self.output.abandon(error))?;
        let _span = profile::span(Stage::Flush);
        self.output.publish(file_bytes, &|| self.watch.check())
    }

    /// Writes the first chunks of a file with digests, which have its header.
    fn write_header(&mut self) -> Result<()> {
        let Some(digester) = self.digester.take() else { return Ok(()) };
        let (digests, kept) = digester.finish()?;
        self.layout.seal(&digests)?;
        for (first, mut chunk) in kept {
            let header = self.layout.header().get(to_usize(first)..).unwrap_or_default();
            for (byte, &sealed) in chunk.iter_mut().zip(header) {
                *byte = sealed;
            }
            let length = chunk.len();
            let _span = profile::span(Stage::Write).bytes(length);
            self.output.write(chunk, length, first, &|| self.watch.check())?;
        }
        Ok(())
    }

    /// Copies the bytes of all extents that overlap the chunk at byte `first` of the file to the chunk. `ends` are the ends
    /// of the extents in the file.
    fn gather(&self, chunk: &mut [u8], first: u64, extents: &[Extent], ends: &[u64]) -> Result<()> {
        let misfit = || Error::new(Kind::Internal, format!("the extents do not fit the chunk at byte {first}"));
        let size = |bytes: u64| usize::try_from(bytes).map_err(|_| misfit());
        let last = first + to_u64(chunk.len());
        let mut fetches: Vec<Vec<Fetch>> = self.streams.iter().map(|_| Vec::new()).collect();
        let skipped = ends.partition_point(|&end| end <= first);
        for (extent, &end) in extents.iter().zip(ends).skip(skipped) {
            let begin = end - extent.length;
            let (from, to) = (begin.max(first), end.min(last));
            if begin >= last {
                break;
            }
            if from < to {
                fetches.get_mut(extent.device).ok_or_else(misfit)?.push(Fetch {
                    address: extent.address + (from - begin),
                    slot_begin: size(from - first)?,
                    length: size(to - from)?,
                });
            }
        }
        let used = self.streams.iter().zip(&fetches).filter(|(_, fetches)| !fetches.is_empty());
        used.into_iter().try_for_each(|(stream, fetches)| stream.memory.fetch(chunk, fetches))
    }

    /// Acquires a slot of staging, and pins it for all devices of the save.
    fn acquire(&self) -> Result<Slot> {
        let mut slot = pool::acquire(&self.request, || self.watch.check())?;
        slot.pin(|bytes| self.streams.iter().find_map(|stream| stream.memory.pin(bytes)));
        Ok(slot)
    }

    /// Adds to an error at a byte of the output file the name of the tensor whose byte could not be written.
    fn name_tensor(&self, error: Error) -> Error {
        match error.position().and_then(|position| self.layout.tensor_at(position)) {
            Some(name) => error.tensor(name),
            None => error,
        }
    }
}
