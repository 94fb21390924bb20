//! FFI boundary to C++, which only converts arguments and results. C++ creates a selection, allocates the tensors that it
//! describes, and passes their addresses to a transfer. Rust never calls C++. This file declares all functions; the
//! submodules implement them.

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
mod storage;
mod tensor;
mod transfer;
mod verify;
mod writer;

use self::calls::call;
use self::cast::{can_convert, convert, is_castable, missing_kernels, wait_for_event};
use self::checkpoint::{Checkpoint, OpenRequest, empty_checkpoint, open, open_request, tensors_of_bytes};
use self::delta::{DeltaWork, UpdateSource, encode_changes, join_deltas, open_update};
use self::dequantize::{dequantize, lay_out_codes, lay_out_quantized, quantize};
use self::encryption_key::{EncryptionKey, derive_key, encryption_key, key_for_save, key_of_file, rotate_key};
use self::error::{error_text, exception_of, out_of_memory};
use self::ranks_load::{LoadPlan, RankPlan, plan_load, plan_rank};
use self::ranks_save::{RankSave, SavePlan, open_ranks_save, plan_save};
use self::recipe::RecipeOutputs;
use self::save::{
    AnySave, FileLayout, NewFile, SavedFiles, begin_save, finish_save, lay_out_file, new_file, read_mapped, saved_files,
};
use self::selection::{Recording, Selection, ViewGuard, Views};
use self::source::{Source, open_source};
use self::storage::configure_storage;
use self::stream::{AnyStream, finish_stream};
use self::transfer::{AnyTransfer, finish, prepare_cuda};
use self::verify::verify_checkpoint;
use self::writer::{AnyWriter, begin_writer, finish_writer};
use crate::os::huge_pages::advise as advise_huge_pages;

#[cxx::bridge(namespace = "fst")]
mod ffi {
    /// Properties of a requested region that C++ needs to allocate its tensor.
    struct Spec {
        name: String,
        /// Value of `c10::ScalarType`.
        scalar_type: i8,
        /// Dtype of the tensor after the load, as a value of `c10::ScalarType`.
        target_type: i8,
        shape: Vec<i64>,
        bytes: u64,
        /// Whether [`Selection::read_small`] may copy the region.
        is_small: bool,
    }

    /// Tensor of a file in memory.
    struct StoredTensor {
        spec: Spec,
        /// First byte of the data in the file.
        begin: usize,
    }

    /// Dtype that a load requests for the tensors of a name or pattern.
    struct DtypeRule {
        pattern: String,
        /// Value of `c10::ScalarType`, or a negative one to keep the stored dtype.
        scalar_type: i8,
    }

    /// Kinds of selections of a checkpoint.
    enum Parts {
        /// All tensors.
        All,
        /// Named tensors.
        Whole,
        /// An index region of each named tensor: starts, lengths and steps.
        Regions,
        /// A slice along one dimension of each named tensor: starts, lengths and dimensions.
        Slices,
    }

    /// Tensors that a load fills.
    enum Target {
        New,
        /// New ones, which a stream returns one by one.
        Streamed,
        /// Those of the caller.
        Existing,
    }

    /// Destination of bytes `begin..end` of region `tensor`.
    struct Destination {
        tensor: usize,
        begin: u64,
        end: u64,
        address: u64,
        /// Dtype of the destination, as a value of `c10::ScalarType`.
        scalar_type: i8,
    }

    /// Elements of a tensor, as [`Layout`](crate::recipe::layout::Layout).
    struct StridedElements {
        /// Index of the tensor: all requested outputs, then the tensors in memory, and then the temporary tensors.
        tensor: usize,
        offset: i64,
        sizes: Vec<i64>,
        strides: Vec<i64>,
    }

    /// Copy of elements of a temporary tensor or of one in memory.
    struct ElementsCopy {
        source: StridedElements,
        target: StridedElements,
    }

