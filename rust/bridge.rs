//! The border to C++: conversions only. C++ asks for a selection, allocates
//! what it describes, and hands addresses to a transfer. Nothing here calls
//! C++ back.

use crate::checkpoint::Checkpoint;
use crate::device::cuda::Cuda;
use crate::device::host::Host;
use crate::error::{Error, Kind, Result};
use crate::load::Transfer;
use crate::options::{self, Options};
use crate::plan::{Destination, Wanted};
use crate::reader::mmap::Mapping;
use crate::reader::{self, ReaderKind, Target, read_ahead};
use crate::source::Source;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

#[cxx::bridge(namespace = "fst")]
mod ffi {
    /// What C++ needs to know of a wanted tensor to make it.
    struct Spec {
        name: String,
        /// The value of `c10::ScalarType`.
        scalar_type: i8,
        is_castable: bool,
        shape: Vec<i64>,
        bytes: u64,
    }

    /// Bytes `begin..end` of the wanted tensor `tensor` go to `address`.
    struct Piece {
        tensor: usize,
        begin: u64,
        end: u64,
        address: u64,
    }

    /// An entry of a file's metadata.
    struct Text {
        key: String,
        value: String,
    }

    extern "Rust" {
        type Checkpoint;
        fn open(paths: &[String]) -> Result<Box<Checkpoint>>;
        fn tensor_names(self: &Checkpoint) -> Vec<String>;
        fn texts(self: &Checkpoint) -> Result<Vec<Text>>;
        fn reader_names(self: &Checkpoint, is_new_host_memory: bool) -> Result<String>;

        type Selection;
        fn select_all(checkpoint: Box<Checkpoint>) -> Result<Box<Selection>>;
        fn select_tensors(checkpoint: Box<Checkpoint>, names: &[String]) -> Result<Box<Selection>>;
        fn select_slices(
            checkpoint: Box<Checkpoint>,
            names: &[String],
            dims: &[i64],
            starts: &[i64],
            lengths: &[i64],
        ) -> Result<Box<Selection>>;
        fn specs(self: &Selection) -> Result<Vec<Spec>>;

        type Views;
        fn views(self: &Selection) -> Result<Box<Views>>;
        fn address(self: &Views, tensor: usize) -> u64;
        fn source(self: &Views, tensor: usize) -> usize;
        fn hold(self: &Views, source: usize) -> Result<Box<Hold>>;
        type Hold;

        type AnyTransfer;
        fn transfer_to_host(self: &Selection) -> Result<Box<AnyTransfer>>;
        fn transfer_to_cuda(self: &Selection, ordinal: i32, stream: u64) -> Result<Box<AnyTransfer>>;
        unsafe fn fill(self: &mut AnyTransfer, pieces: &[Piece]) -> Result<()>;
        fn finish(transfer: Box<AnyTransfer>) -> Result<()>;
    }
}

/// Tensors chosen from a checkpoint.
struct Selection {
    checkpoint: Arc<Checkpoint>,
    wanted: Arc<[Wanted]>,
}

/// Which tensors of a selection are views of a mapped file, and where.
struct Views {
    files: Vec<MappedFile>,
    /// For each tensor its file and its address, zero where it is no view.
    addresses: Vec<(usize, u64)>,
}

/// A file, mapped if any of its tensors is a view.
#[derive(Default)]
struct MappedFile {
    mapping: Option<Arc<Mapping>>,
    views: Vec<(usize, Range<u64>)>,
}

impl MappedFile {
    /// Gives the views their addresses. Bytes that are wanted twice are a view once, since two tensors of which
    /// changing one changed the other would be one tensor; the second is read.
    fn map(&mut self, source: &Arc<Source>, addresses: &mut [(usize, u64)]) -> Result<()> {
        if self.views.is_empty() {
            return Ok(());
        }
        let mapping = Arc::new(Mapping::open(source)?);
        self.views.sort_by_key(|(_, range)| range.start);
        let mut reached = 0;
        self.views.retain(|(_, range)| {
            let is_first = range.start >= reached;
            reached = reached.max(range.end);
            is_first
        });
        for (tensor, range) in &self.views {
            if let (Some(place), Some(address)) = (addresses.get_mut(*tensor), mapping.address(range.start)) {
                place.1 = address;
            }
        }
        read_ahead::start(source, &mapping, self.views.iter().map(|(_, range)| range.clone()));
        self.mapping = Some(mapping);
        Ok(())
    }
}

/// Keeps one file mapped.
struct Hold {
    _mapping: Arc<Mapping>,
}

