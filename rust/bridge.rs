//! The border to C++: conversions only. C++ asks for a selection, allocates
//! what it describes, and hands addresses to a transfer. Nothing here calls
//! C++ back.

use crate::cast::Cast;
use crate::checkpoint;
use crate::convert;
use crate::device::cuda::{self, Cuda};
use crate::device::host::Host;
use crate::device::{Device, Scratch};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::layout::{Layout, Metadata, Tensor};
use crate::load::{self, Batch, Transfer};
use crate::options::{self, Options};
use crate::origin::Origin;
use crate::plan::Destination;
use crate::profile::{self, Span, Stage};
use crate::reader::{self, Chosen, ReaderKind, Target};
use crate::save::{Piece, Place, Save};
use crate::selection::{self, Boxes, Slices};
use crate::sink::Sink;
use crate::sink::kernel::Linux;
use crate::stream::{Order, Stream};
use crate::views::{self, Mappings};
use crate::wanted::Wanted;
use crate::writer::Writer;
use serde_json::json;
use std::collections::btree_map::{BTreeMap, Entry};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
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
        /// The dtype there, as a value of `c10::ScalarType`.
        scalar_type: i8,
    }

    /// Elements at one address that go to another as another dtype.
    struct Conversion {
        source: u64,
        target: u64,
        elements: u64,
        /// Both are values of `c10::ScalarType`.
        from: i8,
        to: i8,
    }

    /// In which order a stream hands over its tensors.
    enum Order {
        Submitted,
        Landed,
    }

    /// An entry of a file's metadata.
    struct Text {
        key: String,
        value: String,
    }

    /// The metadata of one file.
    struct FileTexts {
        path: String,
        texts: Vec<Text>,
    }

    /// What a header says of a tensor.
    struct Facts {
        dtype: String,
        shape: Vec<i64>,
        bytes: u64,
    }

    /// A tensor that is to be in a file.
    struct NewTensor {
        name: String,
        /// The value of `c10::ScalarType`.
        scalar_type: i8,
        shape: Vec<i64>,
    }

    /// The GPU with this ordinal, or the host where it is negative, and the native handle of the current stream there.
    struct Place {
        ordinal: i32,
        stream: u64,
    }

    /// Bytes of a tensor, on the place with this position.
    struct Extent {
        place: usize,
        address: u64,
        bytes: u64,
    }

    extern "Rust" {
        type Checkpoint;
        fn open(paths: &[String]) -> Result<Box<Checkpoint>>;
        fn tensor_names(self: &Checkpoint) -> Vec<String>;
        fn texts(self: &Checkpoint) -> Result<Vec<Text>>;
        fn texts_by_file(self: &Checkpoint) -> Vec<FileTexts>;
        fn facts(self: &Checkpoint, name: &str) -> Result<Facts>;
        fn path(self: &Checkpoint, name: &str) -> Result<String>;
        fn reader_names(self: &Checkpoint, ordinal: i32) -> Result<String>;

        type Selection;
        fn select_all(self: &Checkpoint) -> Result<Box<Selection>>;
        fn select_tensors(self: &Checkpoint, names: &[String]) -> Result<Box<Selection>>;
        fn select_slices(
            self: &Checkpoint,
            names: &[String],
            dims: &[i64],
            starts: &[i64],
            lengths: &[i64],
        ) -> Result<Box<Selection>>;
        fn select_boxes(
            self: &Checkpoint,
            names: &[String],
            starts: &[i64],
            lengths: &[i64],
            steps: &[i64],
        ) -> Result<Box<Selection>>;
        fn specs(self: &Selection) -> Result<Vec<Spec>>;
        fn in_file_order(self: &Selection) -> Vec<usize>;

        type Views;
        fn views(self: &Selection, scalar_types: &[i8]) -> Result<Box<Views>>;
        fn address(self: &Views, tensor: usize) -> u64;
        fn hold(self: &Views, tensor: usize) -> Result<Box<Hold>>;
        type Hold;

        type AnyTransfer;
        fn transfer_to_host(self: &Selection) -> Result<Box<AnyTransfer>>;
        fn transfer_to_cuda(self: &Selection, ordinal: i32, stream: u64) -> Result<Box<AnyTransfer>>;
        fn can_cast(self: &AnyTransfer, from: i8, to: i8) -> bool;
        fn prepare(self: &mut AnyTransfer, pieces: &[Piece]) -> Result<u64>;
        unsafe fn fill(self: &mut AnyTransfer, scratch_address: u64, scratch_bytes: u64) -> Result<()>;
        fn finish(transfer: Box<AnyTransfer>) -> Result<()>;

        fn can_convert(from: i8, to: i8) -> bool;
        unsafe fn convert_on_host(conversions: &[Conversion], threads: usize) -> Result<()>;
        unsafe fn convert_on_cuda(conversions: &[Conversion], ordinal: i32, stream: u64) -> Result<bool>;

        type AnyStream;
        fn stream_to_host(self: &Selection, order: Order) -> Result<Box<AnyStream>>;
        fn stream_to_cuda(self: &Selection, ordinal: i32, stream: u64, order: Order) -> Result<Box<AnyStream>>;
        fn follow(self: &AnyStream, stream: u64) -> Result<()>;
        fn can_cast(self: &AnyStream, from: i8, to: i8) -> bool;
        fn prepare(self: &mut AnyStream, pieces: &[Piece]) -> Result<u64>;
        unsafe fn submit(self: &mut AnyStream, scratch_address: u64, scratch_bytes: u64) -> Result<()>;
        fn take(self: &AnyStream) -> Result<usize>;
        fn finish_stream(stream: Box<AnyStream>) -> Result<()>;

        fn release() -> Result<i64>;

        type AnySave;
        fn begin_save(
            path: &str,
            tensors: &[NewTensor],
            metadata: &[Text],
            has_metadata: bool,
            places: &[Place],
        ) -> Result<Box<AnySave>>;
        fn order(self: &AnySave) -> Vec<usize>;
        unsafe fn append(self: &mut AnySave, extents: &[Extent]) -> Result<()>;
        fn finish_save(save: Box<AnySave>) -> Result<()>;

        type AnyWriter;
        fn begin_writer(path: &str, metadata: &[Text], has_metadata: bool) -> Result<Box<AnyWriter>>;
        fn add(self: &mut AnyWriter, tensor: &NewTensor) -> Result<()>;
        unsafe fn append(self: &mut AnyWriter, place: &Place, address: u64, bytes: u64) -> Result<()>;
        fn finish_writer(writer: Box<AnyWriter>) -> Result<()>;

        type Recording;
        fn record(self: &Selection, device: &str) -> Box<Recording>;
        fn profile_start() -> i64;
        fn profile_stop(id: i64) -> Result<String>;
    }
}

