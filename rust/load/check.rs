//! Reads bytes only to compare their digests, through the page cache, where the load finds them next.
//!
//! Loads into existing tensors use it, since they must not write before all digests are compared, and loads of mapped
//! files, whose bytes are not read otherwise. System calls read the bytes, since an access to a mapped file that became
//! shorter would end the process.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::TensorRegion;
use crate::checkpoint::verify::{Compared, Coverage, Input, check_length, digest_of};
use crate::digest::manifest::Manifest;
use crate::error::{Error, Kind, Result};
use crate::format::header::Entry;
use crate::load::verifier::HashedInput;
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::os::sigint::Watch;
use crate::os::threads;
use crate::reader;
use crate::source::Source;
use crate::source::files::{Files, place_of};
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Number of bytes after which a job ends, if the order of the bytes allows it.
const JOB_BYTES: u64 = 4 << 20;
/// Number of bytes that a job reads at once. They stay in the cache of the core that hashes them.
const BLOCK_BYTES: u64 = 512 << 10;
/// Number of threads for objects, which wait most of the time.
const REMOTE_THREADS: usize = 32;

/// Contiguous bytes of a file, and the inputs to which they belong.
struct Job {
    bytes: Range<u64>,
    source: usize,
    inputs: Range<usize>,
}

/// Compares the digests of whole tensors or files among the regions. Groups are compared when the load reads them.
///
/// # Errors
/// `integrity` for the first difference; `io`, `interrupted`.
pub fn check_regions(checkpoint: &Checkpoint, regions: &[TensorRegion], options: &Options) -> Result<()> {
    let Some(Coverage { inputs, .. }) = checkpoint.coverage(regions) else { return Ok(()) };
    let sources: Vec<Source> = checkpoint.sources().cloned().collect();
    first(differences(&sources, inputs, options)?)
}

/// Reads one of several equal parts of everything that has a digest, and compares the digests. If all files are compared,
/// it also compares the authentication codes of encrypted ones, which loads compare in any case.
///
/// # Errors
/// `integrity` for the first difference; `io`, `interrupted`.
pub fn check_part(
    checkpoint: &Checkpoint,
    compared: Compared,
    part: usize,
    parts: usize,
    options: &Options,
) -> Result<()> {
    checkpoint.check_headers(0..checkpoint.sources().len())?;
    let mut inputs = checkpoint.inputs(compared);
    let total_bytes: u64 = inputs.iter().map(|input| input.end - input.begin).sum();
    let (begin, end) = (part_begin(total_bytes, part, parts), part_begin(total_bytes, part.saturating_add(1), parts));
    let mut at: u64 = 0;
    inputs.retain(|input| {
        let is_own = (begin..end).contains(&at) || (at >= total_bytes && end >= total_bytes);
        at = at.saturating_add(input.end - input.begin);
        is_own
    });
    // Digests of encrypted files are those of the files as they are stored.
    let sources: Vec<Source> = checkpoint.sources().map(Source::stored).cloned().collect();
    first(differences(&sources, inputs, options)?)?;
    match compared {
        Compared::All => first(changed_chunks(checkpoint, part, parts, options)?),
        Compared::WithoutGroups => Ok(()),
    }
}

