//! Files whose tensors are appended one by one.

use super::ffi;
use super::guard::{guard, start_log};
use super::tensor::{device_stream, metadata_of, new_tensor};
use crate::error::Result;
use crate::options::Options;
use crate::save::memory::SourceMemory;
use crate::save::output::{self, Output};
use crate::save::writer::Writer;
use std::collections::btree_map::{BTreeMap, Entry};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Writer of a file, and the devices of its tensors.
pub(super) struct AnyWriter {
    writer: Writer,
    path: PathBuf,
    sources: BTreeMap<i32, Arc<dyn SourceMemory>>,
}

pub(super) fn begin_writer(path: &str, metadata: &[ffi::MetadataEntry], has_metadata: bool) -> Result<Box<AnyWriter>> {
    guard(|| {
        start_log()?;
        let path = Path::new(path);
        let output = Output::open(path, None)?;
        let writer = Writer::begin(output, metadata_of(metadata, has_metadata), &Options::from_env()?)?;
        Ok(Box::new(AnyWriter { writer, path: output::shown(path)?, sources: BTreeMap::new() }))
    })
}

impl AnyWriter {
    pub(super) fn add(&mut self, tensor: &ffi::NewTensor) -> Result<()> {
        guard(|| self.writer.add(new_tensor(tensor).map_err(|error| error.at(&self.path))?))
    }

    /// Appends bytes of the tensor that was added last.
    ///
    /// # Safety
    /// The caller meets the conditions of [`Writer::append`].
    pub(super) unsafe fn append(&mut self, stream: &ffi::DeviceStream, address: u64, bytes: u64) -> Result<()> {
        guard(|| {
            let source = match self.sources.entry(stream.ordinal) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(device_stream(stream)?.memory),
            };
            // SAFETY: the caller's promise is the same.
            unsafe { self.writer.append(source.as_ref(), stream.stream, address, bytes) }
        })
    }
}

pub(super) fn finish_writer(writer: Box<AnyWriter>) -> Result<()> {
    guard(|| writer.writer.finish())
}