/// An open checkpoint.
struct Checkpoint {
    files: Arc<checkpoint::Checkpoint>,
    mappings: Arc<Mappings>,
}

/// Tensors chosen from a checkpoint.
struct Selection {
    chosen: selection::Selection,
    mappings: Arc<Mappings>,
}

/// Which tensors of a selection are views of a mapped file, and where.
struct Views(views::Views);

/// Keeps the bytes of one view.
struct Hold {
    _view: views::Hold,
}

/// Tells profiles of a load for as long as it lives.
struct Recording {
    _span: Span,
}

/// A transfer to either device, and its next filling.
struct AnyTransfer {
    to: To,
    wanted: Arc<[Wanted]>,
    batch: Option<Batch>,
}

enum To {
    Host(Transfer<Host>),
    Cuda(Transfer<Cuda>),
}

/// A stream to either device, and its next filling.
struct AnyStream {
    to: StreamTo,
    wanted: Arc<[Wanted]>,
    prepared: Option<(Vec<usize>, Batch)>,
}

enum StreamTo {
    Host(Stream<Host>),
    Cuda(Stream<Cuda>),
}

/// A panic must not reach C++, where it would end the process. There is none that we know of.
fn guard<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Error::new(Kind::Internal, format!("a bug in fst, please report it: {text}")))
    });
    result.inspect_err(profile::error)
}

