//! The device kernels, thread by thread on the simulated GPU: tables made by the core, launched as the core would, and
//! one planted mistake for each thing that a launch can do wrong.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "these are tests")]
#![allow(clippy::cast_possible_truncation, reason = "sizes are small here")]

mod sim;

use fst::convert::scatter::{Batch, StridedCopy, TILE_BYTES, Table, has_cast};
use fst::device::cuda::kernels::{BLOCK_THREADS, IMAGE, SCATTER, SCATTER_INLINE};
use fst::dtype::Dtype;
use memmap2::MmapMut;
use proptest::prelude::*;
use sim::abi::{Fault, Kind, REGISTER_PORTABLE, Status};
use sim::gpu::Gpu;
use sim::{Sim, scatter_on_host};

/// What the simulator takes for the image of the kernels: the beginning of a fatbin.
const ANY_IMAGE: [u8; 4] = [0x50, 0xED, 0x55, 0xBA];
const GRID: [u32; 2] = [3, BLOCK_THREADS];

#[test]
fn the_image_is_a_fatbin_wherever_there_is_an_nvcc() {
    let nvcc_is_expected = option_env!("FST_KERNELS").is_some();
    assert_eq!(IMAGE.is_some(), nvcc_is_expected);
    let Some(image) = IMAGE else { return };
    assert_eq!(image[..4], ANY_IMAGE);
    assert_eq!(image.as_ptr().addr() % 16, 0);
    assert_eq!(architectures(image), ["75", "80", "86", "89", "90", "100", "110", "120", "PTX 120"]);
}

/// What a fatbin holds. A header of 16 bytes, whose third field is the length of what follows, stands before entries
/// that each begin with their kind (1 for PTX, 2 for machine code), the length of their header and that of their code.
fn architectures(image: &[u8]) -> Vec<String> {
    let number = |at: usize, bytes: usize| {
        image[at..at + bytes].iter().rev().fold(0_usize, |number, &byte| number << 8 | usize::from(byte))
    };
    let (mut at, end) = (number(6, 2), number(6, 2) + number(8, 8));
    let mut found = Vec::new();
    while at < end {
        let kind = if number(at, 2) == 1 { "PTX " } else { "" };
        found.push(format!("{kind}{}", number(at + 28, 4)));
        at += number(at + 4, 4) + number(at + 8, 8);
    }
    found.sort_by_key(|name| (name.starts_with("PTX"), name.len(), name.clone()));
    found
}

/// Bytes of an element on both sides.
fn item_bytes(from: Dtype, to: Dtype) -> (usize, usize) {
    if from == to { (1, 1) } else { (from.item_bytes() as usize, to.item_bytes() as usize) }
}

/// One piece of a random layout: where it begins in the source, counted from the end of the piece before.
#[derive(Clone, Debug)]
struct Layout {
    from: Dtype,
    to: Dtype,
    rows: usize,
    row_elements: usize,
    row_gap_bytes: usize,
    source_gap_bytes: usize,
    target_gap_elements: usize,
}

impl Layout {
    fn stride_bytes(&self) -> usize {
        self.row_elements * item_bytes(self.from, self.to).0 + self.row_gap_bytes
    }
}

fn layout() -> impl Strategy<Value = Layout> {
    let all: Vec<Dtype> = Dtype::all().collect();
    let pairs = all.iter().flat_map(|&from| all.iter().map(move |&to| (from, to)));
    let casts: Vec<_> = pairs.filter(|&(from, to)| has_cast(from, to)).collect();
    let copies = all.iter().map(|&dtype| (dtype, dtype)).collect::<Vec<_>>();
    let pair = prop_oneof![3 => proptest::sample::select(casts), 1 => proptest::sample::select(copies)];
    let around = |bytes: u64| (bytes as usize - 20)..(bytes as usize + 20);
    let sizes = prop_oneof![
        4 => (0_usize..9, 0_usize..40),
        2 => (1_usize..3, 0_usize..700),
        1 => (1_usize..2, prop_oneof![around(TILE_BYTES / 8), around(TILE_BYTES / 4), around(TILE_BYTES / 2)]),
        1 => (1_usize..3, around(TILE_BYTES)),
    ];
    (pair, sizes, 0_usize..20, 0_usize..20, 0_usize..20).prop_map(
        |((from, to), (rows, row_elements), row_gap_bytes, source_gap_bytes, target_gap_elements)| Layout {
            from,
            to,
            rows,
            row_elements,
            row_gap_bytes,
            source_gap_bytes,
            target_gap_elements,
        },
    )
}