enum AnyTransfer {
    Host(Transfer<Host>),
    Cuda(Transfer<Cuda>),
}

/// A panic must not reach C++, where it would end the process. There is none that we know of.
fn guard<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Error::new(Kind::Internal, format!("a bug in fst, please report it: {text}")))
    })
}

fn open(paths: &[String]) -> Result<Box<Checkpoint>> {
    guard(|| {
        start_log()?;
        Checkpoint::open(paths).map(Box::new)
    })
}

/// The log goes to stderr, from the first load on. Rust programs install their own subscriber.
fn start_log() -> Result<()> {
    static STARTED: OnceLock<()> = OnceLock::new();
    if STARTED.get().is_none()
        && let Some(level) = options::log_level_from_env()?
    {
        STARTED.get_or_init(|| {
            let subscriber =
                tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).with_ansi(false);
            // Someone else in the process may have installed one, which then gets our events.
            if let Err(error) = subscriber.try_init() {
                tracing::debug!(%error, "the log goes elsewhere");
            }
        });
    }
    Ok(())
}

impl Checkpoint {
    fn tensor_names(&self) -> Vec<String> {
        self.entries().map(|(_, entry)| entry.name.to_string()).collect()
    }

    fn texts(&self) -> Result<Vec<ffi::Text>> {
        let texts = self.metadata()?.iter();
        Ok(texts.map(|(key, value)| ffi::Text { key: key.clone(), value: value.clone() }).collect())
    }

    fn reader_names(&self, is_new_host_memory: bool) -> Result<String> {
        guard(|| {
            let target = if is_new_host_memory { Target::NewHostMemory } else { Target::ExistingMemory };
            let choice = Options::from_env()?.reader;
            let mut names = Vec::new();
            for source in self.sources() {
                let name = reader::choose(choice, source, target)?.to_string();
                if !names.contains(&name) {
                    names.push(name);
                }
            }
            Ok(names.join("+"))
        })
    }
}

fn select(
    checkpoint: Box<Checkpoint>,
    choose: impl FnOnce(&Checkpoint) -> Result<Vec<Wanted>>,
) -> Result<Box<Selection>> {
    guard(|| {
        let wanted = choose(&checkpoint)?.into();
        Ok(Box::new(Selection { checkpoint: Arc::new(*checkpoint), wanted }))
    })
}

fn select_all(checkpoint: Box<Checkpoint>) -> Result<Box<Selection>> {
    select(checkpoint, |checkpoint| {
        checkpoint.entries().map(|(source, entry)| locate(checkpoint, source, Wanted::whole(source, entry))).collect()
    })
}

fn select_tensors(checkpoint: Box<Checkpoint>, names: &[String]) -> Result<Box<Selection>> {
    select(checkpoint, |checkpoint| {
        let whole = |name: &String| {
            let (source, entry) = checkpoint.find(name)?;
            locate(checkpoint, source, Wanted::whole(source, entry))
        };
        names.iter().map(whole).collect()
    })
}

fn select_slices(
    checkpoint: Box<Checkpoint>,
    names: &[String],
    dims: &[i64],
    starts: &[i64],
    lengths: &[i64],
) -> Result<Box<Selection>> {
    select(checkpoint, |checkpoint| {
        let count = names.len();
        if [dims.len(), starts.len(), lengths.len()] != [count; 3] {
            return Err(Error::new(
                Kind::InvalidArgument,
                format!(
                    "{count} names, but {} dims, {} starts and {} lengths; give one of each for every name",
                    dims.len(),
                    starts.len(),
                    lengths.len()
                ),
            ));
        }
        let slices = names.iter().zip(dims).zip(starts).zip(lengths);
        let slice = |(((name, &dim), &start), &length): (((&String, &i64), &i64), &i64)| {
            let (source, entry) = checkpoint.find(name)?;
            locate(checkpoint, source, Wanted::slice(source, entry, dim, start, length))
        };
        slices.map(slice).collect()
    })
}

/// Adds the file's name to an error of the plan, which knows no files.
fn locate(checkpoint: &Checkpoint, source: usize, wanted: Result<Wanted>) -> Result<Wanted> {
    wanted.map_err(|error| match checkpoint.source(source) {
        Ok(source) => error.at(&source.path),
        Err(_) => error,
    })
}

impl Selection {
    fn specs(&self) -> Result<Vec<ffi::Spec>> {
        guard(|| self.wanted.iter().map(spec).collect())
    }

