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
mod chunks;
mod digester;
pub mod direct_file;
mod encryptor;
pub mod file_kernel;
pub mod file_save;
pub mod memory;
pub mod output;
mod permissions;
pub mod rank_save;
pub mod rotate;
pub mod shared_output;
mod temp_file;
mod write_threads;
pub mod writer;

use crate::device::Scratch;
use crate::error::{Error, Kind, Result};
use crate::format::layout::Layout;
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::os::sigint::Watch;
use crate::profile::{self, Stage};
use crate::save::chunks::{Chunks, Pieces, Target};
use crate::save::digester::Digester;
use crate::save::memory::SourceMemory;
use crate::save::output::Output;
use std::ops::Range;
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
    chunks: Chunks,
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
        let chunks = Chunks::new(streams, output.part_bytes(0)?, file_bytes, options);
        let rest = layout.header().to_vec();
        let digester = layout.digests().map(|algorithm| Digester::new(algorithm, &layout));
        Ok(Save { digester, position: to_u64(rest.len()), rest, layout, output, chunks, watch })
    }

    /// Returns the layout of the file.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns, for each device, how much scratch memory makes it faster to append these extents, in bytes.
    pub fn scratch_bytes(&self, extents: &[Extent]) -> Vec<usize> {
        let count = |device| extents.iter().filter(|extent| extent.device == device).count();
        self.chunks.scratch_bytes(count)
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
        self.chunks.begin(scratch)?;
        let rest = std::mem::take(&mut self.rest);
        let appended_begin = self.position;
        let begin = self.position - to_u64(rest.len());
        let mut ends = Vec::with_capacity(extents.len());
        for extent in extents {
            self.position = self.position.saturating_add(extent.length);
            ends.push(self.position);
        }
        let is_last = self.position == self.layout.file_bytes();
        let bytes = self.chunks.bytes();
        let appended = begin..self.position;
        let remainder = Mutex::new(Vec::new());
        let digester = self.digester.as_ref();
        digester.inspect(|digester| digester.turns.restart());
        let target = Target { path: self.output.path(), layout: &self.layout };
        let write = |index: usize| {
            let range = chunks::chunk(&appended, bytes, index);
            let (first, length) = (range.start, to_usize(range.end - range.start));
            let mut slot = match digester {
                Some(digester) => {
                    digester.acquire(index, &|| self.watch.check(), || self.chunks.acquire(&self.watch))?
                }
                None => self.chunks.acquire(&self.watch)?,
            };
            let write_bytes =
                if is_last { self.output.last_bytes(length) } else { length - length % self.output.alignment() };
            self.chunks.fill(&mut slot, &range, write_bytes, target, |chunk, pieces| {
                // A long header fills several chunks.
                let carried = rest.chunks(bytes).nth(index).unwrap_or_default();
                let misfit = || Error::new(Kind::Internal, format!("bytes {range:?} do not fit a slot"));
                chunk.get_mut(..carried.len()).ok_or_else(misfit)?.copy_from_slice(carried);
                gather(pieces, &range, extents, &ends)
            })?;
            if let Some(digester) = digester {
                let is_new = first.max(appended_begin)..range.end;
                let new =
                    slot.bytes_mut().get(to_usize(is_new.start.saturating_sub(first))..length).unwrap_or_default();
                digester.add(is_new.start, new, &|| self.watch.check())?;
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
            target.write(write_bytes, || self.output.write(slot, write_bytes, first, &|| self.watch.check()).map(drop))
        };
        self.chunks.for_each(chunks::count(&appended, bytes), &self.watch, |index| {
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
        for (first, chunk) in digester.seal(&self.layout)? {
            let length = chunk.len();
            let _span = profile::span(Stage::Write).bytes(length);
            self.output.write(chunk, length, first, &|| self.watch.check())?;
        }
        Ok(())
    }
}

/// Adds the bytes of all extents that overlap a chunk to its pieces. `ends` are the ends of the extents in the file.
fn gather(pieces: &mut Pieces, range: &Range<u64>, extents: &[Extent], ends: &[u64]) -> Result<()> {
    let skipped = ends.partition_point(|&end| end <= range.start);
    for (extent, &end) in extents.iter().zip(ends).skip(skipped) {
        let begin = end - extent.length;
        let (from, to) = (begin.max(range.start), end.min(range.end));
        if begin >= range.end {
            break;
        }
        if from < to {
            pieces.add(extent.device, extent.address + (from - begin), from - range.start, to - from)?;
        }
    }
    Ok(())
}
