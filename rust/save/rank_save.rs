//! Part of one rank in a save by a group: writes its blocks of files or objects that all ranks have open.

use super::chunks::{self, Chunks, Target};
use super::digester::Digester;
use super::direct_file::ALIGNMENT;
use super::shared_output::{SentPart, SharedOutput};
use super::{DeviceStream, Extent};
use crate::error::{Error, Kind, Result};
use crate::group::save::{RankPlan, SavePlan};
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::os::sigint::Watch;
use crate::profile::{self, Span, Stage};
use serde_json::json;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Save of one rank in progress. The files are those of the caller, who removes them after an error.
pub struct RankSave {
    plan: Arc<SavePlan>,
    work: Arc<RankPlan>,
    /// Files of which the rank writes blocks.
    files: Vec<Option<SharedOutput>>,
    /// Hashes of the tensors of each file, if the file gets digests. Those of the first rank have the chunks of the header.
    digesters: Vec<Option<Digester>>,
    chunks: Chunks,
    _span: Span,
}

impl RankSave {
    /// Opens the files of which the rank writes blocks. They exist, and have their length. `uploads` has the id of the upload
    /// of each object, whose parts are blocks of the plan, and an empty text for each file.
    ///
    /// # Errors
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
        let open = |((path, upload), is_written): ((&PathBuf, &String), &bool)| {
            is_written.then(|| SharedOutput::open(path, upload, plan.block_bytes(), &|| watch.check())).transpose()
        };
        let files: Vec<_> = paths.iter().zip(uploads).zip(&is_written).map(open).collect::<Result<_>>()?;
        let has_objects = files.iter().flatten().any(|file| matches!(file, SharedOutput::Object(..)));
        let part_bytes = has_objects.then(|| to_usize(plan.block_bytes()));
        let chunks = Chunks::new(streams, part_bytes, most.max(1), options);
        let digester = |(file, is_written): (usize, &bool)| {
            let layout = plan.file(file).filter(|_| *is_written)?;
            Some(Digester::new(layout.digests()?, layout))
        };
        let digesters = is_written.iter().enumerate().map(digester).collect();
        Ok(RankSave { plan, work, files, digesters, chunks, _span: span })
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
        let bytes = self.chunks.bytes();
        // For each range, the number of chunks up to its end.
        let mut ends = Vec::with_capacity(writes.len());
        let mut count = 0;
        for write in writes {
            count += chunks::count(&write.range, bytes);
            ends.push(count);
        }
        self.chunks.for_each(count, &watch, |index| {
            let position = ends.partition_point(|&end| end <= index);
            let before = position.checked_sub(1).and_then(|before| ends.get(before)).copied().unwrap_or(0);
            let write = writes.get(position).ok_or_else(missing)?;
            let file = self.files.get(write.file).and_then(Option::as_ref).ok_or_else(missing)?;
            let layout = self.plan.file(write.file).ok_or_else(missing)?;
            let range = chunks::chunk(&write.range, bytes, index - before);
            let target = Target { path: file.path(), layout };
            let mut slot = self.chunks.acquire(&watch)?;
            let padded = file.padded(to_usize(range.end - range.start));
            self.chunks.fill(&mut slot, &range, padded, target, |chunk, pieces| {
                let header = layout.header().get(to_usize(range.start)..).unwrap_or_default();
                for (byte, &own) in chunk.iter_mut().zip(header) {
                    *byte = own;
                }
                let mut filled = to_u64(header.len()).min(range.end - range.start);
                let own = work.sources.get(write.sources.clone()).ok_or_else(missing)?;
                let memory = sources.get(write.sources.start - first_source..).ok_or_else(missing)?;
                let skipped = own.partition_point(|source| self.plan.file_range(source).end <= range.start);
                for (source, extent) in own.iter().zip(memory).skip(skipped) {
                    if self.plan.file_range(source).start >= range.end {
                        break;
                    }
                    if extent.length != source.local.end - source.local.start {
                        return Err(Error::new(Kind::Internal, format!("{extent:?} for {source:?}")));
                    }
                    let mut result = Ok(());
                    self.plan.for_each_piece(source, &range, |piece, offset| {
                        let length = piece.end - piece.start;
                        let address = extent.address + offset;
                        filled += length;
                        if result.is_ok() {
                            result = pieces.add(extent.device, address, piece.start - range.start, length);
                        }
                    });
                    result?;
                }
                if filled == range.end - range.start {
                    return Ok(());
                }
                let message = "the ranks do not hold each byte of the tensor once; check the index regions";
                let error = Error::new(Kind::InvalidArgument, message).offset(range.start).at(file.path());
                Err(target.name_tensor(error))
            })?;
            if let Some(digester) = self.digesters.get(write.file).and_then(Option::as_ref) {
                let length = to_usize(range.end - range.start);
                let bytes = slot.bytes_mut().get(..length).unwrap_or_default();
                digester.add(range.start, bytes, &|| watch.check())?;
                if range.start < to_u64(layout.header().len()) {
                    digester.keep(range.start, slot.bytes_mut().get(..padded).unwrap_or_default());
                    return Ok(());
                }
            }
            target.write(padded, || file.write(slot, padded, range.start, &|| watch.check()))
        })
    }

    /// Returns the hashes of what the rank has written of files with digests, for [`seal`](RankSave::seal). Empty if no file
    /// has digests.
    ///
    /// # Errors
    /// `internal` if bytes of the rank were not written.
    pub fn hashes(&self) -> Result<Vec<u8>> {
        let mut encoded = Vec::new();
        for (file, digester) in self.digesters.iter().enumerate() {
            if let Some(digester) = digester {
                encoded.extend(to_u64(file).to_le_bytes());
                digester.encode(&mut encoded)?;
            }
        }
        Ok(encoded)
    }

    /// Writes the headers of files with digests, given the hashes of all other ranks, one after the other. Only the first rank does so.
    ///
    /// # Errors
    /// `internal` if hashes are missing; `io`, `interrupted`.
    pub fn seal(&mut self, hashes: &[u8]) -> Result<()> {
        let misfit = || Error::new(Kind::Internal, "the hashes of another rank are incomplete");
        let watch = Watch::begin();
        let mut encoded = hashes;
        while let Some((file, rest)) = encoded.split_first_chunk::<8>() {
            encoded = rest;
            let digester = self.digesters.get(to_usize(u64::from_le_bytes(*file))).and_then(Option::as_ref);
            digester.ok_or_else(misfit)?.add_encoded(&mut encoded)?;
        }
        for (number, digester) in self.digesters.iter_mut().enumerate() {
            let Some(digester) = digester.take() else { continue };
            let (layout, file) = (self.plan.file(number), self.files.get(number).and_then(Option::as_ref));
            let (layout, file) = layout.zip(file).ok_or_else(misfit)?;
            for (first, chunk) in digester.seal(layout)? {
                let length = chunk.len();
                let _span = profile::span(Stage::Write).bytes(length);
                file.write(chunk, length, first, &|| watch.check())?;
            }
        }
        Ok(())
    }

    /// Sets the length of the files whose end the rank has written, and flushes what it has written. Returns the parts of
    /// objects that it has sent.
    ///
    /// # Errors
    /// `io`, `interrupted`.
    pub fn finish(self) -> Result<Vec<SentPart>> {
        let watch = Watch::begin();
        let mut ends = vec![None; self.files.len()];
        for write in self.work.windows.iter().flat_map(|window| &window.writes) {
            let file_bytes = self.plan.file(write.file).map(|layout| layout.file_bytes());
            if let Some(end) = ends.get_mut(write.file).filter(|_| file_bytes == Some(write.range.end)) {
                *end = file_bytes;
            }
        }
        let _span = profile::span(Stage::Flush);
        let mut parts = Vec::new();
        for (number, (file, end)) in self.files.iter().zip(ends).enumerate() {
            let sent = file.as_ref().map_or_else(|| Ok(Vec::new()), |file| file.finish(end, &|| watch.check()))?;
            parts.extend(sent.into_iter().map(|(index, id)| SentPart { file: number, index, id }));
        }
        Ok(parts)
    }
}
