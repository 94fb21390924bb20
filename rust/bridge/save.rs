//! Saves of tensors that are all known at the start.

use super::ffi;
use super::guard::{guard, start_log};
use super::tensor::{device_stream, metadata_of, new_tensor};
use crate::device::Scratch;
use crate::digest::Hash;
use crate::error::Result;
use crate::format::layout::Layout;
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::os::retry::Check;
use crate::os::sigint::Watch;
use crate::profile::{self, Span, Stage};
use crate::save::atomic_file;
use crate::save::file_kernel::Linux;
use crate::save::output::{self, Output};
use crate::save::{Extent, Save};
use serde_json::json;
use std::ops::Range;
use std::path::Path;

/// Save in progress.
pub(super) struct AnySave {
    save: Save,
    _span: Span,
}

/// Checks all tensors and begins their file. No file exists at `path` until [`finish_save`]. A new file gets the
/// permissions of `model`, unless that is empty.
pub(super) fn begin_save(
    path: &str,
    model: &str,
    tensors: &[ffi::NewTensor],
    metadata: &[ffi::MetadataEntry],
    has_metadata: bool,
    streams: &[ffi::DeviceStream],
) -> Result<Box<AnySave>> {
    guard(|| {
        start_log()?;
        let path = Path::new(path);
        let shown = output::shown(path)?;
        let layout = layout(tensors, metadata, has_metadata).map_err(|error| error.at(&shown))?;
        let detail = || json!({ "paths": [shown.to_string_lossy()], "tensors": layout.order().len() }).into();
        let span = profile::span(Stage::Save).bytes(layout.file_bytes()).detail(detail);
        let streams = streams.iter().map(device_stream).collect::<Result<_>>()?;
        let output = Output::open(path, path_of(model))?;
        let save = Save::begin(layout, output, streams, &Options::from_env()?)?;
        Ok(Box::new(AnySave { save, _span: span }))
    })
}

impl AnySave {
    /// Returns the position in the caller's list of each tensor, in the order of the file.
    pub(super) fn order(&self) -> Vec<usize> {
        self.save.layout().order().to_vec()
    }

    /// Returns, for each device, how much scratch memory makes it faster to append these extents, in bytes.
    pub(super) fn scratch_bytes(&self, extents: &[ffi::Extent]) -> Vec<u64> {
        self.save.scratch_bytes(&decode_extents(extents)).into_iter().map(to_u64).collect()
    }

    /// Writes the next bytes of the file. `scratch` has memory of each device, or less or none of it.
    ///
    /// # Safety
    /// That of [`Save::append`].
    pub(super) unsafe fn append(&mut self, extents: &[ffi::Extent], scratch: &[ffi::Scratch]) -> Result<()> {
        let decode = |&ffi::Scratch { address, bytes }: &ffi::Scratch| Scratch { address, bytes };
        let scratch: Vec<Scratch> = scratch.iter().map(decode).collect();
        // SAFETY: the caller's promise is the same.
        guard(|| unsafe { self.save.append(&decode_extents(extents), &scratch) })
    }
}

fn decode_extents(extents: &[ffi::Extent]) -> Vec<Extent> {
    let decode = |&ffi::Extent { device, address, bytes }: &ffi::Extent| Extent { device, address, length: bytes };
    extents.iter().map(decode).collect()
}

pub(super) fn finish_save(save: Box<AnySave>) -> Result<()> {
    guard(|| save.save.finish())
}

/// Writes a complete file. A new file gets the permissions of `model`, unless that is empty.
pub(super) fn write_file(path: &str, model: &str, bytes: &[u8]) -> Result<()> {
    guard(|| {
        let mut output = Output::open(Path::new(path), path_of(model))?;
        let length = bytes.len();
        let watch = Watch::begin();
        let check: Check<'_> = &|| watch.check();
        output.prepare_growing(&Options::from_env()?);
        output.write(bytes.to_vec(), length, 0, check)?;
        output.publish(to_u64(length), check)
    })
}

/// Returns the names of the objects beside the object of a URL.
pub(super) fn names_beside(url: &str) -> Result<Vec<String>> {
    guard(|| {
        let watch = Watch::begin();
        output::names_beside(Path::new(url), &|| watch.check())
    })
}

/// Removes the object of a URL. It need not exist.
pub(super) fn remove_object(url: &str) -> Result<()> {
    guard(|| {
        let watch = Watch::begin();
        output::remove(Path::new(url), &|| watch.check())
    })
}

/// Checks that a save can create or replace what is at `path`.
pub(super) fn check_target(path: &str) -> Result<()> {
    guard(|| output::check_target(Path::new(path)))
}

/// Gives the complete file `source` the name `path`, too.
pub(super) fn link_file(source: &str, path: &str) -> Result<()> {
    guard(|| {
        let watch = Watch::begin();
        atomic_file::link(Path::new(source), Path::new(path), &Linux, &|| watch.check())
    })
}

/// Returns the path that a text names, or `None` if it is empty.
pub(super) fn path_of(text: &str) -> Option<&Path> {
    Some(Path::new(text)).filter(|_| !text.is_empty())
}

/// Layout of a file in memory.
pub(super) struct FileLayout(Layout);

/// Checks all tensors and lays out their file.
pub(super) fn lay_out_file(
    tensors: &[ffi::NewTensor],
    metadata: &[ffi::MetadataEntry],
    has_metadata: bool,
) -> Result<Box<FileLayout>> {
    guard(|| Ok(Box::new(FileLayout(layout(tensors, metadata, has_metadata)?))))
}

impl FileLayout {
    pub(super) fn header(&self) -> &[u8] {
        self.0.header()
    }

    /// Writes the requested digests to the header of a complete file.
    pub(super) fn seal(&mut self, file: &mut [u8]) -> Result<()> {
        guard(|| {
            let Some(algorithm) = self.0.digests() else { return Ok(()) };
            let bytes = |range: &Range<u64>| file.get(to_usize(range.start)..to_usize(range.end)).unwrap_or_default();
            let digest = |range: &Range<u64>| {
                let hash = Hash::with_groups(algorithm, range.end - range.start);
                hash.add(0, bytes(range), &|| Ok(()))?;
                hash.finish()
            };
            let digests = self.0.ranges().map(digest).collect::<Result<Vec<_>>>()?;
            self.0.seal(&digests)?;
            for (byte, &sealed) in file.iter_mut().zip(self.0.header()) {
                *byte = sealed;
            }
            Ok(())
        })
    }

    /// Returns, for each tensor in the order of the file, its index in the caller's list.
    pub(super) fn order(&self) -> Vec<usize> {
        self.0.order().to_vec()
    }

    pub(super) fn file_bytes(&self) -> u64 {
        self.0.file_bytes()
    }
}

fn layout(tensors: &[ffi::NewTensor], metadata: &[ffi::MetadataEntry], has_metadata: bool) -> Result<Layout> {
    let tensors: Vec<_> = tensors.iter().map(new_tensor).collect::<Result<_>>()?;
    Layout::new(&tensors, &metadata_of(metadata, has_metadata))
}