    /// Region of a quantized tensor, whose numbers fill a part of an output or of a temporary tensor.
    struct NumbersPart {
        scheme: String,
        /// Index of the region of its scales, and their shape.
        scales: usize,
        scales_shape: Vec<i64>,
        /// Index of the region of its global scale, or -1.
        global_scale: i64,
        /// Rows and columns of a block, with 0 for all.
        block: [i64; 2],
        /// Row and column of the first number in the first block.
        begin: [i64; 2],
        target: StridedElements,
    }

    /// Temporary tensor on the device of an output.
    struct TemporaryTensor {
        spec: Spec,
        output: usize,
        /// Whether a conversion to codes and scales creates the tensor.
        is_result: bool,
    }

    /// Conversion of a temporary tensor to codes and scales, each a temporary tensor.
    struct CodesPart {
        scheme: String,
        /// Rows and columns that share a scale, with 0 for all.
        block: [i64; 2],
        /// Index of the tensor, as in [`StridedElements`].
        input: usize,
        codes: usize,
        /// Number of copies to make before.
        copies_before: usize,
    }

    /// Existing tensor that an output of a recipe fills.
    struct RecipeTarget {
        /// Value of `c10::ScalarType`.
        scalar_type: i8,
        strides: Vec<i64>,
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

    /// Conversion of elements at `source` to another dtype at `target`, or a write of them to positions of `target`.
    struct Conversion {
        source: u64,
        target: u64,
        elements: u64,
        /// Source dtype as a value of `c10::ScalarType`.
        from: i8,
        /// Target dtype as a value of `c10::ScalarType`.
        to: i8,
        /// Address of the `u32` positions in the target, or 0 if its elements are contiguous.
        positions: u64,
        /// Number of elements of the target, with positions. Others are not written.
        target_elements: u64,
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

    /// Shapes of a quantized tensor.
    struct QuantizedLayout {
        /// Shape of the codes as matrices.
        code_shape: Vec<i64>,
        /// Shape of the numbers.
        shape: Vec<i64>,
    }

    /// Codes and scales of a tensor that is quantized.
    struct CodesLayout {
        /// Dtype of the codes, as a value of `c10::ScalarType`.
        scalar_type: i8,
        /// Shape of the scales.
        scales: Vec<i64>,
    }

    /// Order in which a stream returns its tensors.
    enum Order {
        Submitted,
        Ready,
    }

    /// Entry of a file's metadata.
    struct MetadataEntry {
        key: String,
        value: String,
    }

    /// Metadata of one file.
    struct FileMetadata {
        path: String,
        entries: Vec<MetadataEntry>,
    }

    /// Header entry of a tensor.
    struct TensorInfo {
        dtype: String,
        shape: Vec<i64>,
        bytes: u64,
        /// First byte of the data in the file.
        begin: u64,
        /// Number of the kind in a `.tensors` file, or -1 in a safetensors file.
        kind: i8,
    }

    /// Hash in a `.tensors` file that differs from the hash of the tensor's data.
    struct DifferingHash {
        /// Index of the tensor in the list of names.
        tensor: usize,
        algorithm: String,
    }

    /// Tensor of a new file.
    struct NewTensor {
        name: String,
        /// Value of `c10::ScalarType`.
        scalar_type: i8,
        shape: Vec<i64>,
    }

    /// GPU with this ordinal, or the host if it is negative, and the native handle of its current stream.
    #[derive(Clone, Copy)]
    struct DeviceStream {
        ordinal: i32,
        stream: u64,
        /// Whether the memory of the host belongs to files that fst has mapped.
        is_mapped: bool,
    }

    /// Contiguous bytes of a tensor. `device` is an index into the streams of the save.
    struct Extent {
        device: usize,
        address: u64,
        bytes: u64,
    }

    /// Memory of the host or of a device.
    struct MemoryRange {
        address: u64,
        bytes: u64,
    }

    /// Kind and version of the tensors that an update loads.
    struct UpdateState {
        /// Whether it is a chain of deltas, and not one whole checkpoint.
        is_delta: bool,
        /// Version of the tensors after the update, if there is one.
        version: Vec<String>,
    }

