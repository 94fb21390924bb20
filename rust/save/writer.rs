//! A file that is written while its tensors are being made.
//!
//! Bytes are copied into blocks of the writer's own, of which it has a few, and
//! threads bring full blocks to the file while the caller makes its next
//! tensor. Where all blocks are full the caller waits.
//!
//! The header comes first in a file and is known last, so the data begins
//! behind some room for it, which the header fills up with spaces:
//!
//! ```text
//! | header      spaces | tensor a | b |   tensor c      | ...
//! 0                    room
//! ```
//!
//! A header that outgrows its room gets more: the file system inserts blocks at
//! the beginning of the file, or where it cannot, the data is moved. A file that
//! fits a single block has no spaces at all.

use super::write_threads::{Job, WriteThreads};
use crate::device::Fetch;
use crate::error::{Error, Kind, Result};
use crate::format::layout::{Metadata, Names, Tensor, header, widen};
use crate::options::Options;
use crate::profile::{self, Stage};
use crate::save::atomic_file::{ALIGNMENT, OutputFile};
use crate::save::memory::SourceMemory;
use crate::staging::Block;
use std::sync::Arc;

/// What is kept free for the header of a file that is larger than a block: enough for about 2500 tensors.
const ROOM_BYTES: usize = 256 << 10;

/// Writes one file, tensor after tensor. Dropped before it has finished, it leaves nothing behind.
pub struct Writer {
    output: Arc<OutputFile>,
    threads: WriteThreads,
    metadata: Metadata,
    names: Names,
    /// In the order of their data.
    tensors: Vec<Tensor>,
    /// Of all tensors, how many bytes there are to be and how many were given.
    data_bytes: u64,
    appended_bytes: u64,
    /// What is being filled, and how far it is.
    block: Option<Block>,
    filled: usize,
    /// Where the data begins, once a block has been written.
    room: Option<u64>,
    failure: Option<Error>,
}

impl Writer {
    /// Begins a file.
    ///
    /// # Errors
    /// `invalid-argument` where the metadata alone are more than a header can hold; `out-of-memory` where there can
    /// be no thread.
    pub fn begin(output: OutputFile, metadata: Metadata, options: &Options) -> Result<Writer> {
        header([].iter(), &metadata).map_err(|error| error.at(output.path()))?;
        let output = Arc::new(output);
        Ok(Writer {
            threads: WriteThreads::start(&output, options)?,
            output,
            metadata,
            names: Names::default(),
            tensors: Vec::new(),
            data_bytes: 0,
            appended_bytes: 0,
            block: None,
            filled: 0,
            room: None,
            failure: None,
        })
    }

    /// Adds a tensor, whose bytes are to be appended next.
    ///
    /// # Errors
    /// `invalid-argument` for a name that is there already or is reserved, after which others can be written; and
    /// what has failed before.
    pub fn add(&mut self, tensor: Tensor) -> Result<()> {
        self.check()?;
        self.names.add(tensor.name()).map_err(|error| error.at(self.output.path()))?;
        self.data_bytes = self.data_bytes.saturating_add(tensor.bytes());
        self.tensors.push(tensor);
        Ok(())
    }

