//! Copies that lack some bytes.

use super::ranges::{RANGE_BYTES, Ranges};
use super::{Cache, Entry, FILE_MODE, OBJECT, PART, RANGES, is_same, open_file, use_now};
use crate::num::{to_u64, to_usize};
use crate::os::file_system::{is_unsupported, set_length};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Copy of an object that lacks some bytes.
#[derive(Debug)]
pub(in crate::remote) struct Part {
    cache: Cache,
    entry: Entry,
    data: File,
    ranges: File,
    /// Bytes that were on the disk when the copy was opened.
    known: Ranges,
    length: u64,
    /// Whether the disk has failed. Nothing more is written then.
    has_failed: AtomicBool,
}

impl Part {
    /// Opens a copy that other loads have begun, or completes it if nothing is missing. Returns `None` if there is none
    /// that can be used. The caller holds the lock of the directory.
    pub(super) fn open(cache: &Cache, entry: &Entry, length: u64) -> io::Result<Option<Part>> {
        let open = |options: &mut OpenOptions, ending| open_file(options.read(true), &entry.path(ending));
        let data = open(OpenOptions::new().write(true), PART);
        let (data, ranges) = match (data, open(OpenOptions::new().append(true), RANGES)) {
            (Ok(data), Ok(ranges)) => (data, ranges),
            (Err(error), _) | (_, Err(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            (Err(error), _) | (_, Err(error)) => return Err(error),
        };
        let is_intact = data.metadata()?.len() == length;
        let Some(known) = read_ranges(&ranges, length)?.filter(|_| is_intact) else { return Ok(None) };
        if known.covers(length) {
            // The process that wrote the last range was killed before it could do this.
            complete(&data, entry)?;
            return Ok(None);
        }
        Part::new(cache, entry, data, ranges, known, length).map(Some)
    }

    /// Begins a copy. The caller holds the lock of the directory.
    pub(super) fn create(cache: &Cache, entry: &Entry, length: u64) -> io::Result<Part> {
        let create = |options: &mut OpenOptions, ending| {
            open_file(options.read(true).create_new(true).mode(FILE_MODE), &entry.path(ending))
        };
        let data = create(OpenOptions::new().write(true), PART)?;
        let ranges = create(OpenOptions::new().append(true), RANGES)?;
        set_length(&data, length)?;
        Part::new(cache, entry, data, ranges, Ranges::default(), length)
    }

    /// Returns the file with the bytes. It stays the same when the copy is complete.
    pub(in crate::remote) fn file(&self) -> &File {
        &self.data
    }

    fn new(cache: &Cache, entry: &Entry, data: File, ranges: File, known: Ranges, length: u64) -> io::Result<Part> {
        data.lock_shared()?;
        use_now(&data);
        let (cache, entry) = (cache.clone(), entry.clone());
        Ok(Part { cache, entry, data, ranges, known, length, has_failed: AtomicBool::new(false) })
    }

    pub(super) fn known_bytes(&self) -> u64 {
        self.known.bytes()
    }

    /// Fills as much of `into` as the copy has, and returns the ranges of the object that are missing, with their places.
    pub(in crate::remote) fn read<'a>(&self, offset: u64, into: &'a mut [u8]) -> Vec<(u64, &'a mut [u8])> {
        let mut missing: Vec<(u64, &'a mut [u8])> = Vec::new();
        let (mut rest, mut begin) = (into, offset);
        while !rest.is_empty() {
            let (is_known, end) = self.known.run(begin);
            let bytes = to_usize(end - begin).min(rest.len());
            let (now, later) = rest.split_at_mut(bytes);
            if !is_known {
                missing.push((begin, now));
            } else if let Err(error) = self.data.read_exact_at(now, begin) {
                tracing::warn!(path = %self.path().display(), %error, "cannot read a copy; its bytes are requested");
                missing.push((begin, now));
            }
            begin = begin.saturating_add(to_u64(bytes));
            rest = later;
        }
        missing
    }

    fn path(&self) -> PathBuf {
        self.entry.path(PART)
    }

    /// Returns whether the bytes of a range are to be written: the disk works, and lacked some when the copy was opened.
    pub(super) fn wants(&self, range: &Range<u64>) -> bool {
        let (is_known, end) = self.known.run(range.start);
        !(range.is_empty() || self.has_failed.load(Ordering::Relaxed) || is_known && range.end <= end)
    }

    pub(super) fn fail(&self, error: &io::Error) {
        self.has_failed.store(true, Ordering::Relaxed);
        tracing::warn!(path = %self.path().display(), %error, "cannot write to the cache; the load goes on without it");
    }

    /// Writes bytes, which count once [`keep`](Part::keep) lists them.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.data.write_all_at(bytes, offset)
    }

    /// Flushes what was written, and lists its ranges. Completes the copy if nothing is missing.
    pub(super) fn keep(&self, written: &[Range<u64>]) -> io::Result<()> {
        let flushed = self.data.sync_data();
        flushed.or_else(|error| if is_unsupported(&error) { Ok(()) } else { Err(error) })?;
        let records: Vec<u8> = written.iter().flat_map(Ranges::encode).collect();
        (&self.ranges).write_all(&records)?;
        let known = read_ranges(&self.ranges, self.length)?.unwrap_or_default();
        if known.covers(self.length) {
            let _lock = self.cache.lock()?;
            complete(&self.data, &self.entry)?;
        }
        Ok(())
    }
}

/// Gives a copy that lacks nothing its final name, unless another process has done so or has removed it. The caller holds
/// the lock of the directory.
fn complete(data: &File, entry: &Entry) -> io::Result<()> {
    if is_same(data, &entry.path(PART))? {
        fs::rename(entry.path(PART), entry.path(OBJECT))?;
        fs::remove_file(entry.path(RANGES))?;
    }
    Ok(())
}

fn read_ranges(file: &File, length: u64) -> io::Result<Option<Ranges>> {
    let mut bytes = Vec::new();
    // Each byte of the object adds at most one record.
    let bytes_max = length.saturating_mul(to_u64(RANGE_BYTES));
    let mut file = file.try_clone()?;
    file.rewind()?;
    file.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(Ranges::decode(&bytes, length))
}
