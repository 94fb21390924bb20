//! Part of one rank in a save by a group: writes its blocks of files or objects that all ranks have open.

use super::chunks::{Chunks, FileRange, Pieces};
use super::direct_file::ALIGNMENT;
use super::output::Output;
use super::planned_file::PlannedFile;
use super::{DeviceStream, Extent};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::os::sigint::Watch;
use crate::profile::{self, Span, Stage};
use crate::ranks::save::{RankPlan, SavePlan, Write};
use serde_json::json;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Part of an object that a process has sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentPart {
    /// Index of the file in the save.
    pub file: usize,
    /// Index of the part.
    pub index: usize,
    /// Part id (ETag) returned by the store.
    pub id: String,
}

/// Save of one rank in progress. The files belong to the caller, who removes them after an error.
pub struct RankSave {
    plan: Arc<SavePlan>,
    work: Arc<RankPlan>,
    /// Files of which the rank writes blocks. The digesters of the first rank have the chunks of the header.
    files: Vec<Option<PlannedFile>>,
    chunks: Chunks,
    _span: Span,
}

impl RankSave {
    /// Opens the files of which the rank writes blocks. They exist, and have their length. `uploads` has the id of the
    /// upload of each object, whose parts are blocks of the plan, and an empty text for each file. Fails with
    /// `invalid-argument` if the plan has another number of files, or a block size without direct writes;
    /// `file-not-found`, `permission-denied`, `is-a-directory` and `io` from the file system.
    pub fn open(
        plan: Arc<SavePlan>,
        work: Arc<RankPlan>,
        paths: &[PathBuf],
        uploads: &[String],
        streams: Vec<DeviceStream>,
        options: &Options,
    ) -> Result<RankSave> {
        let invalid = |message: String| Error::new(Kind::InvalidArgument, message);
        if paths.len() != plan.files() || uploads.len() != paths.len() {
            let message = format!("{} paths and {} uploads for {} files", paths.len(), uploads.len(), plan.files());
            return Err(invalid(message));
        }
        if !plan.block_bytes().is_multiple_of(to_u64(ALIGNMENT)) {
            let message = format!("blocks of {} bytes, which is not a multiple of {ALIGNMENT}", plan.block_bytes());
            return Err(invalid(message));
        }
        let writes = || work.windows.iter().flat_map(|window| &window.writes);
        let mut is_written = vec![false; paths.len()];
        for write in writes() {
            if let Some(is_written) = is_written.get_mut(write.file) {
                *is_written = true;
            }
        }
        let bytes = writes().map(|write| write.range.end - write.range.start);
        let (sum, most) = (bytes.clone().sum::<u64>(), bytes.max().unwrap_or(0));
        let detail = || {
            let own = paths.iter().zip(&is_written).filter(|(_, is_written)| **is_written);
            let own: Vec<_> = own.map(|(path, _)| path.to_string_lossy()).collect();
            json!({ "paths": own, "rank": work.rank }).into()
        };
        let span = profile::span(Stage::Save).bytes(sum).detail(detail);
        let watch = Watch::begin();
        let open = |(number, is_written): (usize, &bool)| {
            let (path, upload) = paths.get(number).zip(uploads.get(number)).filter(|_| *is_written)?;
            let layout = Arc::clone(plan.file(number)?);
            let output = Output::join(path, upload, plan.block_bytes(), &|| watch.check());
            Some(output.map(|output| PlannedFile::new(layout, output)))
        };
        let files = is_written.iter().enumerate().map(|file| open(file).transpose()).collect::<Result<Vec<_>>>()?;
        let part_bytes = files.iter().flatten().find_map(|file| file.output.part_bytes(0).transpose()).transpose()?;
        let chunks = Chunks::new(streams, part_bytes, most.max(1), options);
        Ok(RankSave { plan, work, files, chunks, _span: span })
    }

