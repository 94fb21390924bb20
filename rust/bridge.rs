//! FFI boundary to C++, which only converts arguments and results. C++ creates a selection, allocates the tensors that it
//! describes, and passes their addresses to a transfer. Rust never calls C++. This file declares all functions,
//! and `types` the structures that cross; the other submodules implement them.

mod calls;
mod checkpoint;
mod cast;
mod delta;
mod dequantize;
mod destinations;
mod dtype_rules;
mod encryption_key;
mod error;
mod guard;
mod hidden;
mod ranks;
mod ranks_load;
mod ranks_save;
mod recipe;
mod save;
mod selection;
mod source;
mod stream;
mod tensor;
mod transfer;
mod types;
mod writer;

use self::calls::call;
use self::cast::{can_convert, convert, is_castable, missing_kernels, wait_for_event};
use self::checkpoint::{Checkpoint, OpenRequest, empty_checkpoint, open, open_request, tensors_of_bytes};
use self::delta::{DeltaWork, UpdateSource, encode_changes, join_deltas, open_update};
use self::dequantize::{dequantize, lay_out_codes, lay_out_quantized, quantize};
use self::encryption_key::{EncryptionKey, derive_key, encryption_key, key_for_save, key_of_file, rotate_key};
use self::error::{error_text, exception_of};
use self::ranks_load::{LoadPlan, RankPlan, plan_load, plan_rank};
use self::ranks_save::{RankSave, SavePlan, open_ranks_save, plan_save};
use self::recipe::RecipeOutputs;
use self::save::{
    AnySave, FileLayout, NewFile, SavedFiles, begin_save, finish_save, lay_out_file, new_file, read_mapped, saved_files,
};
use self::selection::{Recording, Selection, ViewGuard, Views};
use self::source::{Source, open_source};
use self::stream::{AnyStream, finish_stream};
use self::transfer::{AnyTransfer, finish, prepare_cuda};
use self::writer::{AnyWriter, begin_writer, finish_writer};
use crate::os::huge_pages::advise as advise_huge_pages;

#[cxx::bridge(namespace = "fst")]
mod ffi {
    unsafe extern "C++" {
        include!("fst/rust/bridge/types.rs.h");

        type Spec = crate::bridge::types::ffi::Spec;
        type StoredTensor = crate::bridge::types::ffi::StoredTensor;
        type DtypeRule = crate::bridge::types::ffi::DtypeRule;
        type Parts = crate::bridge::types::ffi::Parts;
        type Target = crate::bridge::types::ffi::Target;
        type Destination = crate::bridge::types::ffi::Destination;
        type StridedElements = crate::bridge::types::ffi::StridedElements;
        type ElementsCopy = crate::bridge::types::ffi::ElementsCopy;
        type NumbersPart = crate::bridge::types::ffi::NumbersPart;
        type TemporaryTensor = crate::bridge::types::ffi::TemporaryTensor;
        type CodesPart = crate::bridge::types::ffi::CodesPart;
        type RecipeTarget = crate::bridge::types::ffi::RecipeTarget;
        type Conversion = crate::bridge::types::ffi::Conversion;
        type QuantizedLayout = crate::bridge::types::ffi::QuantizedLayout;
        type CodesLayout = crate::bridge::types::ffi::CodesLayout;
        type Order = crate::bridge::types::ffi::Order;
        type MetadataEntry = crate::bridge::types::ffi::MetadataEntry;
        type TensorInfo = crate::bridge::types::ffi::TensorInfo;
        type NewTensor = crate::bridge::types::ffi::NewTensor;
        type DeviceStream = crate::bridge::types::ffi::DeviceStream;
        type Extent = crate::bridge::types::ffi::Extent;
        type MemoryRange = crate::bridge::types::ffi::MemoryRange;
        type HeldTensor = crate::bridge::types::ffi::HeldTensor;
        type ElementChanges = crate::bridge::types::ffi::ElementChanges;
        type NewFrame = crate::bridge::types::ffi::NewFrame;
        type RankRange = crate::bridge::types::ffi::RankRange;
        type LocalTensor = crate::bridge::types::ffi::LocalTensor;
        type ExceptionClass = crate::bridge::types::ffi::ExceptionClass;
    }

    /// Loads and copies that fill outputs of a recipe, in this order.
    struct RecipePlan {
        /// Outputs, each of which is one region of a tensor.
        whole_outputs: Vec<usize>,
        /// The regions of these outputs.
        whole: Box<Selection>,
        /// Regions that fill parts of the other outputs and of temporary tensors.
        parts: Box<Selection>,
        targets: Vec<StridedElements>,
        /// Codes of quantized tensors: one region for each of `numbers`.
        codes: Box<Selection>,
        /// Their scales and global scales.
        scales: Box<Selection>,
        numbers: Vec<NumbersPart>,
        temporaries: Vec<TemporaryTensor>,
        copies: Vec<ElementsCopy>,
        quantizations: Vec<CodesPart>,
    }