fn open(paths: &[String]) -> Result<Box<Checkpoint>> {
    guard(|| {
        start_log()?;
        let files = Arc::new(checkpoint::Checkpoint::open(paths)?);
        Ok(Box::new(Checkpoint { files, mappings: Arc::default() }))
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
        self.files.entries().map(|(_, entry)| entry.name.to_string()).collect()
    }

    fn texts(&self) -> Result<Vec<ffi::Text>> {
        guard(|| Ok(self.files.metadata()?.map(texts).unwrap_or_default()))
    }

    fn texts_by_file(&self) -> Vec<ffi::FileTexts> {
        let file = |(path, metadata): (&Path, _)| ffi::FileTexts {
            path: path.to_string_lossy().into_owned(),
            texts: texts(metadata),
        };
        self.files.texts().map(file).collect()
    }

    fn facts(&self, name: &str) -> Result<ffi::Facts> {
        guard(|| {
            let (_, entry) = self.files.find(name)?;
            let bytes = entry.end.saturating_sub(entry.begin);
            Ok(ffi::Facts { dtype: entry.dtype.name().to_owned(), shape: signed(entry.shape)?, bytes })
        })
    }

    fn path(&self, name: &str) -> Result<String> {
        guard(|| {
            let (source, _) = self.files.find(name)?;
            Ok(self.files.source(source)?.path.to_string_lossy().into_owned())
        })
    }

    fn select_all(&self) -> Result<Box<Selection>> {
        self.select(selection::Selection::all)
    }

    fn select_tensors(&self, names: &[String]) -> Result<Box<Selection>> {
        self.select(|files| selection::Selection::named(files, names))
    }

    fn select_slices(&self, names: &[String], dims: &[i64], starts: &[i64], lengths: &[i64]) -> Result<Box<Selection>> {
        self.select(|files| selection::Selection::slices(files, names, Slices { dims, starts, lengths }))
    }

    fn select_boxes(&self, names: &[String], starts: &[i64], lengths: &[i64], steps: &[i64]) -> Result<Box<Selection>> {
        self.select(|files| selection::Selection::boxes(files, names, Boxes { starts, lengths, steps }))
    }

    fn select(
        &self,
        choose: impl FnOnce(&Arc<checkpoint::Checkpoint>) -> Result<selection::Selection>,
    ) -> Result<Box<Selection>> {
        guard(|| Ok(Box::new(Selection { chosen: choose(&self.files)?, mappings: Arc::clone(&self.mappings) })))
    }

    /// For the GPU with this ordinal, or for new tensors on the CPU where it is negative.
    fn reader_names(&self, ordinal: i32) -> Result<String> {
        guard(|| {
            let options = Options::from_env()?;
            let mut names = Vec::new();
            let mut add = |chosen: Chosen| {
                let name = chosen.kind.to_string();
                if !names.contains(&name) {
                    names.push(name);
                }
            };
            // What can be had shows when it is tried.
            if ordinal < 0 {
                let transfer = Transfer::open(&self.files, Arc::default(), Arc::new(Host), options.clone())?;
                for (source, moved) in self.files.sources().zip(transfer.readers()) {
                    let chosen = reader::choose(&options, source, Target::NewHostMemory)?;
                    add(if chosen.kind == ReaderKind::Mmap { chosen } else { moved });
                }
            } else {
                let device = Arc::new(Cuda::open(ordinal, 0)?);
                Transfer::open(&self.files, Arc::default(), device, options)?.readers().for_each(add);
            }
            Ok(names.join("+"))
        })
    }
}

fn texts(metadata: &BTreeMap<String, String>) -> Vec<ffi::Text> {
    metadata.iter().map(|(key, value)| ffi::Text { key: key.clone(), value: value.clone() }).collect()
}

impl Selection {
    /// Begins to tell profiles of a load of the selection to a device.
    fn record(&self, device: &str) -> Box<Recording> {
        // The device "meta" gets shapes and dtypes alone.
        let is_counted = profile::is_on() && device != "meta";
        let bytes = if is_counted { self.chosen.wanted().iter().map(Wanted::bytes).sum() } else { 0 };
        let detail = || {
            let sources = self.chosen.checkpoint().sources();
            let paths: Vec<_> = sources.map(|source| source.path.to_string_lossy()).collect();
            json!({ "paths": paths, "device": device, "tensors": self.chosen.wanted().len() }).into()
        };
        Box::new(Recording { _span: profile::span(Stage::Load).bytes(bytes).detail(detail) })
    }

    fn in_file_order(&self) -> Vec<usize> {
        self.chosen.in_file_order()
    }

    fn specs(&self) -> Result<Vec<ffi::Spec>> {
        guard(|| self.chosen.wanted().iter().map(spec).collect())
    }

    /// Maps the files of tensors that need no copy on the CPU, if they are wanted with these dtypes.
    fn views(&self, scalar_types: &[i8]) -> Result<Box<Views>> {
        guard(|| {
            let dtypes: Vec<_> = scalar_types.iter().map(|&value| Dtype::from_scalar_type(value)).collect();
            let (checkpoint, wanted) = (self.chosen.checkpoint(), self.chosen.wanted());
            let options = Options::from_env()?;
            let views = views::Views::open(checkpoint, &self.mappings, wanted, &dtypes, &options)?;
            Ok(Box::new(Views(views)))
        })
    }

    fn transfer_to_host(&self) -> Result<Box<AnyTransfer>> {
        guard(|| self.transfer(Host, To::Host))
    }

    fn transfer_to_cuda(&self, ordinal: i32, stream: u64) -> Result<Box<AnyTransfer>> {
        guard(|| self.transfer(Cuda::open(ordinal, stream)?, To::Cuda))
    }

    fn transfer<D: Device>(&self, device: D, to: impl FnOnce(Transfer<D>) -> To) -> Result<Box<AnyTransfer>> {
        let (checkpoint, wanted) = (self.chosen.checkpoint(), Arc::clone(self.chosen.wanted()));
        let transfer = Transfer::open(checkpoint, Arc::clone(&wanted), Arc::new(device), Options::from_env()?)?;
        Ok(Box::new(AnyTransfer { to: to(transfer), wanted, batch: None }))
    }

    fn stream_to_host(&self, order: ffi::Order) -> Result<Box<AnyStream>> {
        guard(|| self.stream(Host, order, StreamTo::Host))
    }

    fn stream_to_cuda(&self, ordinal: i32, stream: u64, order: ffi::Order) -> Result<Box<AnyStream>> {
        guard(|| self.stream(Cuda::open(ordinal, stream)?, order, StreamTo::Cuda))
    }

    fn stream<D: Device + 'static>(
        &self,
        device: D,
        order: ffi::Order,
        to: impl FnOnce(Stream<D>) -> StreamTo,
    ) -> Result<Box<AnyStream>> {
        let order = if order == ffi::Order::Landed { Order::Landed } else { Order::Submitted };
        let (checkpoint, wanted) = (self.chosen.checkpoint(), Arc::clone(self.chosen.wanted()));
        let options = Options::from_env()?;
        let stream = Stream::open(checkpoint, Arc::clone(&wanted), Arc::new(device), options, order)?;
        Ok(Box::new(AnyStream { to: to(stream), wanted, prepared: None }))
    }
}