    /// Tensor whose changes are computed, or an index region of it.
    struct HeldTensor {
        name: String,
        /// Value of `c10::ScalarType`.
        scalar_type: i8,
        item_bytes: usize,
        /// Size of the old values in bytes.
        bytes: u64,
        /// Shape of the whole tensor.
        shape: Vec<i64>,
        /// Start, length and step of each dimension. Empty for the whole tensor.
        ranges: Vec<i64>,
        /// Whether the caller copies the old values for a batch.
        is_copied: bool,
        /// Whether the old values are in a file that fst has mapped.
        is_mapped: bool,
    }

    /// Changes of a tensor.
    struct ElementChanges {
        /// Index of the tensor.
        tensor: usize,
        /// Whether `values` has all elements.
        is_whole: bool,
        /// Numbers of the elements that change, in ascending order.
        positions: Vec<u32>,
        values: Vec<u8>,
    }

    /// Frame of a tensor in a new delta, and the checksum of its new bytes in hexadecimal digits. Both are empty if the
    /// tensor does not change.
    struct NewFrame {
        bytes: Vec<u8>,
        checksum: String,
    }

    /// Bytes of a tensor that a rank reads, sends, receives or writes in a window.
    struct RankRange {
        /// Index of the tensor: in a load the region of the rank's selection, or the shard that receives the bytes.
        tensor: usize,
        /// In a load, the shard of the receiver that keeps the bytes. In a save, the range of a file that has them.
        item: usize,
        /// First byte in the contiguous shard or local tensor that has the bytes.
        begin: u64,
        /// One past the last byte.
        end: u64,
        /// Whether the bytes are in the send or receive buffer, and not only in a tensor of this rank.
        is_exchanged: bool,
        /// Offset in the buffer.
        offset: u64,
        /// Whether the bytes are contiguous in the file of a save.
        is_contiguous: bool,
    }

    /// Local tensor of a rank in a save.
    struct LocalTensor {
        name: String,
        /// Value of `c10::ScalarType` in the file.
        scalar_type: i8,
        /// Whether the rank has elements of the tensor.
        is_held: bool,
        shape: Vec<i64>,
        /// First element that the rank writes or sends, in row-major order.
        first: i64,
        /// Number of elements from the first to the last that the rank writes or sends.
        count: i64,
    }

    /// Exception class of `c10` for an error.
    enum ExceptionClass {
        Error,
        ValueError,
        IndexError,
        NotImplementedError,
        OutOfMemoryError,
    }

