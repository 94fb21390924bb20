//! Reads bytes only to compare their digests, through the page cache, where the load finds them next.
//!
//! Loads into existing tensors use it, since they must not write before all digests are compared, and loads of mapped
//! files, whose bytes are not read otherwise. Cached bytes are hashed in a mapping, under a read lease. System calls read
//! all other bytes, since an access to a mapped file that became shorter would end the process.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::TensorRegion;
use crate::checkpoint::verify::{Compared, Coverage, Input, check_length, digest_of, resolve_listed};
use crate::digest::InputDigest;
use crate::digest::manifest::Manifest;
use crate::error::{Error, Kind, Result};
use crate::load::verifier::HashedInput;
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::os::mutex::Mutex;
use crate::os::sigint::Watch;
use crate::os::threads;
use crate::plan::Read;
use crate::reader::{self, Reader, page_cache};
use crate::remote::find::name::Name;
use crate::source::files::{place_below, place_of};
use crate::source::{Place, Source};
use std::cmp::Reverse;
use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::mpsc::{self, SyncSender};
use std::thread;

/// Number of bytes after which a job ends, if the order of the bytes allows it.
const JOB_BYTES: u64 = 4 << 20;
/// Number of bytes that a job reads at once. They stay in the cache of the core that hashes them.
const BLOCK_BYTES: u64 = 512 << 10;
/// Number of cached bytes that are hashed in place under one lease. A process that opens the file for writing waits so
/// long.
const LEASED_BYTES: u64 = 2 << 20;
/// Number of threads for objects, which wait most of the time.
const REMOTE_THREADS: usize = 32;

/// Number of files that are open at once if they are read only to compare or sign them. A process may usually have 1,024
/// open files, and a copy of an object in the cache takes up to three.
pub(super) const FILES_OPEN_MAX: usize = 128;

/// Contiguous bytes of a file, and the inputs to which they belong.
struct Job<'a> {
    bytes: Range<u64>,
    source: usize,
    inputs: Range<usize>,
    /// Tensor with the bytes, if they are decrypted and belong to no input.
    encrypted: Option<&'a str>,
}

/// Compares the digests of whole tensors or files among the regions. Groups are compared when the load reads them.
/// Fails with `integrity` for the first difference.
pub fn check_regions(checkpoint: &Checkpoint, regions: &[TensorRegion], options: &Options) -> Result<()> {
    let Some(Coverage { inputs, .. }) = checkpoint.coverage(regions)? else { return Ok(()) };
    let sources: Vec<Source> = checkpoint.sources().cloned().collect();
    first(differences(&sources, inputs, options)?)
}

/// Reads one of several equal parts of everything that has a digest, and compares the digests. If all files are
/// compared, it also compares the authentication codes of encrypted ones, which loads compare in any case. Fails with
/// `integrity` for the first difference.
pub fn check_part(
    checkpoint: &Checkpoint,
    compared: Compared,
    part: usize,
    parts: usize,
    options: &Options,
) -> Result<()> {
    checkpoint.check_headers(0..checkpoint.sources().len())?;
    let mut inputs = checkpoint.inputs(compared);
    let hashed = inputs.iter().filter(|input| input.tensor.is_some()).map(|input| input.source).collect();
    let total_bytes: u64 = inputs.iter().map(|input| input.end - input.begin).sum();
    let (begin, end) = (part_begin(total_bytes, part, parts), part_begin(total_bytes, part.saturating_add(1), parts));
    let mut at: u64 = 0;
    inputs.retain(|input| {
        let is_own = (begin..end).contains(&at) || (at >= total_bytes && end >= total_bytes);
        at = at.saturating_add(input.end - input.begin);
        is_own
    });
    // Digests of encrypted files cover the files as stored, and hashes of tensors the decrypted data.
    let sources: Vec<Source> = checkpoint.sources().map(Source::stored).cloned().collect();
    let count = sources.len();
    for input in inputs.iter_mut().filter(|input| input.tensor.is_some()) {
        input.source += if checkpoint.source(input.source)?.is_encrypted() { count } else { 0 };
    }
    let encrypted = match compared {
        Compared::All => encrypted_jobs(checkpoint, count, &hashed),
        Compared::WithoutGroups | Compared::WholeFiles => Vec::new(),
    };
    let encrypted = encrypted.into_iter().skip(part).step_by(parts.max(1)).collect();
    let sources: Vec<Source> = sources.into_iter().chain(checkpoint.sources().cloned()).collect();
    first(run(&sources, inputs, encrypted, options)?)
}