    /// Maps the files whose tensors need no copy on the CPU.
    fn views(&self) -> Result<Box<Views>> {
        guard(|| {
            let choice = Options::from_env()?.reader;
            let sources = self.checkpoint.sources();
            let kinds: Vec<ReaderKind> =
                sources.map(|source| reader::choose(choice, source, Target::NewHostMemory)).collect::<Result<_>>()?;
            let mut files: Vec<MappedFile> = kinds.iter().map(|_| MappedFile::default()).collect();
            for (tensor, wanted) in self.wanted.iter().enumerate() {
                let file = files.get_mut(wanted.source).filter(|_| kinds.get(wanted.source) == Some(&ReaderKind::Mmap));
                if let (Some(file), Some(range)) = (file, viewable(wanted)) {
                    file.views.push((tensor, range));
                }
            }
            let mut addresses: Vec<(usize, u64)> = self.wanted.iter().map(|wanted| (wanted.source, 0)).collect();
            for (source, file) in self.checkpoint.sources().zip(&mut files) {
                file.map(source, &mut addresses)?;
            }
            Ok(Box::new(Views { files, addresses }))
        })
    }

    fn transfer_to_host(&self) -> Result<Box<AnyTransfer>> {
        guard(|| Ok(Box::new(AnyTransfer::Host(self.transfer(Host)?))))
    }

    fn transfer_to_cuda(&self, ordinal: i32, stream: u64) -> Result<Box<AnyTransfer>> {
        guard(|| Ok(Box::new(AnyTransfer::Cuda(self.transfer(Cuda::open(ordinal, stream)?)?))))
    }

    fn transfer<D: crate::device::Device>(&self, device: D) -> Result<Transfer<D>> {
        Transfer::open(&self.checkpoint, Arc::clone(&self.wanted), Arc::new(device), Options::from_env()?)
    }
}

fn spec(wanted: &Wanted) -> Result<ffi::Spec> {
    let too_large = |_| Error::new(Kind::Internal, "a size passed the header's checks but does not fit");
    let shape = wanted.shape.iter().map(|&size| i64::try_from(size).map_err(too_large));
    Ok(ffi::Spec {
        name: wanted.name.to_string(),
        scalar_type: wanted.dtype.scalar_type().ok_or_else(|| Error::new(Kind::Internal, "no scalar type"))?,
        is_castable: wanted.dtype.is_castable(),
        shape: shape.collect::<Result<_>>()?,
        bytes: wanted.bytes(),
    })
}

/// The bytes of a tensor that can be used where it lies: in one piece, and aligned as its elements need it.
fn viewable(wanted: &Wanted) -> Option<Range<u64>> {
    let is_aligned = |range: &Range<u64>| range.start.is_multiple_of(wanted.dtype.item_bytes());
    wanted.contiguous().filter(|range| !range.is_empty() && is_aligned(range))
}

impl Views {
    fn address(&self, tensor: usize) -> u64 {
        self.addresses.get(tensor).map_or(0, |&(_, address)| address)
    }

    fn source(&self, tensor: usize) -> usize {
        self.addresses.get(tensor).map_or(0, |&(source, _)| source)
    }

    fn hold(&self, source: usize) -> Result<Box<Hold>> {
        let mapping = self.files.get(source).and_then(|file| file.mapping.as_ref());
        let missing = || Error::new(Kind::Internal, format!("file {source} is not mapped"));
        Ok(Box::new(Hold { _mapping: Arc::clone(mapping.ok_or_else(missing)?) }))
    }
}

impl AnyTransfer {
    /// # Safety
    /// That of [`Transfer::fill`].
    unsafe fn fill(&mut self, pieces: &[ffi::Piece]) -> Result<()> {
        guard(|| {
            let destination = |piece: &ffi::Piece| Destination {
                wanted: piece.tensor,
                begin: piece.begin,
                end: piece.end,
                address: piece.address,
            };
            let destinations: Vec<Destination> = pieces.iter().map(destination).collect();
            match self {
                // SAFETY: the caller's promise is the same.
                AnyTransfer::Host(transfer) => unsafe { transfer.fill(&destinations) },
                // SAFETY: as above.
                AnyTransfer::Cuda(transfer) => unsafe { transfer.fill(&destinations) },
            }
        })
    }
}

fn finish(transfer: Box<AnyTransfer>) -> Result<()> {
    guard(|| match *transfer {
        AnyTransfer::Host(transfer) => transfer.finish(),
        AnyTransfer::Cuda(transfer) => transfer.finish(),
    })
}