/// Pieces for layouts, at offsets in a source and a target, and how long both are.
fn arrange(layouts: &[Layout]) -> (Vec<StridedCopy>, usize, usize) {
    let (mut source, mut target) = (0_usize, 0_usize);
    let mut pieces = Vec::new();
    for layout in layouts {
        let (_, target_bytes) = item_bytes(layout.from, layout.to);
        source += layout.source_gap_bytes;
        target = target.next_multiple_of(target_bytes) + layout.target_gap_elements * target_bytes;
        pieces.push(StridedCopy {
            source: source as u64,
            target: target as u64,
            row_elements: layout.row_elements as u64,
            rows: layout.rows as u64,
            source_stride_bytes: layout.stride_bytes() as u64,
            from: layout.from,
            to: layout.to,
        });
        source += layout.rows * layout.stride_bytes();
        target += layout.rows * layout.row_elements * target_bytes;
    }
    (pieces, source + 1, target + 1)
}

/// The pieces at these base addresses.
fn table(pieces: &[StridedCopy], source: u64, target: u64) -> Table {
    let mut table = Table::default();
    for piece in pieces {
        table.push(StridedCopy { source: source + piece.source, target: target + piece.target, ..*piece }).unwrap();
    }
    table
}

fn bytes_of(table: &Table) -> Vec<u8> {
    let mut bytes = vec![0; table.bytes()];
    table.write_to(&mut bytes).unwrap();
    bytes
}

fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut random = sim::random::Random::new(seed);
    (0..length).map(|_| random.below(256) as u8).collect()
}

/// What should come out, with the kernel's way for single elements: tasks of one element each. That this way is
/// PyTorch's is tested in tests/python/core/test_kernels.py.
fn expected(pieces: &[StridedCopy], source: &[u8], before: &[u8]) -> Vec<u8> {
    let mut target = before.to_vec();
    for piece in pieces {
        let (source_bytes, target_bytes) = item_bytes(piece.from, piece.to);
        let (rows, row_elements) = (piece.rows as usize, piece.row_elements as usize);
        for element in 0..rows * row_elements {
            let (row, column) = (element / row_elements, element % row_elements);
            let from = piece.source as usize + row * piece.source_stride_bytes as usize + column * source_bytes;
            let to = piece.target as usize + element * target_bytes;
            let value = one_element(piece.from, piece.to, &source[from..from + source_bytes]);
            target[to..to + target_bytes].copy_from_slice(&value[..target_bytes]);
        }
    }
    target
}

fn one_element(from: Dtype, to: Dtype, source: &[u8]) -> [u8; 8] {
    if from == to {
        return [source[0], 0, 0, 0, 0, 0, 0, 0];
    }
    let mut value = 0_u64;
    let piece = StridedCopy {
        source: 0,
        target: 0,
        row_elements: 1,
        rows: 1,
        source_stride_bytes: source.len() as u64,
        from,
        to,
    };
    let table = table(&[piece], address(source), (&raw mut value).expose_provenance() as u64);
    // SAFETY: one element is read from `source` and written to `value`.
    unsafe { scatter_on_host(&bytes_of(&table), 1, 1, [1, 1]) };
    value.to_le_bytes()
}

fn address(bytes: &[u8]) -> u64 {
    bytes.as_ptr().expose_provenance() as u64
}

/// A program that scatters: a pinned slot with data and table behind each other, a scratch and a target on the GPU.
struct Upload<'a> {
    sim: &'a Sim,
    gpu: Gpu<'a>,
    slot: MmapMut,
    scratch: u64,
    target: u64,
    target_bytes: usize,
    module: usize,
    table: Table,
    table_at: usize,
    is_registered: bool,
}