fn spec(wanted: &Wanted) -> Result<ffi::Spec> {
    Ok(ffi::Spec {
        name: wanted.name.to_string(),
        scalar_type: wanted.dtype.scalar_type().ok_or_else(|| Error::new(Kind::Internal, "no scalar type"))?,
        is_castable: wanted.dtype.is_castable(),
        shape: signed(&wanted.shape)?,
        bytes: wanted.bytes(),
    })
}

fn signed(shape: &[u64]) -> Result<Vec<i64>> {
    let too_large = |_| Error::new(Kind::Internal, "a size passed the header's checks but does not fit");
    shape.iter().map(|&size| i64::try_from(size).map_err(too_large)).collect()
}

impl Views {
    /// Zero where the tensor is no view.
    fn address(&self, tensor: usize) -> u64 {
        self.0.address(tensor).unwrap_or(0)
    }

    fn hold(&self, tensor: usize) -> Result<Box<Hold>> {
        guard(|| Ok(Box::new(Hold { _view: self.0.hold(tensor)? })))
    }
}

impl AnyTransfer {
    fn can_cast(&self, from: i8, to: i8) -> bool {
        cast(from, to).is_some_and(|cast| match &self.to {
            To::Host(transfer) => transfer.planner().can_cast(cast),
            To::Cuda(transfer) => transfer.planner().can_cast(cast),
        })
    }

