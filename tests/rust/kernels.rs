//! Tests of the device kernels, executed thread by thread on the simulated GPU. The core creates the tables, and the
//! tests launch them like the core. One test per kind of invalid launch checks that the simulator reports it.

use crate::sim::abi::{Kind, POISON, REGISTER_PORTABLE, Status};
use crate::sim::gpu::Gpu;
use crate::sim::random::Random;
use crate::sim::{self, FATBIN, Sim, run_on_host};
use fst::cast::put::Put;
use fst::cast::scatter::{Batch, StridedCopy, TILE_BYTES, Table, has_cast};
use fst::device::cuda::kernels::{BLOCK_THREADS, IMAGE, SCATTER, SCATTER_INLINE};
use fst::dtype::Dtype;
use memmap2::MmapMut;
use proptest::prelude::*;

const GRID: [u32; 2] = [3, BLOCK_THREADS];

/// tests/python/kernels/test_image.py lists the architectures in the image of a release.
#[test]
fn image_is_a_fatbin_if_built_with_nvcc() {
    let nvcc_is_expected = option_env!("FST_KERNELS").is_some();
    assert_eq!(IMAGE.is_some(), nvcc_is_expected);
    let Some(image) = IMAGE else { return };
    assert_eq!(image[..4], FATBIN);
    assert_eq!(image.as_ptr().addr() % 16, 0);
}

/// Returns the bytes of a source and a target element.
fn item_bytes(copy: &StridedCopy) -> (u64, u64) {
    if copy.from == copy.to { (1, 1) } else { (copy.from.item_bytes(), copy.to.item_bytes()) }
}

/// Random copy. Its addresses are the gaps to the previous copy.
fn copy() -> impl Strategy<Value = StridedCopy> {
    let all: Vec<Dtype> = Dtype::all().collect();
    let pairs = all.iter().flat_map(|&from| all.iter().map(move |&to| (from, to)));
    let casts: Vec<_> = pairs.filter(|&(from, to)| has_cast(from, to)).collect();
    let copies = all.iter().map(|&dtype| (dtype, dtype)).collect::<Vec<_>>();
    let pair = prop_oneof![3 => proptest::sample::select(casts), 1 => proptest::sample::select(copies)];
    let around = |bytes: u64| (bytes - 20)..(bytes + 20);
    let sizes = prop_oneof![
        4 => (0_u64..9, 0_u64..40),
        2 => (1_u64..3, 0_u64..700),
        1 => (1_u64..2, prop_oneof![around(TILE_BYTES / 8), around(TILE_BYTES / 4), around(TILE_BYTES / 2)]),
        1 => (1_u64..3, around(TILE_BYTES)),
    ];
    (pair, sizes, 0_u64..20, 0_u64..20, 0_u64..20).prop_map(
        |((from, to), (rows, row_elements), row_gap_bytes, source, target_elements)| {
            let mut copy = StridedCopy { source, target: 0, row_elements, rows, source_stride_bytes: 0, from, to };
            let (source_bytes, target_bytes) = item_bytes(&copy);
            copy.target = target_elements * target_bytes;
            copy.source_stride_bytes = row_elements * source_bytes + row_gap_bytes;
            copy
        },
    )
}

/// Makes the addresses of copies relative to a source and a target, and returns the lengths of both.
fn arrange(copies: &mut [StridedCopy]) -> (usize, usize) {
    let (mut source, mut target) = (0, 0);
    for copy in copies {
        let (_, target_bytes) = item_bytes(copy);
        copy.source += source;
        copy.target += u64::next_multiple_of(target, target_bytes);
        source = copy.source + copy.rows * copy.source_stride_bytes;
        target = copy.target + copy.rows * copy.row_elements * target_bytes;
    }
    (source as usize + 1, target as usize + 1)
}