/// Decrypts one of several parts of all encrypted files. Returns an error for each piece of a tensor that is not authentic.
fn changed_chunks(checkpoint: &Checkpoint, part: usize, parts: usize, options: &Options) -> Result<Vec<Error>> {
    let mut jobs: Vec<Vec<(usize, Entry<'_>, Range<u64>)>> = Vec::new();
    let mut job_bytes = JOB_BYTES;
    for (index, entry) in checkpoint.entries() {
        if !checkpoint.source(index)?.is_encrypted() {
            continue;
        }
        let mut begin = entry.begin;
        while begin < entry.end {
            // A multiple of the chunks that fst and tensorizer write.
            let end = entry.end.min(begin.saturating_add(JOB_BYTES));
            if job_bytes.saturating_add(end - begin) > JOB_BYTES {
                jobs.push(Vec::new());
                job_bytes = 0;
            }
            job_bytes = job_bytes.saturating_add(end - begin);
            if let Some(job) = jobs.last_mut() {
                job.push((index, entry, begin..end));
            }
            begin = end;
        }
    }
    let own: Vec<_> = jobs.into_iter().skip(part).step_by(parts.max(1)).collect();
    let readers: Vec<_> = checkpoint.sources().map(|source| reader::open_buffered(options, source)).collect();
    let changed = Mutex::new(Vec::new());
    let watch = Watch::begin();
    let is_remote = checkpoint.sources().any(Source::is_remote);
    threads::for_each(thread_count(is_remote, options), own.len(), |index| {
        let mut block = Vec::new();
        for (source, entry, bytes) in own.get(index).into_iter().flatten() {
            let reader = readers.get(*source).ok_or_else(|| Error::new(Kind::Internal, "no such file"))?;
            block.resize(to_usize(bytes.end - bytes.start), 0);
            match reader.read(bytes.start, &mut block, &|| watch.check()) {
                Err(error) if error.kind() == Kind::Integrity => {
                    let place = (*source, bytes.start);
                    changed.lock().unwrap_or_else(PoisonError::into_inner).push((place, error.tensor(entry.name)));
                }
                result => result.map_err(|error| error.tensor(entry.name))?,
            }
        }
        Ok(())
    })?;
    let mut changed = changed.into_inner().unwrap_or_else(PoisonError::into_inner);
    changed.sort_by_key(|(place, _)| *place);
    Ok(changed.into_iter().map(|(_, error)| error).collect())
}

/// Returns the number of threads that read.
fn thread_count(is_remote: bool, options: &Options) -> usize {
    if is_remote { options.threads.max(REMOTE_THREADS) } else { options.threads }
}

/// Compares files of which loads do not see all bytes with their digests in a manifest, before they are loaded.
///
/// # Errors
/// Those of [`check_part`].
pub fn check_due(checkpoint: &Checkpoint, options: &Options) -> Result<()> {
    if checkpoint.is_due() {
        check_part(checkpoint, Compared::WithoutGroups, 0, 1, options)?;
        checkpoint.set_verified(Compared::WithoutGroups);
    }
    Ok(())
}

/// Compares the files that `paths` resolve to with a manifest. Opens no header, and so needs no key.
///
/// # Errors
/// `integrity` for the first difference, or a file that the manifest lacks; those of opening the files; `io`,
/// `interrupted`.
pub fn check_files<P: AsRef<Path>>(paths: &[P], manifest: &Manifest, options: &Options) -> Result<()> {
    let watch = Watch::begin();
    let places = Files::resolve(paths, &|| watch.check())?.places;
    let sources = places.iter().map(|place| Source::open(place, &|| watch.check())).collect::<Result<Vec<_>>>()?;
    let input = |(index, source): (usize, &Source)| {
        Ok(Input::of_file(index, source, digest_of(source, manifest)?, manifest.origin()))
    };
    let inputs = sources.iter().enumerate().map(input).collect::<Result<_>>()?;
    first(differences(&sources, inputs, options)?)
}

/// Returns where a part begins, if `total` is divided into equal parts.
fn part_begin(total: u64, part: usize, parts: usize) -> u64 {
    let begin = u128::from(total) * u128::from(to_u64(part)) / u128::from(to_u64(parts.max(1)));
    u64::try_from(begin).unwrap_or(u64::MAX)
}

/// Compares every file of a manifest, below a directory or the URL of one.
///
/// # Errors
/// `integrity` for the first difference; those of opening the files; `io`, `interrupted`.
pub fn check_manifest(manifest: &Manifest, directory: &Path, options: &Options) -> Result<()> {
    let watch = Watch::begin();
    let mut sources = Vec::new();
    let mut inputs = Vec::new();
    for (name, digest) in manifest.entries() {
        // The only file of a signature may have no name.
        let path = if name.is_empty() { directory.to_path_buf() } else { directory.join(name) };
        let source = Source::open(&place_of(&path)?, &|| watch.check())?;
        check_length(digest, &source, manifest.origin())?;
        inputs.push(Input::of_file(sources.len(), &source, digest.clone(), manifest.origin()));
        sources.push(source);
    }
    first(differences(&sources, inputs, options)?)
}

/// Fails with the first of the differences.
///
/// # Errors
/// `integrity`.
pub(super) fn first(differences: Vec<Error>) -> Result<()> {
    let more = differences.len().saturating_sub(1);
    match differences.into_iter().next() {
        None => Ok(()),
        Some(error) if more == 0 => Err(error),
        Some(error) => Err(error.note(&format!("{more} more digests differ"))),
    }
}

/// Returns an error for each input whose digest differs, in the order of the files.
///
/// # Errors
/// `io`, `interrupted`.
pub fn differences(sources: &[Source], mut inputs: Vec<Input>, options: &Options) -> Result<Vec<Error>> {
    let watch = Watch::begin();
    let check = || watch.check();
    inputs.sort_by_key(|input| (input.source, input.begin, input.end));
    inputs.dedup_by_key(|input| (input.source, input.begin, input.end));
    let differences = Mutex::new(Vec::new());
    let keep = |error: Error| match error.kind() {
        Kind::Integrity => {
            differences.lock().unwrap_or_else(PoisonError::into_inner).push(error);
            Ok(())
        }
        _ => Err(error),
    };
    let mut hashed = Vec::with_capacity(inputs.len());
    for input in inputs {
        match HashedInput::begin(input) {
            Ok(input) => hashed.push(input),
            Err(error) => keep(error)?,
        }
    }
    let jobs = jobs(&hashed);
    let readers: Vec<_> = sources.iter().map(|source| reader::open_buffered(options, source)).collect();
    let is_remote = sources.iter().any(Source::is_remote);
    let buffers: Mutex<Vec<Vec<u8>>> = Mutex::default();
    threads::for_each(thread_count(is_remote, options), jobs.len(), |index| {
        let Some(job) = jobs.get(index) else { return Ok(()) };
        let reader = readers.get(job.source).ok_or_else(|| Error::new(Kind::Internal, "no such file"))?;
        let kept = buffers.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffer = kept.unwrap_or_else(|| vec![0; to_usize(BLOCK_BYTES)]);
        let mut at = job.bytes.start;
        while at < job.bytes.end {
            check()?;
            let end = job.bytes.end.min(at.saturating_add(BLOCK_BYTES));
            let block = buffer.get_mut(..to_usize(end - at)).unwrap_or_default();
            reader.read(at, block, &check)?;
            for input in hashed.get(job.inputs.clone()).unwrap_or_default() {
                let (first, last) = (input.input.begin.max(at), input.input.end.min(end));
                if first < last {
                    let bytes = block.get(to_usize(first - at)..to_usize(last - at)).unwrap_or_default();
                    input.add(first, bytes, &check).or_else(keep)?;
                }
            }
            at = end;
        }
        buffers.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
        Ok(())
    })?;
    let mut differences = differences.into_inner().unwrap_or_else(PoisonError::into_inner);
    differences.sort_by_key(|error| error.to_string());
    Ok(differences)
}

/// Divides sorted, disjoint inputs into jobs. A sequential shard has one job, so that no thread waits for another.
fn jobs(inputs: &[HashedInput]) -> Vec<Job> {
    let mut jobs: Vec<Job> = Vec::new();
    for (index, hashed) in inputs.iter().enumerate() {
        let input = &hashed.input;
        let mut begin = input.begin.saturating_add(to_u64(input.header.len()));
        while begin < input.end {
            let room = match jobs.last_mut() {
                Some(job) if (job.source, job.bytes.end) == (input.source, begin) => {
                    JOB_BYTES.saturating_sub(job.bytes.end - job.bytes.start)
                }
                _ => 0,
            };
            if room == 0 {
                jobs.push(Job { bytes: begin..begin, source: input.source, inputs: index..index });
            }
            let Some(job) = jobs.last_mut() else { break };
            let bytes = if room == 0 { JOB_BYTES } else { room };
            let shard = hashed.shard_end(begin);
            let end = if input.digest.is_sequential() { shard } else { shard.min(begin.saturating_add(bytes)) };
            job.bytes.end = end;
            job.inputs.end = index + 1;
            begin = end;
        }
    }
    jobs
}
