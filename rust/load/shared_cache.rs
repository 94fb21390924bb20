//! Bytes of a checkpoint that several processes read, of files in one page cache or of objects: their identity, and copies
//! from the cache.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::TensorRegion;
use crate::digest::Algorithm;
use crate::error::{Error, Result};
use crate::options::{Options, ReaderChoice, cores};
use crate::plan::GAP_BYTES;
use crate::reader::lease::LeaseReader;
use crate::reader::{self, Access, ReaderKind, page_cache, read_ahead};
use crate::source::Source;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// Largest chunk of cached bytes that are read into slots. Slots of this size stay in the cache of a core, and are quickly
/// present in the first load of a process. Of a disk, larger chunks are read faster, and bytes under a lease need no slot.
const CACHED_CHUNK_BYTES: usize = 256 << 10;

/// Changes with each boot of the kernel. It is equal in all containers on a machine.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Returns a name for the copy of the checkpoint that this process reads. It is equal in two processes if they read the
/// same bytes: of the same local files through one kernel, or of the same versions of objects.
///
/// Returns `None` if a local file cannot be told from one of another machine.
pub fn copy_name(checkpoint: &Checkpoint) -> Result<Option<String>> {
    let boot_id = fs::read_to_string(BOOT_ID).ok();
    let mut text = String::new();
    for source in checkpoint.sources().map(Source::stored) {
        let local = match source {
            Source::Object(object) => {
                let _ = writeln!(text, "{} {:?}", source.path().display(), object.version());
                object.copy_file()
            }
            _ => source.file().map(|file| &file.file),
        };
        if let Some(file) = local {
            let Some(boot_id) = &boot_id else { return Ok(None) };
            let _ = writeln!(text, "{} {}", boot_id.trim(), inode(file, source.path())?);
        }
    }
    Ok(Some(Algorithm::Blake3.digest(text.as_bytes()).hex()))
}

/// Returns the [`copy_name`] of files that a load to the CPU maps, and so takes from the page cache.
///
/// Returns `None` if a load would not map the files: they may not stay in the page cache, or this machine may not have
/// them alone.
pub fn name(checkpoint: &Checkpoint, options: &Options) -> Result<Option<String>> {
    for source in checkpoint.sources() {
        if reader::choose(options, source, Access::View)?.kind != ReaderKind::Mmap {
            return Ok(None);
        }
    }
    copy_name(checkpoint)
}

/// Prepares a load that copies files from the page cache, as all `ranks` of this machine do, and returns its options.
///
/// Starts to read the files ahead if the load cannot copy out of a mapping, whose faults the kernel reads ahead of.
pub fn prepare(checkpoint: &Checkpoint, regions: &Arc<[TensorRegion]>, ranks: usize, options: Options) -> Options {
    let files = || checkpoint.sources().filter_map(Source::file);
    let is_cached = files().all(|file| page_cache::is_mostly_cached(file));
    // To copy takes a core. Threads that wait for a disk do not.
    let threads = if is_cached { options.threads.min((cores() / ranks).max(1)) } else { options.threads };
    let is_leased = files().take(1).all(|file| LeaseReader::open(file).is_ok());
    if !is_leased {
        read_ahead(checkpoint, regions);
    }
    let has_small_slots = is_cached && !is_leased;
    let chunk_bytes = if has_small_slots { options.chunk_bytes.min(CACHED_CHUNK_BYTES) } else { options.chunk_bytes };
    Options { reader: ReaderChoice::Lease, chunk_bytes, threads, ..options }
}

/// Starts to read what a load copies from the page cache, so that several processes that copy parts of the same rows read
/// them from the disk once, and in large requests. Rows that are far apart are left to the load.
pub fn read_ahead(checkpoint: &Checkpoint, regions: &Arc<[TensorRegion]>) {
    let mut ranges: BTreeMap<usize, Vec<Range<u64>>> = BTreeMap::new();
    for TensorRegion { source, range: rows, .. } in regions.iter() {
        let hull = rows.begin..rows.end();
        let gaps_bytes = (hull.end - hull.start).saturating_sub(rows.bytes());
        // The kernel reads ahead of rows without gaps by itself.
        if gaps_bytes > 0 && gaps_bytes / rows.rows() <= GAP_BYTES {
            ranges.entry(*source).or_default().push(hull);
        }
    }
    for (index, source) in checkpoint.sources().enumerate() {
        if let (Source::File(file), Some(mut ranges)) = (source, ranges.remove(&index)) {
            ranges.sort_by_key(|range| range.start);
            read_ahead::start(file, regions, ranges.into_iter(), false);
        }
    }
}

fn inode(file: &File, path: &Path) -> Result<String> {
    let metadata = file.metadata().map_err(|error| Error::from_io(error, path, "cannot examine"))?;
    Ok(format!("{}:{}", metadata.dev(), metadata.ino()))
}