/// Returns the table of the copies at these base addresses.
fn table(copies: &[StridedCopy], source: u64, target: u64) -> Table {
    let mut table = Table::default();
    for copy in copies {
        table.push(StridedCopy { source: source + copy.source, target: target + copy.target, ..*copy }).unwrap();
    }
    table
}

fn bytes_of(table: &Table) -> Vec<u8> {
    let mut bytes = vec![0; table.bytes()];
    table.write_to(&mut bytes).unwrap();
    bytes
}

fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..length).map(|_| random.below(256) as u8).collect()
}

/// Returns the expected target, computed with the kernel's code for tasks of one element. The test
/// tests/python/kernels/test_ptx.py compares this code with PyTorch, as nvcc compiles it.
fn expected(copies: &[StridedCopy], source: &[u8], target_bytes: usize) -> Vec<u8> {
    let mut words = vec![u64::from_ne_bytes([POISON; 8]); target_bytes.div_ceil(8)];
    let bases = (source.as_ptr().expose_provenance() as u64, words.as_mut_ptr().expose_provenance() as u64);
    let mut elements = Table::default();
    for copy in copies {
        let (source_bytes, target_bytes) = item_bytes(copy);
        for element in 0..copy.rows * copy.row_elements {
            let (row, column) = (element / copy.row_elements, element % copy.row_elements);
            let from = bases.0 + copy.source + row * copy.source_stride_bytes + column * source_bytes;
            let to = bases.1 + copy.target + element * target_bytes;
            elements.push(StridedCopy { source: from, target: to, row_elements: 1, rows: 1, ..*copy }).unwrap();
        }
    }
    // SAFETY: each task reads one element of `source` and writes one element to `words`.
    unsafe { run_on_host(bytes_of(&elements).as_ptr(), elements.tasks().len() as u32, elements.tile_count(), 1, 1) };
    words.iter().flat_map(|word| word.to_ne_bytes()).take(target_bytes).collect()
}

