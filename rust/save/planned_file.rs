//! File or object whose layout is known before it is written.

use super::digester::Digester;
use super::output::Output;
use crate::error::{Error, Result};
use crate::format::layout::Layout;
use crate::num::to_u64;
use crate::os::retry::Check;
use crate::profile::{self, Stage};
use crate::staging::Slot;
use std::sync::Arc;

/// Output of a save, with its layout and its digests.
pub(super) struct PlannedFile {
    pub(super) layout: Arc<Layout>,
    pub(super) output: Output,
    /// Hashes of the tensors, if the file gets digests. They have the chunks with the header, which are written last.
    pub(super) digester: Option<Digester>,
}

impl PlannedFile {
    pub(super) fn new(layout: Arc<Layout>, output: Output) -> PlannedFile {
        let digester = layout.digests().map(|algorithm| Digester::new(algorithm, &layout));
        PlannedFile { layout, output, digester }
    }

    /// Returns the length of the header.
    pub(super) fn header_bytes(&self) -> u64 {
        to_u64(self.layout.header().len())
    }

    /// Writes the chunk at `first`, or keeps it if it has a part of the header that gets digests.
    pub(super) fn write(&self, mut slot: Slot, length: usize, first: u64, check: Check<'_>) -> Result<()> {
        if let Some(digester) = self.digester.as_ref().filter(|_| first < self.header_bytes()) {
            digester.keep(first, slot.bytes_mut().get(..length).unwrap_or_default());
            return Ok(());
        }
        let _span = profile::span(Stage::Write).bytes(length);
        self.output.write(slot, length, first, check).map(drop).map_err(|error| self.name_tensor(error))
    }

    /// Writes the header of a file with digests, once the hashes of all tensors are complete.
    pub(super) fn seal(&mut self, check: Check<'_>) -> Result<()> {
        let Some(digester) = self.digester.take() else { return Ok(()) };
        for (first, chunk) in digester.seal(&self.layout)? {
            let length = chunk.len();
            let _span = profile::span(Stage::Write).bytes(length);
            self.output.write(chunk, length, first, check)?;
        }
        Ok(())
    }

    /// Adds the file, and the tensor, to an error at a byte of the chunk at `first`.
    pub(super) fn locate(&self, error: Error, first: u64) -> Error {
        match error.position() {
            Some(byte) => self.name_tensor(error.offset(first.saturating_add(byte)).at(self.output.path())),
            None => error,
        }
    }

    /// Adds the name of the tensor to an error at a byte of the file.
    fn name_tensor(&self, error: Error) -> Error {
        match error.position().and_then(|position| self.layout.tensor_at(position)) {
            Some(name) => error.tensor(name),
            None => error,
        }
    }
}
