//! Writer of a file whose tensors are appended one by one.
//!
//! The writer copies bytes into a few blocks of its own. Threads write full blocks to the file while the caller computes
//! its next tensor. The caller waits while all blocks are full.
//!
//! The header is the first part of a file, but it is complete only at the end. So the data begins after space that is
//! reserved for the header, and the header is padded with spaces to that size:
//!
//! ```text
//! | header      spaces | tensor a | b |   tensor c      | ...
//! 0                    data begin
//! ```
//!
//! If a header outgrows the reserved space, the file system inserts blocks at the start of the file, or the writer moves
//! the data if the file system cannot. If all tensors of a file are announced, the space is for their header. A file
//! that fits a single block has no such padding.
//!
//! The blocks of an object in a remote store are the parts of its upload. The writer keeps the first one, which has the
//! space for the header, and sends it last. A header that outgrows the space makes that part longer.

mod finish;

use self::finish::first_filled;
use super::encryptor::Encryptor;
use super::write_threads::{Job, WriteThreads};
use crate::device::host::Host;
use crate::device::{Fetch, Scratch};
use crate::digest::groups::TreeDigest;
use crate::digest::{Algorithm, Hash};
use crate::encryption::key::EncryptionKey;
use crate::encryption::keyring;
use crate::error::{Error, Kind, Result};
use crate::format::Metadata;
use crate::format::digests;
use crate::format::encryption;
use crate::format::layout::{Names, Tensor, header, pad, tags_tensor};
use crate::format::tensors::END;
use crate::format::tensors::cipher::Cipher;
use crate::format::tensors::layout as tensors;
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::os::retry::Check;
use crate::os::sigint::Watch;
use crate::profile::{self, Stage};
use crate::save::atomic_file::ALIGNMENT;
use crate::save::memory::SourceMemory;
use crate::save::output::Output;
use crate::staging::{Block, PAGE_BYTES};
use std::sync::Arc;

/// Space reserved for the header of a file larger than a block whose tensors were not announced, in bytes: enough for
/// about 2500 tensors.
const HEADER_RESERVE_BYTES: usize = 256 << 10;
/// Further space of a file with BLAKE3 digests, in bytes: enough for the chaining values of 16 GiB of large tensors. Beyond,
/// each GiB needs 11 KiB.
const GROUPS_RESERVE_BYTES: usize = 172 << 10;

/// Format of the file, with what its header needs.
enum Format {
    Safetensors(Metadata, Vec<Tensor>),
    /// With the cipher of an encrypted file, and the number of its threads.
    Tensors(tensors::Layout, Option<(Cipher, usize)>),
}

impl Format {
    /// Encodes the header, padded to at least `bytes` bytes.
    fn header(&self, bytes: usize) -> Result<Vec<u8>> {
        match self {
            Format::Safetensors(metadata, tensors) => {
                let mut header = header(tensors.iter(), metadata)?;
                pad(&mut header, bytes);
                Ok(header)
            }
            Format::Tensors(layout, _) => layout.encode(bytes),
        }
    }
}

/// Writer of one file or object. Dropping an unfinished writer leaves nothing behind.
pub struct Writer {
    output: Arc<Output>,
    threads: WriteThreads,
    format: Format,
    names: Names,
    /// The tensors in the order of their data, with the number of their bytes.
    tensors: Vec<(String, u64)>,
    /// Number of bytes of all tensors that were added, and of what the format has between them.
    data_bytes: u64,
    /// Number of bytes that were appended.
    appended_bytes: u64,
    /// Algorithm of the requested digests, and the digests of complete tensors.
    digests: Option<(Algorithm, Vec<TreeDigest>)>,
    /// Hash of the tensor that was added last.
    hash: Option<Hash>,
    /// Encryption of the data, if the file is encrypted.
    encryptor: Option<Encryptor>,
    /// Size of the blocks of a file, in bytes.
    block_bytes: usize,
    /// The block that is being filled.
    block: Option<Block>,
    /// End of the bytes in `block`.
    filled: usize,
    /// First part of an object. It begins with space for the header, of [`HEADER_RESERVE_BYTES`].
    first: Option<Block>,
    /// Length of the complete header, if all tensors were announced.
    announced_bytes: Option<usize>,
    /// Start of the data in the file, or `None` before the first block is submitted.
    data_begin: Option<u64>,
    failure: Option<Error>,
}