/// Program that scatters: a pinned slot with the data and the table, and scratch memory and a target on the GPU.
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
    fn new(sim: &'a Sim, copies: &[StridedCopy], source: &[u8], target_bytes: usize) -> Upload<'a> {
        let gpu = Gpu::new(sim, 0);
        let table_at = source.len().next_multiple_of(8);
        let slot_bytes = table_at + table(copies, 0, 0).bytes();
        let (scratch, target) = (gpu.allocate(slot_bytes), gpu.allocate(target_bytes));
        let table = table(copies, scratch, target);
        let mut slot = MmapMut::map_anon(slot_bytes).unwrap();
        slot[..source.len()].copy_from_slice(source);
        table.write_to(&mut slot[table_at..]).unwrap();
        sim.cuda.register(&slot, REGISTER_PORTABLE).unwrap();
        let module = sim.cuda.load_module(&FATBIN).unwrap();
        Upload { sim, gpu, slot, scratch, target, target_bytes, module, table, table_at, is_registered: true }
    }

    fn copy(&self, stream: usize) -> Result<(), Status> {
        self.sim.cuda.copy(self.scratch, &self.slot, stream)
    }

    fn table_address(&self) -> u64 {
        self.scratch + self.table_at as u64
    }

    fn launch(&self, stream: usize) -> Result<(), Status> {
        self.launch_with(stream, GRID, self.table_address(), self.table.tile_count())
    }

    /// Copies the slot and launches, in the order of the stream.
    fn copy_and_launch(&self) {
        self.copy(self.gpu.stream).unwrap();
        self.launch(self.gpu.stream).unwrap();
    }

    fn end(&self, stream: usize) {
        self.sim.cuda.synchronize_stream(stream).unwrap();
        self.sim.cuda.destroy_stream(stream).unwrap();
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
        // A lost context returns an error, but the slot is unregistered.
        let _ = self.sim.cuda.synchronize_stream(self.gpu.stream);
        if self.is_registered {
            let _ = self.sim.cuda.unregister(self.slot.as_ptr().addr());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Covers copies and casts, all alignments, rows with gaps, empty copies, and tiles that end within a chunk. The
    /// launch writes exactly the expected bytes.
    #[test]
    fn launch_copies_and_casts_every_element(
        mut copies in proptest::collection::vec(copy(), 1..8), blocks in 1_u32..5, threads in 1_u32..=BLOCK_THREADS,
    ) {
        let (source_bytes, target_bytes) = arrange(&mut copies);
        let source = noise(source_bytes, 1);
        let sim = Sim::start(u64::from(blocks));
        let upload = Upload::new(&sim, &copies, &source, target_bytes);
        if !upload.table.tasks().is_empty() {
            upload.copy(upload.gpu.stream).unwrap();
            let (table, tiles) = (upload.table_address(), upload.table.tile_count());
            upload.launch_with(upload.gpu.stream, [blocks, threads], table, tiles).unwrap();
            prop_assert_eq!(sim.counters().launches, 1);
            prop_assert_eq!(upload.read(), expected(&copies, &source, target_bytes));
        }
    }
}

/// Returns copies of 10 and of 20 elements with different casts, from 100 bytes to 120 bytes.
fn two_copies() -> (Vec<StridedCopy>, Vec<u8>) {
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

/// Runs a test with an upload of [`two_copies`], as [`sim::assert_reported`] does.
fn assert_reported(kinds: &[Kind], test: impl Fn(&Sim, Upload<'_>)) {
    let (copies, source) = two_copies();
    sim::assert_reported(kinds, |sim| test(sim, Upload::new(sim, &copies, &source, 120)));
}

fn bytes_of_batch(batch: &Batch) -> &[u8] {
    // SAFETY: the type is plain data, and all its padding is initialized.
    unsafe { std::slice::from_raw_parts((&raw const *batch).cast::<u8>(), size_of::<Batch>()) }
}

#[test]
fn inline_tasks_are_copied_by_the_launch() {
    assert_reported(&[], |sim, upload| {
        let function = sim.cuda.function(upload.module, SCATTER_INLINE).unwrap();
        upload.copy(upload.gpu.stream).unwrap();
        for batch in upload.table.batches() {
            let mut parameters: Box<[u8; size_of::<Batch>()]> = Box::new([0; size_of::<Batch>()]);
            parameters[..4].copy_from_slice(&batch.task_count.to_le_bytes());
            parameters[4..8].copy_from_slice(&batch.tile_count.to_le_bytes());
            parameters[8..][..upload.table.bytes()].copy_from_slice(&bytes_of(&upload.table));
            assert_eq!(bytes_of_batch(&batch), *parameters);
            sim.cuda.launch(function, GRID, upload.gpu.stream, &[&*parameters]).unwrap();
            parameters.fill(0xEE);
        }
        let (copies, source) = two_copies();
        assert_eq!(upload.read(), expected(&copies, &source, 120));
    });
}

/// Program with a name, and the violations that the simulator reports.
type Case = (&'static str, &'static [Kind], fn(&Sim, Upload<'_>));

const CASES: &[Case] = &[
    ("launch that does not wait for the copy of the table and the data", &[Kind::MissingWait; 3], |sim, upload| {
        let copies = sim.cuda.create_stream().unwrap();
        upload.copy(copies).unwrap();
        sim.cuda.synchronize_stream(copies).unwrap();
        // The host has waited for the first copy, but does not wait for the second copy.
        upload.copy(copies).unwrap();
        upload.launch(upload.gpu.stream).unwrap();
        upload.end(copies);
    }),
    // An allocator may reuse a block that is still read.
    ("launch that does not wait for the last use of its target", &[Kind::MissingWait], |sim, upload| {
        let other = sim.cuda.create_stream().unwrap();
        sim.launch_read(other, upload.target + 119, 1).unwrap();
        upload.copy_and_launch();
        upload.end(other);
    }),
    ("use of the target that does not wait for the launch", &[Kind::MissingWait], |sim, upload| {
        upload.copy_and_launch();
        let other = sim.cuda.create_stream().unwrap();
        sim.launch_read(other, upload.target, 1).unwrap();
        upload.end(other);
    }),
    ("use of the scratch memory that does not wait for the launch", &[Kind::MissingWait], |sim, upload| {
        upload.copy_and_launch();
        let other = sim.cuda.create_stream().unwrap();
        sim.launch_write(other, upload.scratch + 12, 1, 0).unwrap();
        upload.end(other);
    }),
    ("target that ends beyond its block", &[Kind::OutOfBounds], |sim, upload| {
        let (mut copies, source) = two_copies();
        copies[1].row_elements += 1;
        drop(upload);
        let upload = Upload::new(sim, &copies, &source, 120);
        upload.copy(upload.gpu.stream).unwrap();
        assert_eq!(upload.launch(upload.gpu.stream), Err(Status::InvalidValue));
    }),
    ("table that ends beyond its block", &[Kind::OutOfBounds], |_, upload| {
        upload.copy(upload.gpu.stream).unwrap();
        assert_eq!(
            upload.launch_with(upload.gpu.stream, GRID, upload.table_address() + 8, 2),
            Err(Status::InvalidValue)
        );
    }),
    ("target freed before the wait", &[Kind::FreedInUse, Kind::DoubleFree], |sim, upload| {
        upload.copy_and_launch();
        sim.cuda.free(upload.target).unwrap();
    }),
    ("numbers of blocks and threads", &[Kind::BadLaunch; 4], |_, upload| {
        upload.copy(upload.gpu.stream).unwrap();
        for grid in [[0, 256], [1, 0], [1, 257], [1 << 31, 256]] {
            let result = upload.launch_with(upload.gpu.stream, grid, upload.table_address(), 2);
            assert_eq!(result, Err(Status::InvalidValue));
        }
    }),
    (
        "table that is not copied yet, is not aligned, or has another number of tiles",
        &[Kind::BadLaunch; 3],
        |_, upload| {
            assert_eq!(upload.launch(upload.gpu.stream), Err(Status::InvalidValue));
            upload.copy(upload.gpu.stream).unwrap();
            for (table, tiles) in [(upload.table_address() - 1, 2), (upload.table_address(), 3)] {
                assert_eq!(upload.launch_with(upload.gpu.stream, GRID, table, tiles), Err(Status::InvalidValue));
            }
        },
    ),
    ("tasks that write the same bytes", &[Kind::BadLaunch], |sim, upload| {
        assert_eq!(launch_inline(sim, &upload, |copies| copies[1].target = 36), Err(Status::InvalidValue));
    }),
    ("write by position that does not wait for its positions and values", &[Kind::MissingWait; 2], |sim, upload| {
        let other = sim.cuda.create_stream().unwrap();
        let [positions, values] = [upload.gpu.allocate(8), upload.gpu.allocate(8)];
        sim.write(positions, &[0, 0, 0, 0, 29, 0, 0, 0]).unwrap();
        // The same bytes, so that only the order is wrong.
        sim.launch_write(other, positions, 4, 0).unwrap();
        sim.launch_write(other, values, 8, 1).unwrap();
        launch_put(sim, &upload, positions, values).unwrap();
        upload.end(other);
    }),
    ("positions that do not ascend", &[Kind::BadLaunch], |sim, upload| {
        let positions = upload.gpu.allocate(8);
        sim.write(positions, &[5, 0, 0, 0, 5, 0, 0, 0]).unwrap();
        assert_eq!(launch_put(sim, &upload, positions, upload.gpu.allocate(8)), Err(Status::InvalidValue));
    }),
    ("position outside the target", &[Kind::OutOfBounds], |sim, upload| {
        let positions = upload.gpu.allocate(8);
        sim.write(positions, &[0, 0, 0, 0, 30, 0, 0, 0]).unwrap();
        assert_eq!(launch_put(sim, &upload, positions, upload.gpu.allocate(8)), Err(Status::InvalidValue));
    }),
    ("task that reads bytes that another task writes", &[Kind::BadLaunch], |sim, upload| {
        assert_eq!(launch_inline(sim, &upload, |copies| copies[0].source = 120), Err(Status::InvalidValue));
    }),
];

/// Writes two elements of 4 bytes to positions in the target.
fn launch_put(sim: &Sim, upload: &Upload<'_>, positions: u64, values: u64) -> Result<(), Status> {
    let mut table = Table::default();
    table
        .push_put(Put {
            positions,
            values,
            target: upload.target,
            elements: 2,
            target_elements: 1 << 32,
            item_bytes: 4,
        })
        .unwrap();
    let function = sim.cuda.function(upload.module, SCATTER_INLINE).unwrap();
    sim.cuda.launch(function, GRID, upload.gpu.stream, &[bytes_of_batch(&table.batches().next().unwrap())])
}

/// Launches changed tasks as parameters. Sources begin at byte 0 of a block, and targets at byte 100.
fn launch_inline(sim: &Sim, upload: &Upload<'_>, change: fn(&mut [StridedCopy])) -> Result<(), Status> {
    let (mut copies, _) = two_copies();
    change(&mut copies);
    copies.iter_mut().for_each(|copy| copy.target += 100);
    let block = upload.gpu.allocate(200);
    let function = sim.cuda.function(upload.module, SCATTER_INLINE).unwrap();
    let batch = table(&copies, block, block).batches().next().unwrap();
    sim.cuda.launch(function, GRID, upload.gpu.stream, &[bytes_of_batch(&batch)])
}

#[test]
fn invalid_launches_are_reported() {
    for (name, kinds, run) in CASES {
        println!("{name}");
        assert_reported(kinds, run);
    }
}

/// Changes the table between the call and the execution of the launch.
#[test]
fn changed_table_is_reported() {
    let (copies, source) = two_copies();
    let sim = Sim::start_lazy(0);
    let upload = Upload::new(&sim, &copies, &source, 120);
    upload.copy_and_launch();
    sim.write(upload.table_address(), &[0xEE]).unwrap();
    // The host writes immediately. The pending copy then restores the table, so only the missing wait is reported.
    drop(upload);
    assert_eq!(sim.finish().kinds(), [Kind::MissingWait]);
}

#[test]
fn modules_end_with_their_context() {
    assert_reported(&[Kind::UseAfterFree, Kind::UseAfterFree, Kind::DoubleFree, Kind::WrongContext], |sim, upload| {
        assert_eq!(sim.cuda.load_module(b"ELF!"), Err(Status::InvalidImage));
        assert_eq!(sim.cuda.function(upload.module, c"fst_unknown"), Err(Status::NotFound));
        assert_eq!(sim.counters().live_modules, 1);
        let function = sim.cuda.function(upload.module, SCATTER).unwrap();
        sim.cuda.unload_module(upload.module).unwrap();
        assert_eq!(sim.cuda.function(upload.module, SCATTER), Err(Status::InvalidHandle));
        assert_eq!(sim.cuda.launch(function, GRID, upload.gpu.stream, &[]), Err(Status::InvalidHandle));
        assert_eq!(sim.cuda.unload_module(upload.module), Err(Status::InvalidHandle));

        let other = Gpu::new(sim, 1);
        let module = sim.cuda.load_module(&FATBIN).unwrap();
        let function = sim.cuda.function(module, SCATTER).unwrap();
        sim.cuda.set_current(upload.gpu.context).unwrap();
        assert_eq!(sim.cuda.launch(function, GRID, upload.gpu.stream, &[]), Err(Status::InvalidHandle));
        drop(other);
        assert_eq!(sim.counters().live_modules, 0);
    });
}
