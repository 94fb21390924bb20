//! End of a file or object: its last block, and the header.

use super::{HEADER_RESERVE_BYTES, Writer};
use crate::error::Result;
use crate::format::digests;
use crate::num::{to_u64, to_usize};
use crate::os::retry::Check;
use crate::profile::{self, Stage};
use crate::save::atomic_file::ALIGNMENT;
use crate::save::output::Output;
use crate::staging::Block;

impl Writer {
    /// Writes the requested digests, or the encryption, to the header.
    fn seal(&self, header: &mut [u8]) -> Result<()> {
        if let Some(encryptor) = &self.encryptor {
            return encryptor.seal(header);
        }
        let Some((algorithm, digests)) = &self.digests else { return Ok(()) };
        digests::seal(header, *algorithm, digests)
    }

    /// Writes a file that fits a single block, and returns its length.
    pub(super) fn write_single_block(&mut self, mut header: Vec<u8>, check: Check<'_>) -> Result<u64> {
        self.seal(&mut header)?;
        let begin = first_filled(&self.output);
        let length = to_u64(header.len()).saturating_add(self.data_bytes);
        let _span = profile::span(Stage::Write).bytes(to_usize(length));
        if begin == 0 {
            let header_bytes = header.len();
            self.output.write(header, header_bytes, 0, check)?;
            if let Some(block) = self.block.take() {
                self.output.write(block, self.filled, to_u64(header_bytes), check)?;
            }
        } else {
            let data = self.block.as_ref().and_then(|block| block.as_ref().get(begin..self.filled)).unwrap_or_default();
            self.output.write([&*header, data].concat(), to_usize(length), 0, check)?;
        }
        Ok(length)
    }

    /// Writes the last block and the header, and returns the length of the file.
    pub(super) fn write_rest(&mut self, header_bytes: usize, data_begin: u64, check: Check<'_>) -> Result<u64> {
        if let Some(block) = self.block.take() {
            self.submit(block)?;
        }
        self.threads.finish()?;
        if let Some(first) = self.first.take() {
            return self.write_first(header_bytes, first, check);
        }
        let size = header_bytes.next_multiple_of(ALIGNMENT).max(to_usize(data_begin));
        let missing = to_u64(size) - data_begin;
        if missing > 0 {
            let mut buffer = self.threads.acquire(self.block_bytes)?;
            self.output.shift(data_begin, self.data_bytes, missing, buffer.bytes_mut(), check)?;
        }
        let mut header = self.format.header(size)?;
        self.seal(&mut header)?;
        let length = header.len();
        let _span = profile::span(Stage::Write).bytes(length);
        self.output.write(header, length, 0, check)?;
        Ok(to_u64(size).saturating_add(self.data_bytes))
    }

    /// Writes the first part of an object, with the header, and returns the length of the object.
    fn write_first(&self, header_bytes: usize, mut first: Block, check: Check<'_>) -> Result<u64> {
        let mut header = self.format.header(header_bytes.next_multiple_of(HEADER_RESERVE_BYTES))?;
        self.seal(&mut header)?;
        let (header_bytes, length) = (header.len(), first.as_ref().len());
        let _span = profile::span(Stage::Write).bytes(length);
        match first.bytes_mut().get_mut(..header_bytes).filter(|space| space.len() == HEADER_RESERVE_BYTES) {
            Some(space) => {
                space.copy_from_slice(&header);
                self.output.write(first, length, 0, check)?;
            }
            None => {
                let end = to_u64(HEADER_RESERVE_BYTES).saturating_add(self.data_bytes);
                let (begin, distance) = (to_u64(length), to_u64(header_bytes - HEADER_RESERVE_BYTES));
                self.output.shift(begin, end.saturating_sub(begin), distance, &mut [], check)?;
                header.extend_from_slice(first.as_ref().get(HEADER_RESERVE_BYTES..).unwrap_or_default());
                let length = header.len();
                self.output.write(header, length, 0, check)?;
            }
        }
        Ok(to_u64(header_bytes).saturating_add(self.data_bytes))
    }
}

/// Returns where the data begins in the first block.
pub(super) fn first_filled(output: &Output) -> usize {
    if output.is_object() { HEADER_RESERVE_BYTES } else { 0 }
}