impl Writer {
    /// Begins a file, which is encrypted with the key, or else with the registered key whose label the metadata name.
    ///
    /// # Errors
    /// `invalid-argument` if the metadata alone exceeds the maximum size of a header, or request digests of an encrypted
    /// file; `out-of-memory` if no thread can be started; the errors of [`keyring::key_with_label`] and the errors of
    /// deriving a key.
    pub fn begin(
        output: impl Into<Output>,
        mut metadata: Metadata,
        key: Option<&EncryptionKey>,
        options: &Options,
    ) -> Result<Writer> {
        let output = output.into();
        let label = encryption::take_request(&mut metadata);
        match (key, label) {
            (None, None) => Writer::begin_format(output, Format::Safetensors(metadata, Vec::new()), options),
            (Some(key), _) => Writer::begin_encrypted(output, metadata, key, options),
            (None, Some(label)) => {
                let key = keyring::key_with_label(&label).map_err(|error| error.at(output.path()))?;
                Writer::begin_encrypted(output, metadata, &key, options)
            }
        }
    }

    fn begin_encrypted(
        output: Output,
        mut metadata: Metadata,
        key: &EncryptionKey,
        options: &Options,
    ) -> Result<Writer> {
        digests::remove_copied(&mut metadata);
        if digests::requested(&metadata)?.is_some() {
            let message = "digests would tell which data is encrypted; an encrypted file needs none, since the key \
                           authenticates its data";
            return Err(Error::new(Kind::InvalidArgument, message).at(output.path()));
        }
        let encryptor = Encryptor::begin(key)?;
        let format = Format::Safetensors(encryptor.reserve(metadata), Vec::new());
        let writer = Writer::begin_format(output, format, options)?;
        Ok(Writer { encryptor: Some(encryptor), ..writer })
    }

    /// Begins a file in tensorizer's format, which is encrypted if it has a cipher, on this number of threads.
    pub fn begin_tensors(
        output: impl Into<Output>,
        cipher: Option<(Cipher, usize)>,
        options: &Options,
    ) -> Result<Writer> {
        let layout = tensors::Layout::new(cipher.is_some());
        Writer::begin_format(output.into(), Format::Tensors(layout, cipher), options)
    }

    fn begin_format(mut output: Output, format: Format, options: &Options) -> Result<Writer> {
        format.header(0).map_err(|error| error.at(output.path()))?;
        let algorithm = match &format {
            Format::Safetensors(metadata, _) => digests::requested(metadata)?,
            Format::Tensors(..) => None,
        };
        output.prepare_growing(options);
        let output = Arc::new(output);
        Ok(Writer {
            threads: WriteThreads::start(&output, options)?,
            filled: first_filled(&output),
            output,
            format,
            names: Names::default(),
            tensors: Vec::new(),
            data_bytes: 0,
            appended_bytes: 0,
            digests: algorithm.map(|algorithm| (algorithm, Vec::new())),
            hash: None,
            encryptor: None,
            block_bytes: (options.chunk_bytes - options.chunk_bytes % PAGE_BYTES).max(PAGE_BYTES),
            block: None,
            first: None,
            announced_bytes: None,
            data_begin: None,
            failure: None,
        })
    }