/// Divides the data of encrypted files into jobs, but of those in `hashed`, whose tensors are decrypted to be hashed.
/// `first_source` is the index of the first file among the sources.
fn encrypted_jobs<'a>(checkpoint: &'a Checkpoint, first_source: usize, hashed: &HashSet<usize>) -> Vec<Job<'a>> {
    let mut jobs = Vec::new();
    for (index, entry) in checkpoint.entries() {
        if hashed.contains(&index) || !checkpoint.source(index).is_ok_and(Source::is_encrypted) {
            continue;
        }
        let mut begin = entry.begin;
        while begin < entry.end {
            // A multiple of the chunks that fst and tensorizer write.
            let end = entry.end.min(begin.saturating_add(JOB_BYTES));
            let (source, encrypted) = (first_source + index, Some(entry.name));
            jobs.push(Job { bytes: begin..end, source, inputs: 0..0, encrypted });
            begin = end;
        }
    }
    jobs
}

/// Compares files of which loads do not see all bytes with their digests in a manifest, before they are loaded.
pub fn check_due(checkpoint: &Checkpoint, options: &Options) -> Result<()> {
    if checkpoint.is_due() { check_whole_files(checkpoint, options) } else { Ok(()) }
}

/// Compares files that have one digest of all their bytes, so that loads of any part compare none.
pub fn check_whole_files(checkpoint: &Checkpoint, options: &Options) -> Result<()> {
    if !checkpoint.is_verified(Compared::WholeFiles) {
        check_part(checkpoint, Compared::WholeFiles, 0, 1, options)?;
        checkpoint.set_verified(Compared::WholeFiles);
    }
    Ok(())
}

/// Compares the files that `paths` resolve to with a manifest. Opens no header, and so needs no key. Fails with
/// `integrity` for the first difference, or a file that the manifest lacks.
pub fn check_files<P: AsRef<Path>>(paths: &[P], manifest: &Manifest, options: &Options) -> Result<()> {
    let watch = Watch::begin();
    let places = resolve_listed(paths, manifest, &|| watch.check())?.places;
    check_places(&places, |_, source| digest_of(source, manifest), manifest.origin(), options)
}

/// Compares whole files with their digests, which `digest` returns for an index and the open file.
fn check_places(
    places: &[Place],
    digest: impl Fn(usize, &Source) -> Result<InputDigest>,
    origin: &'static str,
    options: &Options,
) -> Result<()> {
    let watch = Watch::begin();
    let open = |index: usize, place: &Place| {
        let source = Source::open(place, &|| watch.check())?;
        digest(index, &source).map(|digest| (source, digest))
    };
    let places: Vec<_> = places.iter().enumerate().collect();
    // A file that is missing or was cut off is an error before others are hashed.
    for &(index, place) in places.iter().filter(|(_, place)| matches!(place, Place::Path(_))) {
        open(index, place)?;
    }
    let mut found = Vec::new();
    for some in places.chunks(FILES_OPEN_MAX) {
        let (mut sources, mut inputs) = (Vec::new(), Vec::new());
        for &(index, place) in some {
            let (source, digest) = open(index, place)?;
            inputs.push(Input::of_file(sources.len(), &source, digest, origin));
            sources.push(source);
        }
        found.extend(differences(&sources, inputs, options)?);
    }
    first(found)
}

/// Returns where a part begins, if `total` is divided into equal parts.
fn part_begin(total: u64, part: usize, parts: usize) -> u64 {
    let begin = u128::from(total) * u128::from(to_u64(part)) / u128::from(to_u64(parts.max(1)));
    u64::try_from(begin).unwrap_or(u64::MAX)
}