    /// Plans a filling, and says how much scratch memory it needs.
    fn prepare(&mut self, pieces: &[ffi::Piece]) -> Result<u64> {
        guard(|| {
            let destinations = destinations(&self.wanted, pieces)?;
            let batch = match &self.to {
                To::Host(transfer) => transfer.prepare(&destinations),
                To::Cuda(transfer) => transfer.prepare(&destinations),
            }?;
            scratch_bytes(self.batch.insert(batch))
        })
    }

    /// Carries out the filling that was prepared.
    ///
    /// # Safety
    /// That of [`Transfer::fill`].
    unsafe fn fill(&mut self, address: u64, bytes: u64) -> Result<()> {
        guard(|| {
            let batch = self.batch.take().ok_or_else(|| Error::new(Kind::Internal, "nothing was prepared"))?;
            let scratch = Scratch { address, bytes };
            match &mut self.to {
                // SAFETY: the caller's promise is the same.
                To::Host(transfer) => unsafe { transfer.fill(&batch, scratch) },
                // SAFETY: as above.
                To::Cuda(transfer) => unsafe { transfer.fill(&batch, scratch) },
            }
        })
    }
}

fn finish(transfer: Box<AnyTransfer>) -> Result<()> {
    guard(|| match transfer.to {
        To::Host(transfer) => transfer.finish(),
        To::Cuda(transfer) => transfer.finish(),
    })
}

fn profile_start() -> i64 {
    profile::start()
}

fn profile_stop(id: i64) -> Result<String> {
    guard(|| profile::stop(id))
}

fn cast(from: i8, to: i8) -> Option<Cast> {
    Cast::new(Dtype::from_scalar_type(from)?, Dtype::from_scalar_type(to)?)
}

fn destinations(wanted: &[Wanted], pieces: &[ffi::Piece]) -> Result<Vec<Destination>> {
    let destination = |piece: &ffi::Piece| {
        let wrong = || Error::new(Kind::Internal, "a piece of no wanted tensor or dtype");
        let from = wanted.get(piece.tensor).ok_or_else(wrong)?.dtype;
        let to = Dtype::from_scalar_type(piece.scalar_type).ok_or_else(wrong)?;
        let cast = if from == to { None } else { Some(Cast::new(from, to).ok_or_else(wrong)?) };
        let ffi::Piece { tensor, begin, end, address, .. } = *piece;
        Ok(Destination { wanted: tensor, begin, end, address, cast })
    };
    pieces.iter().map(destination).collect()
}

fn scratch_bytes(batch: &Batch) -> Result<u64> {
    u64::try_from(batch.scratch_bytes()).map_err(|_| Error::new(Kind::Internal, "more scratch than there can be"))
}

impl AnyStream {
    /// The caller's current stream is this one from now on.
    fn follow(&self, stream: u64) -> Result<()> {
        guard(|| match &self.to {
            StreamTo::Host(to) => to.follow(stream),
            StreamTo::Cuda(to) => to.follow(stream),
        })
    }

    fn can_cast(&self, from: i8, to: i8) -> bool {
        cast(from, to).is_some_and(|cast| match &self.to {
            StreamTo::Host(stream) => stream.planner().can_cast(cast),
            StreamTo::Cuda(stream) => stream.planner().can_cast(cast),
        })
    }

    /// Plans a filling, and says how much scratch memory it needs.
    fn prepare(&mut self, pieces: &[ffi::Piece]) -> Result<u64> {
        guard(|| {
            let destinations = destinations(&self.wanted, pieces)?;
            let batch = match &self.to {
                StreamTo::Host(stream) => stream.planner().prepare(&destinations),
                StreamTo::Cuda(stream) => stream.planner().prepare(&destinations),
            }?;
            let tensors = pieces.iter().map(|piece| piece.tensor).collect();
            let (_, batch) = self.prepared.insert((tensors, batch));
            scratch_bytes(batch)
        })
    }