    /// Writes some of the rank's ranges of a window. `sources` has the memory of their sources, in the order of the window:
    /// the bytes that the plan states, of the rank's own tensors or received from others.
    ///
    /// # Safety
    /// Each extent is valid memory of its device. Until this returns, nothing writes to it except work that is already
    /// queued on the stream of that device.
    ///
    /// # Errors
    /// `io` with path, tensor and byte; `device`, `out-of-memory`, `interrupted`; `internal` if bytes are missing.
    pub unsafe fn write(&self, window: usize, writes: Range<usize>, sources: &[Extent]) -> Result<()> {
        let missing = || Error::new(Kind::Internal, format!("window {window} has no ranges {writes:?}"));
        let work = self.work.windows.get(window).ok_or_else(missing)?;
        let writes = work.writes.get(writes.clone()).ok_or_else(missing)?;
        let first_source = writes.first().map_or(0, |write| write.sources.start);
        let last_source = writes.last().map_or(0, |write| write.sources.end);
        if last_source - first_source != sources.len() {
            return Err(Error::new(Kind::Internal, format!("{} sources for {writes:?}", sources.len())));
        }
        let watch = Watch::begin();
        self.chunks.begin(&[])?;
        let range = |write: &Write| {
            let file = self.files.get(write.file).and_then(Option::as_ref).ok_or_else(missing)?;
            Ok(FileRange { file, range: write.range.clone(), carried: &[] })
        };
        let ranges = writes.iter().map(range).collect::<Result<Vec<_>>>()?;
        let gather = |index: usize, chunk: &Range<u64>, pieces: &mut Pieces| {
            let write: &Write = writes.get(index).ok_or_else(missing)?;
            let own = work.sources.get(write.sources.clone()).ok_or_else(missing)?;
            let memory = sources.get(write.sources.start - first_source..).ok_or_else(missing)?;
            let skipped = own.partition_point(|source| self.plan.file_range(source).end <= chunk.start);
            for (source, extent) in own.iter().zip(memory).skip(skipped) {
                if self.plan.file_range(source).start >= chunk.end {
                    break;
                }
                if extent.length != source.local.end - source.local.start {
                    return Err(Error::new(Kind::Internal, format!("{extent:?} for {source:?}")));
                }
                let mut result = Ok(());
                self.plan.for_each_piece(source, chunk, |piece, offset| {
                    if result.is_ok() {
                        let (begin, length) = (piece.start - chunk.start, piece.end - piece.start);
                        result = pieces.add(extent.device, extent.address + offset, begin, length);
                    }
                });
                result?;
            }
            Ok(())
        };
        self.chunks.write(&ranges, &watch, gather).map(drop)
    }

    /// Returns the hashes of what the rank has written of files with digests, for [`seal`](RankSave::seal). Empty if no file
    /// has digests.
    pub fn hashes(&self) -> Result<Vec<u8>> {
        let mut encoded = Vec::new();
        for (number, file) in self.files.iter().enumerate() {
            if let Some(digester) = file.as_ref().and_then(|file| file.digester.as_ref()) {
                encoded.extend(to_u64(number).to_le_bytes());
                digester.encode(&mut encoded)?;
            }
        }
        Ok(encoded)
    }

    /// Writes the headers of files with digests, given the hashes of all other ranks, one after the other. Only the first rank does so.
    pub fn seal(&mut self, hashes: &[u8]) -> Result<()> {
        let misfit = || Error::new(Kind::Internal, "the hashes of another rank are incomplete");
        let watch = Watch::begin();
        let mut encoded = hashes;
        while let Some((file, rest)) = encoded.split_first_chunk::<8>() {
            encoded = rest;
            let file = self.files.get(to_usize(u64::from_le_bytes(*file))).and_then(Option::as_ref);
            let digester = file.and_then(|file| file.digester.as_ref());
            digester.ok_or_else(misfit)?.add_encoded(&mut encoded)?;
        }
        self.files.iter_mut().flatten().try_for_each(|file| file.seal(&|| watch.check()))
    }

    /// Sets the length of the files whose end the rank has written, and flushes what it has written. Returns the parts of
    /// objects that it has sent.
    pub fn finish(self) -> Result<Vec<SentPart>> {
        let watch = Watch::begin();
        let _span = profile::span(Stage::Flush);
        let mut parts = Vec::new();
        for (number, file) in self.files.iter().enumerate() {
            let Some(file) = file else { continue };
            let end = file.layout.file_bytes();
            let mut writes = self.work.windows.iter().flat_map(|window| &window.writes);
            let has_end = writes.any(|write| write.file == number && write.range.end == end);
            let sent = file.output.leave(has_end.then_some(end), &|| watch.check())?;
            parts.extend(sent.into_iter().map(|(index, id)| SentPart { file: number, index, id }));
        }
        Ok(parts)
    }
}