/// Compares every file of a manifest, below a directory or the URL of one. Fails with `integrity` for the first
/// difference.
pub fn check_manifest(manifest: &Manifest, directory: &Path, options: &Options) -> Result<()> {
    // The only file of a signature may have no name.
    let place = |name: &str| match Name::parse(name) {
        _ if name.is_empty() => place_of(directory),
        Ok(name) => place_below(directory, &name),
        Err(why) => Err(Error::new(Kind::Malformed, format!("{} lists {name:?}, but {why}", manifest.origin()))),
    };
    let places = manifest.entries().map(|(name, _)| place(name)).collect::<Result<Vec<_>>>()?;
    let digests: Vec<&InputDigest> = manifest.entries().map(|(_, digest)| digest).collect();
    let digest = |index: usize, source: &Source| {
        let digest = digests.get(index).copied().ok_or_else(|| Error::new(Kind::Internal, "no such file"))?;
        check_length(digest, source.path(), source.length(), manifest.origin())?;
        Ok(digest.clone())
    };
    check_places(&places, digest, manifest.origin(), options)
}

/// Fails with the first of the differences.
pub(super) fn first(differences: Vec<Error>) -> Result<()> {
    let more = differences.len().saturating_sub(1);
    match differences.into_iter().next() {
        None => Ok(()),
        Some(error) if more == 0 => Err(error),
        Some(error) => Err(error.note(&format!("{more} more digests differ"))),
    }
}

/// Returns an error for each input whose digest differs, in the order of the files.
pub fn differences(sources: &[Source], inputs: Vec<Input>, options: &Options) -> Result<Vec<Error>> {
    run(sources, inputs, Vec::new(), options)
}

