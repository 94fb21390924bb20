//! Structures and enumerations that cross the FFI boundary. They are apart from the functions, so that each list is short.

#[cxx::bridge(namespace = "fst")]
pub(super) mod ffi {
    /// Properties of a requested region that C++ needs to allocate its tensor.
    struct Spec {
        name: String,
        /// Value of `c10::ScalarType`.
        scalar_type: i8,
        /// Dtype of the tensor after the load, as a value of `c10::ScalarType`.
        target_type: i8,
        shape: Vec<i64>,
        bytes: u64,
        /// Whether `Selection::read_small` may copy the region.
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
        /// An index region of the only named tensor, or all of it: as starts, a start, a length and a step for each
        /// dimension, or nothing.
        Region,
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

    // Lists of these cross, too.
    impl Vec<Spec> {}
    impl Vec<StoredTensor> {}
    impl Vec<DtypeRule> {}
    impl Vec<StridedElements> {}
    impl Vec<ElementsCopy> {}
    impl Vec<NumbersPart> {}
    impl Vec<TemporaryTensor> {}
    impl Vec<CodesPart> {}
    impl Vec<MetadataEntry> {}
    impl Vec<ElementChanges> {}
    impl Vec<NewFrame> {}
    impl Vec<RankRange> {}
    impl Vec<LocalTensor> {}
}
