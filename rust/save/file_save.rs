//! Save of one file whose tensors are all known at the start. This is the one place that decides how.
//!
//! Several threads write a plain file: [`Save`]. Their ranges of the file would cut the chunks that are encrypted as a
//! whole, so a [`Writer`] writes an encrypted file.

use super::output::{self, Output};
use super::writer::Writer;
use super::{DeviceStream, Extent, Save};
use crate::device::Scratch;
use crate::encryption::key::EncryptionKey;
use crate::error::{Error, Kind, Result};
use crate::format::Metadata;
use crate::format::encryption;
use crate::format::layout::{Layout, Tensor};
use crate::options::Options;
use crate::os::sigint::Watch;
use crate::profile::{self, Span, Stage};
use serde_json::json;
use std::path::PathBuf;
use std::vec;

/// Bytes that are encrypted between two checks for Ctrl-C, which take a few hundredths of a second.
const CHECKED_BYTES: u64 = 64 << 20;

/// Safetensors file that a save or a writer creates.
pub struct NewFile {
    /// Path of the file, or URL of the object.
    pub path: PathBuf,
    /// File whose owner and permissions the new file gets if none is at `path`.
    pub model: Option<PathBuf>,
    /// Text entries of the header.
    pub metadata: Metadata,
    /// Key that encrypts the file. Without it, the metadata may name the label of a registered key.
    pub key: Option<EncryptionKey>,
}

impl NewFile {
    /// Begins the output.
    pub fn open(&self) -> Result<Output> {
        Output::open(&self.path, self.model.as_deref())
    }

    fn is_encrypted(&self) -> bool {
        self.key.is_some() || encryption::is_requested(&self.metadata)
    }
}

/// Save in progress of a plain or an encrypted file. Dropping an unfinished save leaves nothing behind.
pub struct FileSave {
    method: Method,
    _span: Span,
}

enum Method {
    Plain(Box<Save>),
    Encrypted(Box<EncryptedSave>),
}

impl FileSave {
    /// Checks all tensors and begins their file. Nothing exists at its path until [`finish`](FileSave::finish).
    pub fn begin(
        file: &NewFile,
        tensors: Vec<Tensor>,
        streams: Vec<DeviceStream>,
        options: &Options,
    ) -> Result<FileSave> {
        let shown = output::shown(&file.path)?;
        let count = tensors.len();
        let span = |bytes| {
            let detail = || json!({ "paths": [shown.to_string_lossy()], "tensors": count }).into();
            profile::span(Stage::Save).bytes(bytes).detail(detail)
        };
        if file.is_encrypted() {
            // The length of the file is known only at its end.
            let bytes = tensors.iter().map(Tensor::bytes).fold(0, u64::saturating_add);
            let span = span(bytes);
            let save = EncryptedSave::begin(file, tensors, streams, options)?;
            return Ok(FileSave { method: Method::Encrypted(Box::new(save)), _span: span });
        }
        let layout = Layout::new(&tensors, &file.metadata).map_err(|error| error.at(&*shown))?;
        let span = span(layout.file_bytes());
        let save = Save::begin(layout, file.open()?, streams, options)?;
        Ok(FileSave { method: Method::Plain(Box::new(save)), _span: span })
    }

    /// Returns the position in the caller's list of each tensor, in the order of the file. A plain file has the order of
    /// [`Layout`], an encrypted one the caller's.
    pub fn order(&self) -> Vec<usize> {
        match &self.method {
            Method::Plain(save) => save.layout().order().to_vec(),
            Method::Encrypted(save) => (0..save.tensor_count).collect(),
        }
    }

    /// Returns, for each device, how much scratch memory makes it faster to append these extents, in bytes.
    pub fn scratch_bytes(&self, extents: &[Extent]) -> Vec<usize> {
        match &self.method {
            Method::Plain(save) => save.scratch_bytes(extents),
            Method::Encrypted(save) => vec![0; save.streams.len()],
        }
    }

    /// Appends the next bytes of the tensors, in the order of the file. `scratch` has memory of each device, or less or
    /// none of it.
    ///
    /// # Safety
    /// The caller meets the conditions of [`Save::append`].
    ///
    /// # Errors
    /// The errors of [`Save::append`], or of [`Writer::add`] and [`Writer::append`]. After an error the save can only be
    /// dropped.
    pub unsafe fn append(&mut self, extents: &[Extent], scratch: &[Scratch]) -> Result<()> {
        match &mut self.method {
            // SAFETY: the caller's promise is the same.
            Method::Plain(save) => unsafe { save.append(extents, scratch) },
            // SAFETY: the caller's promise is the same.
            Method::Encrypted(save) => extents.iter().try_for_each(|extent| unsafe { save.append(extent) }),
        }
    }

    /// Gives the complete file or object its name, replacing an older one.
    pub fn finish(self) -> Result<()> {
        match self.method {
            Method::Plain(save) => save.finish(),
            Method::Encrypted(save) => save.finish(),
        }
    }
}

/// Save in progress of an encrypted file.
struct EncryptedSave {
    writer: Writer,
    tensor_count: usize,
    /// Tensors that were not begun.
    tensors: vec::IntoIter<Tensor>,
    streams: Vec<DeviceStream>,
    /// Number of missing bytes of the tensor that was begun last.
    left_bytes: u64,
    watch: Watch,
}

impl EncryptedSave {
    fn begin(
        file: &NewFile,
        tensors: Vec<Tensor>,
        streams: Vec<DeviceStream>,
        options: &Options,
    ) -> Result<EncryptedSave> {
        let mut writer = Writer::begin(file.open()?, file.metadata.clone(), file.key.as_ref(), options)?;
        writer.announce(&tensors)?;
        Ok(EncryptedSave {
            writer,
            tensor_count: tensors.len(),
            tensors: tensors.into_iter(),
            streams,
            left_bytes: 0,
            watch: Watch::begin(),
        })
    }

    /// Begins further tensors until one has missing bytes.
    fn begin_tensors(&mut self) -> Result<()> {
        while self.left_bytes == 0
            && let Some(tensor) = self.tensors.next()
        {
            self.left_bytes = tensor.bytes();
            self.writer.add(tensor)?;
        }
        Ok(())
    }

    /// # Safety
    /// The caller meets the conditions of [`Save::append`].
    unsafe fn append(&mut self, extent: &Extent) -> Result<()> {
        self.begin_tensors()?;
        let &Extent { device, address, length } = extent;
        let misfit = || Error::new(Kind::Internal, format!("{extent:?} does not fit the tensors"));
        self.left_bytes = self.left_bytes.checked_sub(length).ok_or_else(misfit)?;
        let stream = self.streams.get(device).ok_or_else(misfit)?;
        let mut done: u64 = 0;
        while done < length {
            self.watch.check()?;
            let bytes = CHECKED_BYTES.min(length - done);
            // SAFETY: the caller's promise is the same.
            unsafe { self.writer.append(stream.memory.as_ref(), stream.stream, address + done, bytes) }?;
            done += bytes;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<()> {
        // The last tensors may have no bytes.
        self.begin_tensors()?;
        self.writer.finish()
    }
}