/// Does what [`differences`] does, and returns an error for each encrypted job whose bytes are not authentic.
fn run(sources: &[Source], mut inputs: Vec<Input>, encrypted: Vec<Job<'_>>, options: &Options) -> Result<Vec<Error>> {
    let watch = Watch::begin();
    let check = || watch.check();
    inputs.sort_by_key(|input| (input.source, input.begin, input.end));
    inputs.dedup_by_key(|input| (input.source, input.begin, input.end));
    let differences = Mutex::new(Vec::new());
    let keep = |source: usize, error: Error| match error.kind() {
        Kind::Integrity => {
            differences.lock().push((source, error));
            Ok(())
        }
        _ => Err(error),
    };
    let mut hashed = Vec::with_capacity(inputs.len());
    for input in inputs {
        let source = input.source;
        match HashedInput::begin(input) {
            Ok(input) => hashed.push(input),
            Err(error) => keep(source, error)?,
        }
    }
    let mut jobs: Vec<Job<'_>> = jobs(&hashed).into_iter().chain(encrypted).collect();
    // A thread that begins a long job last would work alone.
    jobs.sort_by_key(|job| Reverse(job.bytes.end - job.bytes.start));
    let mut source_bytes = vec![0; sources.len()];
    for job in &jobs {
        source_bytes.get_mut(job.source).into_iter().for_each(|bytes| *bytes += job.bytes.end - job.bytes.start);
    }
    // A lease needs a second open file, and a mapping.
    let open = |(source, bytes)| match sources.len() <= FILES_OPEN_MAX && bytes >= JOB_BYTES {
        true => reader::open_lending(options, source),
        false => reader::open_buffered(options, source),
    };
    let readers: Vec<_> = sources.iter().zip(source_bytes).map(open).collect();
    let is_remote = sources.iter().any(Source::is_remote);
    let buffers: Mutex<Vec<Vec<u8>>> = Mutex::default();
    let threads = if is_remote { options.threads.max(REMOTE_THREADS) } else { options.threads };
    let has_idle_threads = jobs.len() < options.threads;
    threads::for_each(threads, jobs.len(), |index| {
        let Some(job) = jobs.get(index) else { return Ok(()) };
        let missing = || Error::new(Kind::Internal, "no such file");
        let reader = readers.get(job.source).ok_or_else(missing)?;
        let source = sources.get(job.source).ok_or_else(missing)?;
        let file = source.file();
        let hash = |at: u64, block: &[u8]| {
            let end = at.saturating_add(to_u64(block.len()));
            for input in hashed.get(job.inputs.clone()).unwrap_or_default() {
                let (first, last) = (input.input.begin.max(at), input.input.end.min(end));
                if first < last {
                    let bytes = block.get(to_usize(first - at)..to_usize(last - at)).unwrap_or_default();
                    input.add(first, bytes, &check).or_else(|error| keep(job.source, error))?;
                }
            }
            Ok(())
        };
        let hash_job = |ahead: Option<SyncSender<Range<u64>>>| {
            let kept = buffers.lock().pop();
            let mut buffer = kept.unwrap_or_default();
            // Whole chunks are decrypted.
            let block_bytes = if source.is_encrypted() { JOB_BYTES } else { BLOCK_BYTES };
            let (mut at, mut is_lent) = (job.bytes.start, false);
            while at < job.bytes.end {
                check()?;
                let leased = at..job.bytes.end.min(at.saturating_add(LEASED_BYTES));
                // Pages that are not lent would stay in this process. A thread that is still busy leaves a range out.
                if let Some(ahead) = ahead.as_ref().filter(|_| is_lent) {
                    let _ = ahead.try_send(leased.end..job.bytes.end.min(leased.end.saturating_add(LEASED_BYTES)));
                }
                is_lent = false;
                if file.is_some_and(|file| page_cache::is_all_cached(file, &leased)) {
                    let read = Read { offset: at, slot_begin: 0, length: to_usize(leased.end - at) };
                    is_lent = reader.lend(&read, &mut |bytes| hash(at, bytes))?;
                    if is_lent {
                        at = leased.end;
                        continue;
                    }
                }
                let end = job.bytes.end.min(at.saturating_add(block_bytes));
                buffer.resize(to_usize(end - at).max(buffer.len()), 0);
                let block = buffer.get_mut(..to_usize(end - at)).unwrap_or_default();
                if let Err(error) = reader.read(at, block, &check) {
                    // A job may have several tensors.
                    let position = error.position().unwrap_or(at);
                    let mut inputs = hashed.get(job.inputs.clone()).unwrap_or_default().iter();
                    let input = inputs.find(|hashed| position < hashed.input.end);
                    let tensor = job.encrypted.or(input.and_then(|hashed| hashed.input.tensor.as_deref()));
                    return keep(job.source, if let Some(name) = tensor { error.tensor(name) } else { error });
                }
                hash(at, block)?;
                at = end;
            }
            buffers.lock().push(buffer);
            Ok(())
        };
        if has_idle_threads && file.is_some() { with_look_ups(reader.as_ref(), hash_job) } else { hash_job(None) }
    })?;
    let mut differences = differences.into_inner();
    differences.sort_by_key(|(source, error)| (*source, error.position()));
    Ok(differences.into_iter().map(|(_, error)| error).collect())
}

/// Runs `work` beside a thread that makes the ranges present which `work` sends to it, so that `work` meets no page fault.
fn with_look_ups(reader: &dyn Reader, work: impl FnOnce(Option<SyncSender<Range<u64>>>) -> Result<()>) -> Result<()> {
    let (sender, ranges) = mpsc::sync_channel(1);
    thread::scope(|scope| {
        let run = move || ranges.into_iter().for_each(|range| reader.look_up(&range));
        match thread::Builder::new().name("fst look-up".into()).spawn_scoped(scope, run) {
            Ok(_) => work(Some(sender)),
            Err(error) => {
                tracing::debug!(%error, "no thread makes pages present ahead");
                work(None)
            }
        }
    })
}

/// Divides sorted, disjoint inputs into jobs. A sequential shard has one job, so that no thread waits for another.
fn jobs(inputs: &[HashedInput]) -> Vec<Job<'static>> {
    let mut jobs: Vec<Job<'static>> = Vec::new();
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
                jobs.push(Job { bytes: begin..begin, source: input.source, inputs: index..index, encrypted: None });
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
