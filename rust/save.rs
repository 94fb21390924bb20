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
pub mod checkpoint;
mod chunks;
mod digester;
pub mod direct_file;
mod encryptor;
pub mod file_kernel;
pub mod file_save;
pub mod memory;
pub mod output;
mod permissions;
mod planned_file;
pub mod ranks_save;
pub mod rotate;
mod temp_file;
mod write_threads;
pub mod writer;

use crate::device::Scratch;
use crate::error::{Error, Kind, Result};
use crate::format::layout::Layout;
use crate::num::to_u64;
use crate::options::Options;
use crate::os::retry::Check;
use crate::os::sigint::Watch;
use crate::profile::{self, Stage};
use crate::save::chunks::{Chunks, FileRange, Pieces};
use crate::save::memory::SourceMemory;
use crate::save::output::Output;
use crate::save::planned_file::PlannedFile;
use std::ops::Range;
use std::sync::Arc;

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
    file: PlannedFile,
    chunks: Chunks,
    /// End of the bytes that were appended. They are written, except for those in `rest`.
    position: u64,
    /// The last bytes before `position`, which do not fill a block or part.
    rest: Vec<u8>,
    watch: Watch,
}

impl Save {
    /// Begins a file with the header of `layout`. Fails with `io` if the disk has too little space.
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
        let file = PlannedFile::new(Arc::new(layout), output);
        Ok(Save { position: to_u64(rest.len()), rest, file, chunks, watch })
    }

    /// Returns the layout of the file.
    pub fn layout(&self) -> &Layout {
        &self.file.layout
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
        let carried = std::mem::take(&mut self.rest);
        let begin = self.position - to_u64(carried.len());
        let mut ends = Vec::with_capacity(extents.len());
        for extent in extents {
            self.position = self.position.saturating_add(extent.length);
            ends.push(self.position);
        }
        let range = FileRange { file: &self.file, range: begin..self.position, carried: &carried };
        let written = self.chunks.begin(scratch).and_then(|()| {
            self.chunks.write(&[range], &self.watch, |_, chunk, pieces| gather(pieces, chunk, extents, &ends))
        });
        self.rest = written.map_err(|error| self.file.output.abandon(error))?;
        Ok(())
    }

    /// Gives the complete file or object its name, replacing an older one. Fails with `io`, as in [`Output::publish`];
    /// `internal` if bytes are missing.
    pub fn finish(mut self) -> Result<()> {
        let file_bytes = self.layout().file_bytes();
        if !self.rest.is_empty() {
            // The file has only a header, or its tensors have no bytes.
            // SAFETY: the list of extents is empty.
            unsafe { self.append(&[], &[]) }?;
        }
        if self.position != file_bytes {
            let message = format!("{} of {file_bytes} bytes were appended to the file", self.position);
            return Err(Error::new(Kind::Internal, message));
        }
        let Save { mut file, watch, .. } = self;
        let check: Check<'_> = &|| watch.check();
        file.seal(check).and_then(|()| check()).map_err(|error| file.output.abandon(error))?;
        let _span = profile::span(Stage::Flush);
        file.output.publish(file_bytes, check)
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