    /// Announces all tensors of a safetensors file before the first one is added, so that a file has exactly the space
    /// that the header needs.
    ///
    /// # Errors
    /// `invalid-argument` if the header would be longer than readers accept.
    pub fn announce(&mut self, tensors: &[Tensor]) -> Result<()> {
        let Format::Safetensors(metadata, _) = &self.format else {
            return Err(Error::new(Kind::Internal, "the file has tensorizer's format"));
        };
        let at = |error: Error| error.at(self.output.path());
        let tags = self.encryptor.as_ref().map(|_| tags_tensor(tensors.iter().map(Tensor::bytes)));
        let tags = tags.transpose().map_err(at)?;
        self.announced_bytes = Some(header(tensors.iter().chain(&tags), metadata).map_err(at)?.len());
        Ok(())
    }

    /// Adds a tensor. Its bytes must be appended before the next tensor is added.
    ///
    /// # Errors
    /// `invalid-argument` for a duplicate or reserved name, after which other tensors can still be added; any earlier
    /// error of the writer.
    pub fn add(&mut self, tensor: Tensor) -> Result<()> {
        self.check()?;
        self.names.add(tensor.name()).map_err(|error| error.at(self.output.path()))?;
        if let Some(encryptor) = &mut self.encryptor {
            encryptor.add(tensor.bytes());
        }
        self.push(tensor)
    }

    /// Adds a tensor whose name was checked.
    fn push(&mut self, tensor: Tensor) -> Result<()> {
        let Format::Safetensors(_, tensors) = &mut self.format else {
            return Err(Error::new(Kind::Internal, "the file has tensorizer's format"));
        };
        self.data_bytes = self.data_bytes.saturating_add(tensor.bytes());
        self.tensors.push((tensor.name().to_owned(), tensor.bytes()));
        if let Some((algorithm, digests)) = &mut self.digests {
            let hash = Hash::with_groups(*algorithm, tensor.bytes());
            match tensor.bytes() {
                0 => digests.push(hash.finish()?),
                _ => self.hash = Some(hash),
            }
        }
        tensors.push(tensor);
        Ok(())
    }

    /// Adds a tensor of a file in tensorizer's format, with its data, which is empty for a tensor without data.
    ///
    /// # Errors
    /// The errors of [`add`](Writer::add), [`append`](Writer::append), and
    /// [`NewTensor::header`](tensors::NewTensor::header); `invalid-argument` if the data has another size.
    pub fn write_hashed(&mut self, tensor: tensors::NewTensor, data: &[u8]) -> Result<()> {
        self.check()?;
        let header_begin = self.data_bytes;
        let Format::Tensors(layout, cipher) = &mut self.format else {
            return Err(Error::new(Kind::Internal, "the file has the format of safetensors"));
        };
        let at = |error: Error| error.at(self.output.path());
        let expected = tensor.data_bytes().map_err(at)?;
        if expected != to_u64(data.len()) {
            let message = format!("the data has {} bytes, but the tensor needs {expected}", data.len());
            return Err(at(Error::new(Kind::InvalidArgument, message).tensor(&*tensor.name)));
        }
        let mut encrypted = Vec::new();
        let encryption = match cipher {
            Some((cipher, threads)) => {
                encrypted.try_reserve_exact(data.len()).map_err(|_| {
                    let message = format!("no memory for a copy of {expected} bytes to encrypt");
                    at(Error::new(Kind::OutOfMemory, message).tensor(&*tensor.name))
                })?;
                encrypted.extend_from_slice(data);
                Some(cipher.encrypt(&mut encrypted, *threads).map_err(at)?)
            }
            None => None,
        };
        let header = tensor.header(data, encryption.as_ref()).map_err(at)?;
        self.names.add(&tensor.name).map_err(at)?;
        let bytes = to_u64(header.len()).saturating_add(expected);
        self.data_bytes = self.data_bytes.saturating_add(bytes);
        self.tensors.push((tensor.name.clone(), bytes));
        layout.add(tensor, header_begin, to_u64(header.len()));
        self.append_bytes(&header)?;
        self.append_bytes(if encryption.is_some() { &encrypted } else { data })
    }