impl<'a> Upload<'a> {
    fn new(sim: &'a Sim, pieces: &[StridedCopy], source: &[u8], target_bytes: usize) -> Upload<'a> {
        let gpu = Gpu::new(sim, 0);
        let table_at = source.len().next_multiple_of(8);
        let room = table_at + table(pieces, 0, 0).bytes();
        let (scratch, target) = (gpu.allocate(room), gpu.allocate(target_bytes));
        let table = table(pieces, scratch, target);
        let mut slot = MmapMut::map_anon(room).unwrap();
        slot[..source.len()].copy_from_slice(source);
        table.write_to(&mut slot[table_at..]).unwrap();
        sim.cuda.register(&slot, REGISTER_PORTABLE).unwrap();
        let module = sim.cuda.load_module(&ANY_IMAGE).unwrap();
        Upload { sim, gpu, slot, scratch, target, target_bytes, module, table, table_at, is_registered: true }
    }

    fn copy(&self, stream: usize) -> Result<(), Status> {
        self.sim.cuda.copy(self.scratch, &self.slot, stream)
    }

    fn launch(&self, stream: usize) -> Result<(), Status> {
        self.launch_with(stream, GRID, self.scratch + self.table_at as u64, self.table.tile_count())
    }

    fn launch_with(&self, stream: usize, grid: [u32; 2], table: u64, tiles: u32) -> Result<(), Status> {
        let function = self.sim.cuda.function(self.module, SCATTER)?;
        let count = self.table.tasks().len() as u32;
        let parameters: [&[u8]; 3] = [&table.to_le_bytes(), &count.to_le_bytes(), &tiles.to_le_bytes()];
        self.sim.cuda.launch(function, grid, stream, &parameters)
    }

    fn read(&self) -> Vec<u8> {
        self.gpu.read(self.target, self.target_bytes)
    }
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        // Refused when the context is lost, but done.
        let _ = self.sim.cuda.synchronize_stream(self.gpu.stream);
        if self.is_registered {
            let _ = self.sim.cuda.unregister(self.slot.as_ptr().addr());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Copies and casts, any alignment, rows with gaps, nothing at all, tiles that end within a chunk: every byte that
    /// should be written is, and no other.
    #[test]
    fn a_launch_places_and_casts_every_element(
        layouts in proptest::collection::vec(layout(), 1..8), blocks in 1_u32..5, threads in 1_u32..=BLOCK_THREADS,
    ) {
        let (pieces, source_bytes, target_bytes) = arrange(&layouts);
        let source = noise(source_bytes, 1);
        let before = vec![sim::abi::POISON; target_bytes];
        let sim = Sim::start(u64::from(blocks));
        let upload = Upload::new(&sim, &pieces, &source, target_bytes);
        if !upload.table.tasks().is_empty() {
            upload.copy(upload.gpu.stream).unwrap();
            let table = upload.scratch + upload.table_at as u64;
            upload.launch_with(upload.gpu.stream, [blocks, threads], table, upload.table.tile_count()).unwrap();
            prop_assert_eq!(sim.counters().launches, 1);
            prop_assert_eq!(upload.read(), expected(&pieces, &source, &before));
        }
        drop(upload);
        sim.finish().assert_clean();
    }
}

/// Every cast, over chunks and not only over single elements.
#[test]
fn chunks_cast_as_single_elements_do() {
    for from in Dtype::all() {
        for to in Dtype::all().filter(|&to| has_cast(from, to)) {
            let (source_bytes, target_bytes) = item_bytes(from, to);
            let piece =
                StridedCopy { source: 1, target: 0, row_elements: 2000, rows: 1, source_stride_bytes: 0, from, to };
            let source = noise(1 + 2000 * source_bytes, 2);
            let mut target = vec![0_u64; 2000 * target_bytes / 8];
            let table = table(&[piece], address(&source), target.as_mut_ptr().expose_provenance() as u64);
            // SAFETY: 2000 elements are read from behind the first byte of `source` and written to `target`.
            unsafe { scatter_on_host(&bytes_of(&table), 1, table.tile_count(), GRID) };
            let found: Vec<u8> = target.iter().flat_map(|word| word.to_le_bytes()).collect();
            assert_eq!(found, expected(&[piece], &source, &vec![0; found.len()]), "{from} to {to}");
        }
    }
}

/// A source at the very end and at the very beginning of a page, with pages around it that nobody may touch.
#[test]
fn nothing_is_read_around_a_source_but_its_aligned_words() {
    const PAGE: usize = 4096;
    // SAFETY: a new mapping, all of it ours.
    let base = unsafe {
        libc::mmap(std::ptr::null_mut(), 3 * PAGE, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    assert_ne!(base, libc::MAP_FAILED);
    // SAFETY: the middle page of the mapping.
    let page = unsafe { base.cast::<u8>().add(PAGE) };
    // SAFETY: as above.
    assert_eq!(unsafe { libc::mprotect(page.cast(), PAGE, libc::PROT_READ | libc::PROT_WRITE) }, 0);
    // SAFETY: the page may be written, and nothing else refers to it.
    unsafe { std::slice::from_raw_parts_mut(page, PAGE) }.copy_from_slice(&noise(PAGE, 3));
    let pairs =
        [(Dtype::U8, Dtype::U8), (Dtype::F8E5M2, Dtype::F64), (Dtype::F16, Dtype::F32), (Dtype::F64, Dtype::BF16)];
    let mut target = vec![0_u64; PAGE];
    for (from, to) in pairs {
        let (source_bytes, target_bytes) = item_bytes(from, to);
        // Targets of every alignment, so that some last chunk ends with the page in every way.
        for (elements, skipped) in (1..100_usize).flat_map(|elements| (0..16).map(move |skipped| (elements, skipped))) {
            for start in [page.addr(), page.addr() + PAGE - elements * source_bytes] {
                let piece = StridedCopy {
                    source: start as u64,
                    target: (target.as_mut_ptr().expose_provenance() + skipped * target_bytes) as u64,
                    row_elements: elements as u64,
                    rows: 1,
                    source_stride_bytes: 0,
                    from,
                    to,
                };
                let table = table(&[piece], 0, 0);
                // SAFETY: the elements lie in the middle page, and `target` has room for all of them.
                unsafe { scatter_on_host(&bytes_of(&table), 1, table.tile_count(), GRID) };
            }
        }
    }
    // SAFETY: nothing refers to the mapping any more.
    assert_eq!(unsafe { libc::munmap(base, 3 * PAGE) }, 0);
}

/// 10 and 20 elements of two kinds, 100 bytes in and 120 bytes out.
fn two_pieces() -> (Vec<StridedCopy>, Vec<u8>) {
    let first = StridedCopy {
        source: 3,
        target: 0,
        row_elements: 10,
        rows: 1,
        source_stride_bytes: 0,
        from: Dtype::F16,
        to: Dtype::F32,
    };
    let second = StridedCopy { source: 30, target: 40, row_elements: 20, from: Dtype::F8E4M3, to: Dtype::F32, ..first };
    (vec![first, second], noise(100, 4))
}

/// Runs a test and asserts that just these violations are found, whenever the work runs.
fn assert_found(kinds: &[Kind], test: impl Fn(&Sim, Upload)) {
    let starts = [Sim::start_lazy as fn(u64) -> Sim].into_iter().chain([Sim::start as fn(u64) -> Sim; 10]);
    let (pieces, source) = two_pieces();
    for (seed, start) in (0..).zip(starts) {
        let sim = start(seed);
        test(&sim, Upload::new(&sim, &pieces, &source, 120));
        let report = sim.finish();
        assert_eq!(report.kinds(), kinds, "seed {seed}: {:#?}", report.violations);
    }
}

#[test]
fn tasks_in_the_parameters_need_nothing_to_outlive_the_call() {
    assert_found(&[], |sim, upload| {
        let function = sim.cuda.function(upload.module, SCATTER_INLINE).unwrap();
        upload.copy(upload.gpu.stream).unwrap();
        for batch in upload.table.batches() {
            let mut parameters: Box<[u8; size_of::<Batch>()]> = Box::new([0; size_of::<Batch>()]);
            parameters[..4].copy_from_slice(&batch.task_count.to_le_bytes());
            parameters[4..8].copy_from_slice(&batch.tile_count.to_le_bytes());
            parameters[8..][..upload.table.bytes()].copy_from_slice(&bytes_of(&upload.table));
            // SAFETY: the type is plain data without padding bytes that are not written.
            let own = unsafe { std::slice::from_raw_parts((&raw const batch).cast::<u8>(), size_of::<Batch>()) };
            assert_eq!(own, *parameters);
            sim.cuda.launch(function, GRID, upload.gpu.stream, &[&*parameters]).unwrap();
            parameters.fill(0xEE);
        }
        let (pieces, source) = two_pieces();
        assert_eq!(upload.read(), expected(&pieces, &source, &[0; 120]));
    });
}

/// The scratch is used again while the launch before is pending: the table is the one of its own time.
#[test]
fn a_scratch_may_be_filled_again_behind_its_launch() {
    assert_found(&[], |sim, upload| {
        upload.copy(upload.gpu.stream).unwrap();
        upload.launch(upload.gpu.stream).unwrap();
        sim.launch_write(upload.gpu.stream, upload.scratch, upload.slot.len(), 0).unwrap();
        let (pieces, source) = two_pieces();
        assert_eq!(upload.read(), expected(&pieces, &source, &[0; 120]));
    });
}

#[test]
fn a_launch_waits_for_its_data_and_others_wait_for_it() {
    // For the copy of table and data: nothing orders the two streams.
    assert_found(&[Kind::MissingWait; 3], |sim, upload| {
        let copies = sim.cuda.create_stream().unwrap();
        upload.copy(copies).unwrap();
        sim.cuda.synchronize_stream(copies).unwrap();
        // That one was waited for; this one is not.
        upload.copy(copies).unwrap();
        upload.launch(upload.gpu.stream).unwrap();
        sim.cuda.synchronize_stream(copies).unwrap();
        sim.cuda.destroy_stream(copies).unwrap();
    });
    // For the last use of its target: the block may have been handed out while it is still read.
    assert_found(&[Kind::MissingWait], |sim, upload| {
        let other = sim.cuda.create_stream().unwrap();
        sim.launch_read(other, upload.target + 119, 1).unwrap();
        upload.copy(upload.gpu.stream).unwrap();
        upload.launch(upload.gpu.stream).unwrap();
        sim.cuda.synchronize_stream(other).unwrap();
        sim.cuda.destroy_stream(other).unwrap();
    });
    // The next user of the target.
    assert_found(&[Kind::MissingWait], |sim, upload| {
        upload.copy(upload.gpu.stream).unwrap();
        upload.launch(upload.gpu.stream).unwrap();
        let other = sim.cuda.create_stream().unwrap();
        sim.launch_read(other, upload.target, 1).unwrap();
        sim.cuda.synchronize_stream(other).unwrap();
        sim.cuda.destroy_stream(other).unwrap();
    });
    // The next user of the scratch.
    assert_found(&[Kind::MissingWait], |sim, upload| {
        upload.copy(upload.gpu.stream).unwrap();
        upload.launch(upload.gpu.stream).unwrap();
        let other = sim.cuda.create_stream().unwrap();
        sim.launch_write(other, upload.scratch + 12, 1, 0).unwrap();
        sim.cuda.synchronize_stream(other).unwrap();
        sim.cuda.destroy_stream(other).unwrap();
    });
}

#[test]
fn a_launch_stays_inside_live_memory() {
    assert_found(&[Kind::OutOfBounds], |sim, upload| {
        let (mut pieces, source) = two_pieces();
        pieces[1].row_elements += 1;
        drop(upload);
        let upload = Upload::new(sim, &pieces, &source, 120);
        upload.copy(upload.gpu.stream).unwrap();
        assert_eq!(upload.launch(upload.gpu.stream), Err(Status::InvalidValue));
    });
    assert_found(&[Kind::OutOfBounds], |_, upload| {
        upload.copy(upload.gpu.stream).unwrap();
        let beyond = upload.scratch + upload.table_at as u64 + 8;
        assert_eq!(upload.launch_with(upload.gpu.stream, GRID, beyond, 2), Err(Status::InvalidValue));
    });
    assert_found(&[Kind::FreedInUse, Kind::DoubleFree], |sim, upload| {
        upload.copy(upload.gpu.stream).unwrap();
        upload.launch(upload.gpu.stream).unwrap();
        sim.cuda.free(upload.target).unwrap();
    });
}

#[test]
fn launches_that_cannot_run_are_refused() {
    for grid in [[0, 256], [1, 0], [1, 257], [1 << 31, 256]] {
        assert_found(&[Kind::BadLaunch], |_, upload| {
            upload.copy(upload.gpu.stream).unwrap();
            let table = upload.scratch + upload.table_at as u64;
            let result = upload.launch_with(upload.gpu.stream, grid, table, upload.table.tile_count());
            assert_eq!(result, Err(Status::InvalidValue));
        });
    }
    // The table has not arrived, lies askew, or has another number of tiles.
    assert_found(&[Kind::BadLaunch; 3], |_, upload| {
        assert_eq!(upload.launch(upload.gpu.stream), Err(Status::InvalidValue));
        upload.copy(upload.gpu.stream).unwrap();
        let table = upload.scratch + upload.table_at as u64;
        assert_eq!(upload.launch_with(upload.gpu.stream, GRID, table - 1, 2), Err(Status::InvalidValue));
        assert_eq!(upload.launch_with(upload.gpu.stream, GRID, table, 3), Err(Status::InvalidValue));
    });
    // Two tasks write the same bytes, or one reads what another one writes.
    for change in
        [|pieces: &mut [StridedCopy]| pieces[1].target = 36, |pieces: &mut [StridedCopy]| pieces[0].source = 120]
    {
        assert_found(&[Kind::BadLaunch], |sim, upload| {
            drop(upload);
            let (mut pieces, _) = two_pieces();
            change(&mut pieces);
            let gpu = Gpu::new(sim, 0);
            let block = gpu.allocate(200);
            let module = sim.cuda.load_module(&ANY_IMAGE).unwrap();
            let function = sim.cuda.function(module, SCATTER_INLINE).unwrap();
            for piece in &mut pieces {
                // Sources at the beginning of the block and targets from its 100th byte on.
                piece.target += 100;
            }
            let batch = table(&pieces, block, block).batches().next().unwrap();
            // SAFETY: plain data.
            let bytes = unsafe { std::slice::from_raw_parts((&raw const batch).cast::<u8>(), size_of::<Batch>()) };
            assert_eq!(sim.cuda.launch(function, GRID, gpu.stream, &[bytes]), Err(Status::InvalidValue));
        });
    }
}

/// The table changes between the call and the run, without any order.
#[test]
fn a_table_that_changes_is_found() {
    let (pieces, source) = two_pieces();
    let sim = Sim::start_lazy(0);
    let upload = Upload::new(&sim, &pieces, &source, 120);
    upload.copy(upload.gpu.stream).unwrap();
    let other = sim.cuda.create_stream().unwrap();
    upload.launch(upload.gpu.stream).unwrap();
    sim.write(upload.scratch + upload.table_at as u64, &[0xEE]).unwrap();
    // The host writes at once, and the copy that comes first in the stream would only hide it.
    upload.gpu.synchronize();
    sim.cuda.destroy_stream(other).unwrap();
    drop(upload);
    assert_eq!(sim.finish().kinds(), [Kind::MissingWait]);
}

#[test]
fn modules_live_as_long_as_their_context() {
    assert_found(&[Kind::UseAfterFree, Kind::UseAfterFree, Kind::DoubleFree, Kind::WrongContext], |sim, upload| {
        assert_eq!(sim.cuda.load_module(b"ELF!"), Err(Status::InvalidImage));
        assert_eq!(sim.cuda.function(upload.module, c"fst_unknown"), Err(Status::NotFound));
        assert_eq!(sim.counters().live_modules, 1);
        let function = sim.cuda.function(upload.module, SCATTER).unwrap();
        sim.cuda.unload_module(upload.module).unwrap();
        assert_eq!(sim.cuda.function(upload.module, SCATTER), Err(Status::InvalidHandle));
        assert_eq!(sim.cuda.launch(function, GRID, upload.gpu.stream, &[]), Err(Status::InvalidHandle));
        assert_eq!(sim.cuda.unload_module(upload.module), Err(Status::InvalidHandle));

        let other = Gpu::new(sim, 1);
        let module = sim.cuda.load_module(&ANY_IMAGE).unwrap();
        let function = sim.cuda.function(module, SCATTER).unwrap();
        sim.cuda.set_current(upload.gpu.context).unwrap();
        assert_eq!(sim.cuda.launch(function, GRID, upload.gpu.stream, &[]), Err(Status::InvalidHandle));
        drop(other);
        assert_eq!(sim.counters().live_modules, 0);
    });
}

#[test]
fn modules_and_launches_can_be_made_to_fail() {
    assert_found(&[], |sim, upload| {
        sim.inject(Fault::ModuleLoad, 2);
        let load = || sim.cuda.load_module(&ANY_IMAGE).map(|_| ());
        assert_eq!([load(), load(), load()], [Ok(()), Err(Status::NoBinaryForGpu), Ok(())]);
        sim.inject(Fault::OutOfMemory, 1);
        assert_eq!(load(), Err(Status::OutOfMemory));

        upload.copy(upload.gpu.stream).unwrap();
        sim.inject(Fault::LaunchEnqueue, 2);
        let launch = || upload.launch(upload.gpu.stream);
        assert_eq!([launch(), launch(), launch()], [Ok(()), Err(Status::LaunchOutOfResources), Ok(())]);
        upload.gpu.synchronize();
        assert_eq!(sim.counters().launches, 2);

        sim.inject(Fault::LaunchAsync, 1);
        assert_eq!(launch(), Ok(()));
        assert_eq!(sim.cuda.synchronize_stream(upload.gpu.stream), Err(Status::IllegalAddress));
        assert_eq!(launch(), Err(Status::IllegalAddress));
        assert_eq!(sim.counters().faults, 4);
    });
}