    /// Appends bytes of the tensor that was added last. When this returns they may change.
    ///
    /// # Safety
    /// They are memory of the origin's device that nobody writes to meanwhile, but for work that is queued on the
    /// stream.
    ///
    /// # Errors
    /// `io` with the tensor and the byte that could not be written, which may be those of an earlier call; `device`,
    /// `out-of-memory`, `interrupted`. The writer is of no use any more then, and says the same again.
    pub unsafe fn append(&mut self, source: &dyn SourceMemory, stream: u64, address: u64, bytes: u64) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)?;
        self.copy(source, stream, address, bytes).map_err(|error| self.fail(error))
    }

    /// Writes what is left and the header, brings the file to the disk and lets it take the place of what was under
    /// its name.
    ///
    /// # Errors
    /// `io`, after which what was under the name is as it was; `invalid-argument` where the header is longer than
    /// readers accept; what has failed before.
    pub fn finish(mut self) -> Result<()> {
        self.check()?;
        let header = header(self.tensors.iter(), &self.metadata).map_err(|error| error.at(self.output.path()))?;
        let written = match self.room {
            None => self.write_small(&header),
            Some(room) => self.write_last(header, room),
        };
        let file_bytes = written.map_err(|error| self.fail(error))?;
        let Writer { output, threads, .. } = self;
        // Its threads share the file.
        drop(threads);
        let _span = profile::span(Stage::Flush);
        let output = Arc::into_inner(output).ok_or_else(|| Error::new(Kind::Internal, "the file is still in use"))?;
        output.publish(file_bytes)
    }

    fn copy(&mut self, source: &dyn SourceMemory, stream: u64, address: u64, bytes: u64) -> Result<()> {
        source.begin(stream)?;
        let mut done: u64 = 0;
        while done < bytes {
            let mut block = match self.block.take() {
                Some(block) => block,
                None => self.threads.acquire()?,
            };
            block.pin(|memory| source.pin(memory));
            let memory = block.bytes_mut();
            let length = usize::try_from(bytes - done).unwrap_or(usize::MAX).min(memory.len() - self.filled);
            let fetch = Fetch { address: address + done, slot_begin: self.filled, length };
            source.fetch(memory, &[fetch])?;
            let is_full = self.filled + length == memory.len();
            done += to_u64(length);
            self.appended_bytes = self.appended_bytes.saturating_add(to_u64(length));
            self.filled += length;
            if is_full {
                self.submit(block)?;
            } else {
                self.block = Some(block);
            }
        }
        Ok(())
    }

    /// Hands what is filled of a block to the threads, in whole blocks of the disk.
    fn submit(&mut self, mut block: Block) -> Result<()> {
        let room = match self.room {
            Some(room) => room,
            None => {
                let known = header(self.tensors.iter(), &self.metadata)?.len();
                // Where many tensors fit a block, as many again may come.
                *self.room.insert(to_u64(ROOM_BYTES.max(known.saturating_mul(2)).next_multiple_of(ALIGNMENT)))
            }
        };
        let length = self.filled.next_multiple_of(ALIGNMENT);
        if let Some(padding) = block.bytes_mut().get_mut(self.filled..length) {
            padding.fill(0);
        }
        let offset = room.saturating_add(self.appended_bytes - to_u64(self.filled));
        self.filled = 0;
        self.threads.submit(Job { block, length, offset })
    }

    /// All of a file of which nothing was written yet, and returns how long it is.
    fn write_small(&mut self, header: &[u8]) -> Result<u64> {
        let _span = profile::span(Stage::Write).bytes(header.len().saturating_add(self.filled));
        self.output.write(header, 0)?;
        if let Some(block) = &mut self.block {
            self.output.write(block.bytes_mut().get(..self.filled).unwrap_or_default(), to_u64(header.len()))?;
        }
        Ok(to_u64(header.len()).saturating_add(self.data_bytes))
    }

    /// The last block and the header, and returns how long the file is.
    fn write_last(&mut self, mut header: Vec<u8>, room: u64) -> Result<u64> {
        if let Some(block) = self.block.take() {
            self.submit(block)?;
        }
        self.threads.finish()?;
        let size = header.len().next_multiple_of(ALIGNMENT).max(usize::try_from(room).unwrap_or(usize::MAX));
        let missing = to_u64(size) - room;
        if missing > 0 {
            let mut buffer = self.threads.acquire()?;
            self.output.shift(room, self.data_bytes, missing, buffer.bytes_mut())?;
        }
        widen(&mut header, size);
        let _span = profile::span(Stage::Write).bytes(header.len());
        self.output.write(&header, 0)?;
        Ok(to_u64(size).saturating_add(self.data_bytes))
    }

    /// Whether there can be more.
    fn check(&self) -> Result<()> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        match self.tensors.last() {
            Some(tensor) if self.appended_bytes != self.data_bytes => {
                let message = "an error left it incomplete, and the file with it; begin another one";
                Err(Error::new(Kind::InvalidArgument, message).at(self.output.path()).tensor(tensor.name()))
            }
            _ => Ok(()),
        }
    }

    /// From now on there is only this error to tell. What could not be written belongs to some tensor.
    fn fail(&mut self, error: Error) -> Error {
        let position = error.position().zip(self.room).and_then(|(position, room)| position.checked_sub(room));
        let mut end: u64 = 0;
        let tensor = position.and_then(|position| {
            self.tensors.iter().find(|tensor| {
                end = end.saturating_add(tensor.bytes());
                position < end
            })
        });
        let error = match tensor {
            Some(tensor) => error.tensor(tensor.name()),
            None => error,
        };
        self.failure.insert(error).clone()
    }
}

fn to_u64(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}