    extern "Rust" {
        fn exception_of(text: &str) -> ExceptionClass;
        fn error_text(code: &str, message: &str) -> String;
        fn out_of_memory(path: &str, tensor: &str, bytes: u64, device: &str) -> String;

        fn call(method: &str, request: &str) -> Result<String>;

        type OpenRequest;
        fn open_request(verify: &str, headers: &[u8]) -> Result<Box<OpenRequest>>;
        fn set_key(self: &mut OpenRequest, key: &EncryptionKey, accepts_plain: bool);

        type Checkpoint;
        fn open(paths: &[String], request: &OpenRequest) -> Result<Box<Checkpoint>>;
        fn export_headers(self: &Checkpoint) -> Result<Vec<u8>>;
        fn tensor_names(self: &Checkpoint) -> Vec<String>;
        fn metadata(self: &Checkpoint, is_one_file: bool) -> Result<Vec<FileMetadata>>;
        fn tensor_info(self: &Checkpoint, name: &str) -> Result<TensorInfo>;
        unsafe fn differing_hashes(
            self: &Checkpoint,
            names: &[String],
            data: &[MemoryRange],
            threads: usize,
        ) -> Result<Vec<DifferingHash>>;
        fn call(self: &Checkpoint, method: &str, request: &str) -> Result<String>;
        fn reader_names(self: &Checkpoint, ordinal: i32) -> Result<String>;
        fn take_unverified(self: &Checkpoint) -> String;

        fn tensors_of_bytes(file: &[u8]) -> Result<Vec<StoredTensor>>;

        type UpdateSource;
        fn open_update(paths: &[String], request: &OpenRequest) -> Result<Box<UpdateSource>>;
        fn join_deltas(older: &UpdateSource, newer: &UpdateSource) -> Result<Box<UpdateSource>>;
        fn call(self: &UpdateSource, method: &str, request: &str) -> Result<String>;
        fn state(self: &UpdateSource) -> UpdateState;
        fn changing(self: &UpdateSource, names: &[String], held: &[String]) -> Result<Vec<usize>>;
        fn checkpoint(self: &UpdateSource) -> Result<Box<Checkpoint>>;
        fn changes(self: &UpdateSource, tensors: &[HeldTensor], limit_bytes: i64) -> Result<Box<DeltaWork>>;

        type DeltaWork;
        fn next_batch(self: &mut DeltaWork) -> Vec<usize>;
        unsafe fn compute(self: &mut DeltaWork, old: &[MemoryRange], threads: usize) -> Result<Vec<ElementChanges>>;

        unsafe fn encode_changes(
            names: &[String],
            old: &[MemoryRange],
            changed: &[MemoryRange],
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
        fn set_dtypes(self: &mut RecipeOutputs, rules: &[DtypeRule]) -> Result<()>;
        fn specs(self: &RecipeOutputs) -> Result<Vec<Spec>>;
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
        fn select_region(self: &Checkpoint, name: &str, ranges: &[i64]) -> Result<Box<Selection>>;
        fn specs(self: &Selection, rules: &[DtypeRule]) -> Result<Vec<Spec>>;
        unsafe fn read_small(self: &Selection, address: u64) -> Result<bool>;
        fn in_file_order(self: &Selection) -> Vec<usize>;
        fn check(self: &Selection, target: Target) -> Result<()>;
        fn path(self: &Selection, index: usize) -> String;

        fn verify_checkpoint(paths: &[String], verify: &str) -> Result<()>;

        type Views;
        fn views(self: &Selection, specs: &[Spec], is_verified: bool) -> Result<Box<Views>>;
        fn address(self: &Views, tensor: usize) -> u64;
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

        fn configure_storage(url: &str, names: &[String], values: &[String]) -> Result<()>;

        type Source;
        fn open_source(path: &str) -> Result<Box<Source>>;
        fn length(self: &Source) -> u64;
        fn read(self: &Source, begin: u64, into: &mut [u8]) -> Result<()>;

        type NewFile;
        fn new_file(path: &str, permissions_from: &str, metadata: &[MetadataEntry], has_metadata: bool)
        -> Box<NewFile>;
        fn encrypt_with(self: &mut NewFile, key: &EncryptionKey);

        unsafe fn read_mapped(tensor: &str, address: u64, into: &mut [u8]) -> Result<()>;

        type AnySave;
        fn begin_save(file: &NewFile, tensors: &[NewTensor], streams: &[DeviceStream]) -> Result<Box<AnySave>>;
        fn order(self: &AnySave) -> Vec<usize>;
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
        ) -> Result<Box<FileLayout>>;
        fn seal(self: &mut FileLayout, file: &mut [u8]) -> Result<()>;
        fn order(self: &FileLayout) -> Vec<usize>;
        fn file_bytes(self: &FileLayout) -> u64;

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
        fn plan_rank(plan: &LoadPlan, rank: i64) -> Result<Box<RankPlan>>;
        fn selection(self: &RankPlan) -> Box<Selection>;
        fn shards(self: &RankPlan) -> Result<Vec<Spec>>;
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
        fn hashes(self: &RankSave) -> Result<Vec<u8>>;
        fn seal(self: &mut RankSave, hashes: &[u8]) -> Result<()>;
        fn finish(self: &mut RankSave) -> Result<String>;

        type Recording;
        fn record(self: &Selection, device: &str) -> Box<Recording>;
        fn record_bytes(self: &Selection, bytes: u64, device: &str) -> Box<Recording>;
    }

    // C++ builds lists of these.
    impl Vec<DtypeRule> {}
}