    /// Tensor in memory, on the host or a device. Strides are in elements.
    #[derive(Clone, Copy)]
    struct StridedTensor<'a> {
        address: u64,
        /// Value of `c10::ScalarType`, or a negative one for no tensor.
        scalar_type: i8,
        shape: &'a [i64],
        strides: &'a [i64],
    }

    /// Codes and scales of a quantized tensor, or of an index region of it.
    struct QuantizedTensor<'a> {
        scheme: &'a str,
        codes: StridedTensor<'a>,
        scales: StridedTensor<'a>,
        global_scale: StridedTensor<'a>,
        /// Rows and columns of a block, with 0 for all. Empty if scheme and scales imply them.
        block: &'a [i64],
        /// Row and column of the first code in its tensor. Empty for a whole tensor.
        begin: &'a [i64],
    }

    /// Tensors of a file that is begun.
    struct NewSave {
        save: Box<AnySave>,
        /// For each tensor in the order of the file, its index in the caller's list.
        order: Vec<usize>,
    }

    /// File that is laid out in memory.
    struct SerializedFile {
        layout: Box<FileLayout>,
        /// For each tensor in the order of the file, its index in the caller's list.
        order: Vec<usize>,
        bytes: u64,
    }

    /// Part of one rank in a load.
    struct RankLoad {
        plan: Box<RankPlan>,
        /// Shards of any rank from which this rank reads bytes.
        selection: Box<Selection>,
        /// The rank's own shards, in the order of its requests.
        shards: Vec<Spec>,
    }

    /// Source of an update, and its kind and version.
    struct OpenedUpdate {
        source: Box<UpdateSource>,
        /// Whether it is a chain of deltas, and not one whole checkpoint.
        is_delta: bool,
        /// Version of the tensors after the update, if there is one.
        version: Vec<String>,
    }

    /// Values of tensors in one version.
    struct VersionValues<'a> {
        /// Memory of each tensor. Its address is 0 if the values are read from local files.
        memory: &'a [MemoryRange],
        files: &'a Checkpoint,
    }

    /// Open file and its length.
    struct OpenedFile {
        source: Box<Source>,
        bytes: u64,
    }

    /// Views of mapped files.
    struct MappedViews {
        views: Box<Views>,
        /// Address of each tensor, or zero for a tensor that is not a view.
        addresses: Vec<u64>,
    }

    extern "Rust" {
        fn exception_of(text: &str) -> ExceptionClass;
        fn error_text(code: &str, message: &str, tensor: &str, path: &str) -> String;

        fn call(method: &str, request: &str) -> Result<String>;

        type OpenRequest;
        fn open_request(verify: &str, headers: &[u8]) -> Result<Box<OpenRequest>>;
        fn set_key(self: &mut OpenRequest, key: &EncryptionKey, accepts_plain: bool);

        type Checkpoint;
        fn open(paths: &[String], request: &OpenRequest) -> Result<Box<Checkpoint>>;
        fn export_headers(self: &Checkpoint) -> Result<Vec<u8>>;
        fn tensor_names(self: &Checkpoint) -> Vec<String>;
        fn metadata(self: &Checkpoint) -> Result<Vec<MetadataEntry>>;
        fn tensor_info(self: &Checkpoint, name: &str) -> Result<TensorInfo>;
        fn call(self: &Checkpoint, method: &str, request: &str) -> Result<String>;
        fn take_unverified(self: &Checkpoint) -> String;

        fn tensors_of_bytes(file: &[u8]) -> Result<Vec<StoredTensor>>;

        type UpdateSource;
        fn open_update(paths: &[String], request: &OpenRequest) -> Result<OpenedUpdate>;
        fn join_deltas(older: &UpdateSource, newer: &UpdateSource) -> Result<OpenedUpdate>;
        fn call(self: &UpdateSource, method: &str, request: &str) -> Result<String>;
        fn changing(self: &UpdateSource, names: &[String], held: &[String]) -> Result<Vec<usize>>;
        fn checkpoint(self: &UpdateSource) -> Result<Box<Checkpoint>>;
        fn changes(self: &UpdateSource, tensors: &[HeldTensor], limit_bytes: i64) -> Result<Box<DeltaWork>>;

        type DeltaWork;
        fn next_batch(self: &mut DeltaWork) -> Vec<usize>;
        unsafe fn compute(self: &mut DeltaWork, old: &[MemoryRange], threads: usize) -> Result<Vec<ElementChanges>>;

        unsafe fn encode_changes(
            names: &[String],
            old: &VersionValues,
            changed: &VersionValues,
            encoding: &str,
            checksum: &str,
            threads: usize,
        ) -> Result<Vec<NewFrame>>;

        type EncryptionKey;
        fn encryption_key(secret: &[u8], label: &str, limits: &[i64], salt: &[u8]) -> Result<Box<EncryptionKey>>;
        fn derive_key(string: &[u8], limits: &[i64], salt: &[u8], key: &mut [u8]) -> Result<()>;
        fn key_of_file(path: &str, label: &str) -> Result<Box<EncryptionKey>>;
        fn set_registered(self: &EncryptionKey, is_registered: bool);
        fn key_for_save(key: &EncryptionKey) -> Result<Box<EncryptionKey>>;
        /// Returns false if a file stays locked for this time in milliseconds. A negative one is no limit.
        fn rotate_key(path: &str, old_key: &EncryptionKey, new_key: &EncryptionKey, limit_ms: i64) -> Result<bool>;

        type RecipeOutputs;
        fn recipe_outputs(
            self: &Checkpoint,
            rules: &[String],
            names: &[String],
            starts: &[i64],
            lengths: &[i64],
            steps: &[i64],
        ) -> Result<Box<RecipeOutputs>>;
        /// Returns recorded views as outputs. `held` is the number of the tensors in memory that they show.
        fn recorded_outputs(self: &Checkpoint, views: &str, held: usize) -> Result<Box<RecipeOutputs>>;
        /// Returns a checkpoint with the files of this one and of another.
        fn join(self: &Checkpoint, other: &Checkpoint) -> Box<Checkpoint>;
        fn empty_checkpoint() -> Box<Checkpoint>;
        /// Returns what C++ allocates for the outputs. Rules set the dtypes of outputs whose recipe states none.
        fn specs(self: &mut RecipeOutputs, rules: &[DtypeRule]) -> Result<Vec<Spec>>;
        /// Plans loads into existing tensors, or, without any, into new ones.
        fn plan(self: &mut RecipeOutputs, targets: &[RecipeTarget]) -> Result<Vec<RecipePlan>>;

        type Selection;
        fn select(
            self: &Checkpoint,
            parts: Parts,
            names: &[String],
            starts: &[i64],
            lengths: &[i64],
            steps_or_dims: &[i64],
        ) -> Result<Box<Selection>>;
        fn specs(self: &Selection, rules: &[DtypeRule]) -> Result<Vec<Spec>>;
        unsafe fn read_small(self: &Selection, address: u64) -> Result<bool>;
        fn in_file_order(self: &Selection) -> Vec<usize>;
        fn check(self: &Selection, target: Target) -> Result<()>;
        fn path(self: &Selection, index: usize) -> String;

        type Views;
        fn views(self: &Selection, specs: &[Spec], is_verified: bool) -> Result<MappedViews>;
        fn guard(self: &Views, tensor: usize) -> Result<Box<ViewGuard>>;
        type ViewGuard;

        type AnyTransfer;
        fn transfer(self: &Selection, ordinal: i32, stream: u64) -> Result<Box<AnyTransfer>>;
        fn can_cast(self: &AnyTransfer, from: i8, to: i8) -> bool;
        fn prepare(self: &mut AnyTransfer, destinations: &[Destination], scratch_bytes_max: u64) -> Result<u64>;
        unsafe fn fill(self: &mut AnyTransfer, scratch_address: u64, scratch_bytes: u64) -> Result<()>;
        fn window_ends(self: &AnyTransfer, order: &[usize]) -> Vec<usize>;
        unsafe fn submit(self: &mut AnyTransfer, scratch_address: u64, scratch_bytes: u64) -> Result<()>;
        fn finish(transfer: Box<AnyTransfer>) -> Result<()>;

        fn is_castable(scalar_type: i8) -> bool;
        fn can_convert(from: i8, to: i8) -> bool;
        unsafe fn convert(conversions: &[Conversion], ordinal: i32, stream: u64, threads: usize) -> Result<bool>;
        fn missing_kernels(ordinal: i32) -> String;
        fn lay_out_codes(scheme: &str, shape: &[i64], block: &[i64]) -> Result<CodesLayout>;
        unsafe fn quantize(
            tensor: &StridedTensor,
            scheme: &str,
            block: &[i64],
            codes: u64,
            scales: u64,
            threads: usize,
        ) -> Result<()>;
        fn lay_out_quantized(tensor: &QuantizedTensor) -> Result<QuantizedLayout>;
        unsafe fn dequantize(
            tensor: &QuantizedTensor,
            target: &StridedTensor,
            ordinal: i32,
            stream: u64,
            threads: usize,
        ) -> Result<bool>;
        unsafe fn wait_for_event(event: usize, ordinal: i32) -> Result<()>;

        type AnyStream;
        fn stream(self: &Selection, ordinal: i32, stream: u64, order: Order) -> Result<Box<AnyStream>>;
        fn can_cast(self: &AnyStream, from: i8, to: i8) -> bool;
        fn prepare(self: &mut AnyStream, destinations: &[Destination], scratch_bytes_max: u64) -> Result<u64>;
        unsafe fn submit(self: &mut AnyStream, scratch_address: u64, scratch_bytes: u64, stream: u64) -> Result<()>;
        fn take(self: &AnyStream, stream: u64) -> Result<usize>;
        fn finish_stream(stream: Box<AnyStream>) -> Result<()>;

        fn advise_huge_pages(address: u64, bytes: u64);

        fn prepare_cuda(ordinal: i32, stream: u64) -> Result<()>;

        type Source;
        fn open_source(path: &str) -> Result<OpenedFile>;
        fn read(self: &Source, begin: u64, into: &mut [u8]) -> Result<()>;

        type NewFile;
        fn new_file(path: &str, permissions_from: &str, metadata: &[MetadataEntry], has_metadata: bool)
        -> Box<NewFile>;
        fn encrypt_with(self: &mut NewFile, key: &EncryptionKey);

        unsafe fn read_mapped(tensor: &str, address: u64, into: &mut [u8]) -> Result<()>;

        type AnySave;
        fn begin_save(file: &NewFile, tensors: &[NewTensor], streams: &[DeviceStream]) -> Result<NewSave>;
        fn scratch_bytes(self: &AnySave, extents: &[Extent]) -> Vec<u64>;
        unsafe fn append(self: &mut AnySave, extents: &[Extent], scratch: &[MemoryRange]) -> Result<()>;
        fn finish_save(save: Box<AnySave>) -> Result<()>;

        type SavedFiles;
        fn saved_files() -> Box<SavedFiles>;
        fn call(self: &SavedFiles, method: &str, request: &str) -> Result<String>;

        type FileLayout;
        fn lay_out_file(
            tensors: &[NewTensor],
            metadata: &[MetadataEntry],
            has_metadata: bool,
        ) -> Result<SerializedFile>;
        fn seal(self: &mut FileLayout, file: &mut [u8]) -> Result<()>;

        type AnyWriter;
        fn begin_writer(file: &NewFile, is_tensorizer: bool, threads: usize) -> Result<Box<AnyWriter>>;
        fn add(self: &mut AnyWriter, tensor: &NewTensor) -> Result<()>;
        fn write_hashed(
            self: &mut AnyWriter,
            tensor: &NewTensor,
            kind: i64,
            module: i64,
            has_data: bool,
            data: &[u8],
        ) -> Result<()>;
        unsafe fn append(self: &mut AnyWriter, stream: &DeviceStream, address: u64, bytes: u64) -> Result<()>;
        fn finish_writer(writer: Box<AnyWriter>) -> Result<()>;

        type LoadPlan;
        fn plan_load(checkpoint: &Checkpoint, numbers: &[i64], request: &str) -> Result<Box<LoadPlan>>;
        fn call(self: &LoadPlan, method: &str, request: &str) -> Result<String>;
        fn select_own(self: &LoadPlan, rank: i64, items: &[i64]) -> Result<Box<Selection>>;

        type RankPlan;
        fn plan_rank(plan: &LoadPlan, rank: i64) -> Result<RankLoad>;
        fn reads(self: &RankPlan, window: i64) -> Result<Vec<RankRange>>;
        fn receives(self: &RankPlan, window: i64) -> Result<Vec<RankRange>>;

        type SavePlan;
        fn plan_save(numbers: &[i64], request: &str) -> Result<Box<SavePlan>>;
        fn call(self: &SavePlan, method: &str, request: &str) -> Result<String>;
        fn local_tensors(self: &SavePlan, rank: i64) -> Result<Vec<LocalTensor>>;

        type RankSave;
        fn open_ranks_save(
            plan: &SavePlan,
            rank: i64,
            paths: &[String],
            uploads: &[String],
            streams: &[DeviceStream],
        ) -> Result<Box<RankSave>>;
        fn sends(self: &RankSave, window: i64) -> Result<Vec<RankRange>>;
        fn sources(self: &RankSave, window: i64) -> Result<Vec<RankRange>>;
        unsafe fn write(self: &RankSave, window: i64, begin: usize, end: usize, sources: &[Extent]) -> Result<()>;
        fn call(self: &mut RankSave, method: &str, request: &str) -> Result<String>;

        type Recording;
        /// Begins the span of a load of some bytes of the selection, or of all if the number is negative.
        fn record(self: &Selection, device: &str, bytes: i64) -> Box<Recording>;
    }
}