    /// Has the filling that was prepared carried out.
    ///
    /// # Safety
    /// That of [`Stream::submit`].
    unsafe fn submit(&mut self, address: u64, bytes: u64) -> Result<()> {
        guard(|| {
            let nothing = || Error::new(Kind::Internal, "nothing was prepared");
            let (tensors, batch) = self.prepared.take().ok_or_else(nothing)?;
            let scratch = Scratch { address, bytes };
            match &self.to {
                // SAFETY: the caller's promise is the same.
                StreamTo::Host(stream) => unsafe { stream.submit(&tensors, batch, scratch) },
                // SAFETY: as above.
                StreamTo::Cuda(stream) => unsafe { stream.submit(&tensors, batch, scratch) },
            }
        })
    }

    fn take(&self) -> Result<usize> {
        guard(|| match &self.to {
            StreamTo::Host(stream) => stream.take(),
            StreamTo::Cuda(stream) => stream.take(),
        })
    }
}

fn finish_stream(stream: Box<AnyStream>) -> Result<()> {
    guard(|| match stream.to {
        StreamTo::Host(stream) => stream.finish(),
        StreamTo::Cuda(stream) => stream.finish(),
    })
}

/// A file that is being written.
struct AnySave {
    save: Save,
    _span: Span,
}

/// Checks all tensors, and begins the file that will hold them. Nothing is at `path` yet.
fn begin_save(
    path: &str,
    tensors: &[ffi::NewTensor],
    metadata: &[ffi::Text],
    has_metadata: bool,
    places: &[ffi::Place],
) -> Result<Box<AnySave>> {
    guard(|| {
        start_log()?;
        let path = Path::new(path);
        let tensors = tensors.iter().map(new_tensor).collect::<Result<Vec<_>>>();
        let layout = tensors.and_then(|tensors| Layout::new(&tensors, &metadata_of(metadata, has_metadata)));
        let layout = layout.map_err(|error| error.at(path))?;
        let detail = || json!({ "paths": [path.to_string_lossy()], "tensors": layout.order().len() }).into();
        let span = profile::span(Stage::Save).bytes(layout.file_bytes()).detail(detail);
        let places = places.iter().map(place).collect::<Result<_>>()?;
        let sink = Sink::create(path, Box::new(Linux))?;
        let save = Save::begin(layout, sink, places, &Options::from_env()?)?;
        Ok(Box::new(AnySave { save, _span: span }))
    })
}

fn new_tensor(tensor: &ffi::NewTensor) -> Result<Tensor> {
    let refused = |kind, message: String| Error::new(kind, message).tensor(&*tensor.name);
    let dtype = Dtype::from_scalar_type(tensor.scalar_type).ok_or_else(|| {
        refused(Kind::UnsupportedDtype, "safetensors has no dtype for it; cast it to another, or view it as one".into())
    })?;
    let negative = |_| refused(Kind::Internal, format!("a negative size in {:?}", tensor.shape));
    let shape = tensor.shape.iter().map(|&size| u64::try_from(size).map_err(negative));
    let mut shape: Vec<u64> = shape.collect::<Result<_>>()?;
    if dtype.packed_elements() > 1 {
        let last = shape.last_mut().ok_or_else(|| {
            refused(Kind::InvalidArgument, format!("a scalar of {dtype} is a pair; give it a dimension"))
        })?;
        *last = last.saturating_mul(dtype.packed_elements());
    }
    Tensor::new(&*tensor.name, dtype, shape)
}

fn metadata_of(metadata: &[ffi::Text], has_metadata: bool) -> Metadata {
    has_metadata.then(|| metadata.iter().map(|text| (text.key.clone(), text.value.clone())).collect())
}

fn place(place: &ffi::Place) -> Result<Place> {
    let origin: Arc<dyn Origin> = match place.ordinal {
        ..0 => Arc::new(Host),
        ordinal => Arc::new(Cuda::open(ordinal, place.stream)?),
    };
    Ok(Place { origin, stream: place.stream })
}