    /// Appends bytes of the tensor that was added last. The caller may change them once this returns.
    ///
    /// # Safety
    /// The bytes are valid memory of `source`. Until this returns, nothing writes to them except work that is already
    /// queued on `stream`.
    ///
    /// # Errors
    /// `io` with the tensor and the byte that could not be written, which may be from an earlier call; `device`,
    /// `out-of-memory`, `interrupted`. Every later call fails with the same error.
    pub unsafe fn append(&mut self, source: &dyn SourceMemory, stream: u64, address: u64, bytes: u64) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)?;
        self.copy_or_encrypt(source, stream, address, bytes).map_err(|error| self.fail(error))
    }

    /// Writes the remaining data and the header, and gives the file or object its name, replacing an older one.
    ///
    /// # Errors
    /// `io`, as in [`Output::publish`]; `invalid-argument` if the header is longer than readers accept; `interrupted`;
    /// any earlier error of the writer.
    pub fn finish(mut self) -> Result<()> {
        self.check()?;
        if matches!(self.format, Format::Tensors(..)) {
            self.data_bytes = self.data_bytes.saturating_add(to_u64(END.len()));
            self.append_bytes(&END)?;
        }
        self.append_tags()?;
        let header = self.format.header(0).map_err(|error| error.at(self.output.path()))?;
        let watch = Watch::begin();
        let check: Check<'_> = &|| watch.check();
        let written = match self.data_begin {
            None => self.write_single_block(header, check),
            Some(data_begin) => self.write_rest(header.len(), data_begin, check),
        };
        let file_bytes = written.map_err(|error| self.fail(error))?;
        let Writer { output, threads, .. } = self;
        // The threads share the output file.
        drop(threads);
        let _span = profile::span(Stage::Flush);
        let output = Arc::into_inner(output).ok_or_else(|| Error::new(Kind::Internal, "the file is still in use"))?;
        output.publish(file_bytes, check)
    }

    /// Appends bytes in memory of the host.
    fn append_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        // SAFETY: the slice is memory of the host, and nothing writes to it.
        unsafe { self.append(&Host, 0, to_u64(bytes.as_ptr().addr()), to_u64(bytes.len())) }
    }

    /// Appends the tensor with the authentication codes of an encrypted file.
    fn append_tags(&mut self) -> Result<()> {
        // The codes themselves are not encrypted.
        let Some(encryptor) = self.encryptor.take() else { return Ok(()) };
        self.push(tags_tensor(self.tensors.iter().map(|(_, bytes)| *bytes))?)?;
        self.append_bytes(encryptor.tags())?;
        self.encryptor = Some(encryptor);
        Ok(())
    }

    fn copy_or_encrypt(&mut self, source: &dyn SourceMemory, stream: u64, address: u64, bytes: u64) -> Result<()> {
        let Some(mut encryptor) = self.encryptor.take() else { return self.copy(source, stream, address, bytes) };
        let watch = Watch::begin();
        source.begin(stream, Scratch::default())?;
        let mut done: u64 = 0;
        while done < bytes {
            let taken = encryptor.take(source, address + done, bytes - done, &|| watch.check());
            let (taken, chunk) = taken.map_err(|error| self.name_last(error))?;
            done += taken;
            if let Some(chunk) = chunk {
                self.copy(&Host, 0, to_u64(chunk.as_ptr().addr()), to_u64(chunk.len()))?;
            }
        }
        self.encryptor = Some(encryptor);
        Ok(())
    }

    fn copy(&mut self, source: &dyn SourceMemory, stream: u64, address: u64, bytes: u64) -> Result<()> {
        let watch = Watch::begin();
        source.begin(stream, Scratch::default())?;
        let mut done: u64 = 0;
        while done < bytes {
            let mut block = match self.block.take() {
                Some(block) => block,
                None => self.threads.acquire(self.next_block_bytes()?)?,
            };
            block.pin(|memory| source.pin(memory));
            let length = to_usize(bytes - done).min(block.as_ref().len() - self.filled);
            let fetch = Fetch { address: address + done, slot_begin: self.filled, length };
            let fetched = source.fetch(&mut block, &[fetch], &|| watch.check());
            fetched.map_err(|error| self.name_last(error))?;
            let memory = block.as_ref();
            if let (Some(hash), Some((_, digests))) = (&self.hash, &mut self.digests) {
                let _span = profile::span(Stage::Hash).bytes(length);
                let begin = self.appended_bytes.saturating_add(hash.length()) - self.data_bytes;
                let bytes = memory.get(self.filled..self.filled + length).unwrap_or_default();
                if hash.add(begin, bytes, &|| Ok(()))?.is_some()
                    && let Some(hash) = self.hash.take()
                {
                    digests.push(hash.finish()?);
                }
            }
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

    /// Adds the tensor that was added last to an error of its memory.
    fn name_last(&self, error: Error) -> Error {
        match self.tensors.last() {
            Some((name, _)) => error.without_offset().at(self.output.path()).tensor(name),
            None => error,
        }
    }

    /// Returns the size of the next block, in bytes.
    fn next_block_bytes(&self) -> Result<usize> {
        let offset = self.data_begin.map_or(0, |begin| begin.saturating_add(self.appended_bytes));
        Ok(self.output.part_bytes(offset)?.unwrap_or(self.block_bytes))
    }

    /// Submits the filled part of a block to the threads, on a disk padded to whole blocks. Keeps the first part of an
    /// object.
    fn submit(&mut self, mut block: Block) -> Result<()> {
        if self.data_begin.is_none() && self.output.is_object() {
            let watch = Watch::begin();
            self.output.begin_parts(&|| watch.check())?;
            self.data_begin = Some(to_u64(HEADER_RESERVE_BYTES));
            self.first = Some(block);
            self.filled = 0;
            return Ok(());
        }
        let data_begin = match self.data_begin {
            Some(data_begin) => data_begin,
            None => {
                let reserve = match self.announced_bytes {
                    Some(bytes) => bytes,
                    None => {
                        let groups = if self.has_groups() { GROUPS_RESERVE_BYTES } else { 0 };
                        // If the first block holds many tensors, as many again may follow.
                        HEADER_RESERVE_BYTES.max(self.format.header(0)?.len().saturating_mul(2)) + groups
                    }
                };
                *self.data_begin.insert(to_u64(reserve.next_multiple_of(ALIGNMENT)))
            }
        };
        let length = self.output.last_bytes(self.filled);
        if let Some(padding) = block.bytes_mut().get_mut(self.filled..length) {
            padding.fill(0);
        }
        let offset = data_begin.saturating_add(self.appended_bytes - to_u64(self.filled));
        self.filled = 0;
        self.threads.submit(Job { block, length, offset })
    }

    fn has_groups(&self) -> bool {
        matches!(self.digests, Some((Algorithm::Blake3, _)))
    }

    /// Fails after an error, or if bytes of the last tensor are missing.
    fn check(&self) -> Result<()> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        match self.tensors.last() {
            Some((name, _)) if self.appended_bytes != self.data_bytes => {
                let message = "an error left the tensor and the file incomplete; begin another file";
                Err(Error::new(Kind::InvalidArgument, message).at(self.output.path()).tensor(name))
            }
            _ => Ok(()),
        }
    }

    /// Ends the output and stores an error, which every later call returns. Adds the tensor whose byte could not be
    /// written.
    fn fail(&mut self, error: Error) -> Error {
        if self.output.is_object() {
            // The service would keep a part that arrives after the abort.
            self.threads.stop();
        }
        let error = self.output.abandon(error);
        let position = error.position().zip(self.data_begin).and_then(|(position, begin)| position.checked_sub(begin));
        let mut end: u64 = 0;
        let tensor = position.and_then(|position| {
            self.tensors.iter().find(|(_, bytes)| {
                end = end.saturating_add(*bytes);
                position < end
            })
        });
        let error = match tensor {
            Some((name, _)) => error.tensor(name),
            None => error,
        };
        self.failure.insert(error).clone()
    }
}