impl AnySave {
    /// For each tensor in the order of the file, its position in the caller's list.
    fn order(&self) -> Vec<usize> {
        self.save.layout().order().to_vec()
    }

    /// Writes what comes next in the file.
    ///
    /// # Safety
    /// That of [`Save::append`].
    unsafe fn append(&mut self, extents: &[ffi::Extent]) -> Result<()> {
        let piece = |extent: &ffi::Extent| {
            let ffi::Extent { place, address, bytes } = *extent;
            Piece { place, address, length: bytes }
        };
        let pieces: Vec<Piece> = extents.iter().map(piece).collect();
        // SAFETY: the caller's promise is the same.
        guard(|| unsafe { self.save.append(&pieces) })
    }
}

fn finish_save(save: Box<AnySave>) -> Result<()> {
    guard(|| save.save.finish())
}

/// A file that is written while its tensors are being made, and the devices that they came from.
struct AnyWriter {
    writer: Writer,
    path: PathBuf,
    origins: BTreeMap<i32, Arc<dyn Origin>>,
}

fn begin_writer(path: &str, metadata: &[ffi::Text], has_metadata: bool) -> Result<Box<AnyWriter>> {
    guard(|| {
        start_log()?;
        let sink = Sink::create(Path::new(path), Box::new(Linux))?;
        let writer = Writer::begin(sink, metadata_of(metadata, has_metadata), &Options::from_env()?)?;
        Ok(Box::new(AnyWriter { writer, path: path.into(), origins: BTreeMap::new() }))
    })
}

impl AnyWriter {
    fn add(&mut self, tensor: &ffi::NewTensor) -> Result<()> {
        guard(|| self.writer.add(new_tensor(tensor).map_err(|error| error.at(&self.path))?))
    }

    /// Appends bytes of the tensor that was added last.
    ///
    /// # Safety
    /// That of [`Writer::append`].
    unsafe fn append(&mut self, place: &ffi::Place, address: u64, bytes: u64) -> Result<()> {
        guard(|| {
            let origin = match self.origins.entry(place.ordinal) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(self::place(place)?.origin),
            };
            // SAFETY: the caller's promise is the same.
            unsafe { self.writer.append(origin.as_ref(), place.stream, address, bytes) }
        })
    }
}

fn finish_writer(writer: Box<AnyWriter>) -> Result<()> {
    guard(|| writer.writer.finish())
}

/// See [`load::release`].
fn release() -> Result<i64> {
    guard(|| Ok(i64::try_from(load::release()).unwrap_or(i64::MAX)))
}

fn can_convert(from: i8, to: i8) -> bool {
    let (from, to) = (Dtype::from_scalar_type(from), Dtype::from_scalar_type(to));
    from.zip(to).is_some_and(|(from, to)| convert::is_possible(from, to))
}

/// # Safety
/// That of [`convert::run`].
unsafe fn convert_on_host(conversions: &[ffi::Conversion], threads: usize) -> Result<()> {
    guard(|| {
        let conversions: Vec<convert::Conversion> = conversions.iter().map(conversion).collect::<Result<_>>()?;
        // SAFETY: the caller's promise is the same.
        unsafe { convert::run(&conversions, threads) }
    })
}

/// # Safety
/// Sources and targets are memory of the GPU, which no other stream uses before this one has come to here.
unsafe fn convert_on_cuda(conversions: &[ffi::Conversion], ordinal: i32, stream: u64) -> Result<bool> {
    guard(|| {
        start_log()?;
        let conversions: Vec<convert::Conversion> = conversions.iter().map(conversion).collect::<Result<_>>()?;
        cuda::convert::run(&conversions, ordinal, stream)
    })
}

fn conversion(conversion: &ffi::Conversion) -> Result<convert::Conversion> {
    let ffi::Conversion { source, target, elements, from, to } = *conversion;
    let dtype = |value: i8| {
        let unknown = || Error::new(Kind::Internal, format!("{value} is the scalar type of no dtype"));
        Dtype::from_scalar_type(value).ok_or_else(unknown)
    };
    Ok(convert::Conversion { source, target, elements, from: dtype(from)?, to: dtype(to)? })
}
