//! The kernel's table: its tiles cover every element of every piece exactly once.

use fst::convert::scatter::{BATCH_TASKS, StridedCopy, TASK_BYTES, TILE_BYTES, Table, Task, has_cast};
use fst::dtype::Dtype;
use fst::error::Kind;
use proptest::prelude::*;

const FLOATS: [Dtype; 9] = [
    Dtype::F16,
    Dtype::BF16,
    Dtype::F32,
    Dtype::F64,
    Dtype::F8E4M3,
    Dtype::F8E5M2,
    Dtype::F8E4M3Fnuz,
    Dtype::F8E5M2Fnuz,
    Dtype::F8E8M0,
];

/// Bytes of an element on both sides, as the kernel finds them from a task's numbers.
fn item_bytes(task: &Task) -> (u64, u64) {
    let bytes = |code: u8| {
        let dtype = Dtype::all().find(|dtype| dtype.scalar_type() == Some(i8::try_from(code).unwrap())).unwrap();
        dtype.item_bytes()
    };
    if task.from == task.to { (1, 1) } else { (bytes(task.from), bytes(task.to)) }
}

/// Where the tiles of a task say that each of its elements comes from and goes to.
fn copies(task: &Task, tile_count: u32) -> Vec<(u64, u64)> {
    let (source_bytes, target_bytes) = item_bytes(task);
    let per_tile = TILE_BYTES / source_bytes.max(target_bytes);
    let elements = u64::from(task.rows) * task.row_elements;
    let tiles = (0..u64::from(tile_count)).map(|tile| tile * per_tile..((tile + 1) * per_tile).min(elements));
    let place = |element: u64| {
        let (row, column) = (element / task.row_elements, element % task.row_elements);
        (task.source + row * task.source_stride_bytes + column * source_bytes, task.target + element * target_bytes)
    };
    tiles.inspect(|tile| assert!(!tile.is_empty(), "a tile without work")).flatten().map(place).collect()
}

/// The same, from the piece itself.
fn expected(piece: &StridedCopy) -> Vec<(u64, u64)> {
    let (source_bytes, target_bytes) =
        if piece.from == piece.to { (1, 1) } else { (piece.from.item_bytes(), piece.to.item_bytes()) };
    let rows = (0..piece.rows).flat_map(|row| (0..piece.row_elements).map(move |column| (row, column)));
    rows.enumerate()
        .map(|(element, (row, column))| {
            let source = piece.source + row * piece.source_stride_bytes + column * source_bytes;
            (source, piece.target + element as u64 * target_bytes)
        })
        .collect()
}

fn piece() -> impl Strategy<Value = StridedCopy> {
    let all: Vec<Dtype> = Dtype::all().collect();
    let pairs: Vec<(Dtype, Dtype)> = all
        .iter()
        .flat_map(|&from| all.iter().map(move |&to| (from, to)))
        .filter(|&(from, to)| from == to || has_cast(from, to))
        .collect();
    let sizes = prop_oneof![
        (0_u64..40, 0_u64..40),
        (0_u64..3, 0_u64..40_000),
        (1_u64..3, prop_oneof![Just(2048_u64), Just(4096), Just(8192), Just(16384)])
    ];
    (proptest::sample::select(pairs), sizes, 0_u64..100, 0_u64..5000, 0_u64..5000).prop_map(
        |((from, to), (rows, row_elements), gap, source, target)| {
            let width = if from == to { 1 } else { from.item_bytes() };
            let target = target * to.item_bytes();
            StridedCopy {
                source,
                target,
                row_elements,
                rows,
                source_stride_bytes: row_elements * width + gap,
                from,
                to,
            }
        },
    )
}

proptest! {
    #[test]
    fn tiles_cover_every_element_of_every_piece_once(pieces in proptest::collection::vec(piece(), 0..6)) {
        let mut table = Table::default();
        pieces.iter().for_each(|&piece| table.push(piece).unwrap());
        let ends = table.tasks().iter().skip(1).map(|task| task.first_tile).chain([table.tile_count()]);
        let counted: Vec<_> =
            table.tasks().iter().zip(ends).flat_map(|(task, end)| copies(task, end - task.first_tile)).collect();
        let expected: Vec<_> = pieces.iter().flat_map(expected).collect();
        prop_assert_eq!(counted, expected);
    }
}

fn bytes(source: u64, row_elements: u64, rows: u64, source_stride_bytes: u64) -> StridedCopy {
    StridedCopy { source, target: 0, row_elements, rows, source_stride_bytes, from: Dtype::U8, to: Dtype::U8 }
}

#[test]
fn rows_beyond_32_bits_are_split() {
    let rows = (1 << 32) + 5;
    let mut table = Table::default();
    table.push(bytes(7, 3, rows, 10)).unwrap();
    let [first, second] = table.tasks() else { panic!("{:?}", table.tasks()) };
    let step = u64::from(u32::MAX);
    assert_eq!((first.rows, first.source, first.target), (u32::MAX, 7, 0));
    assert_eq!((second.rows, second.source, second.target), (6, 7 + 10 * step, 3 * step));
    assert_eq!(u64::from(second.first_tile), (3 * step).div_ceil(TILE_BYTES));
    assert_eq!(table.tile_count(), second.first_tile + 1);
}

#[test]
fn rows_without_gaps_are_one_row() {
    let mut table = Table::default();
    table.push(bytes(0, 100, 1 << 30, 100)).unwrap();
    assert_eq!((table.tasks()[0].rows, table.tasks()[0].row_elements), (1, 100 << 30));
}

#[test]
fn what_the_kernel_cannot_do_is_refused() {
    let good = StridedCopy { from: Dtype::F32, to: Dtype::BF16, ..bytes(1, 10, 2, 64) };
    Table::default().push(good).unwrap();
    for bad in [
        StridedCopy { target: 1, ..good },
        StridedCopy { from: Dtype::C64, ..good },
        StridedCopy { to: Dtype::I32, ..good },
        StridedCopy { rows: u64::MAX, ..good },
        StridedCopy { source_stride_bytes: u64::MAX, ..good },
        StridedCopy { target: u64::MAX - 1, ..good },
        bytes(0, 1 << 47, 1, 0),
    ] {
        assert_eq!(Table::default().push(bad).unwrap_err().kind(), Kind::Internal, "{bad:?}");
    }
}

#[test]
fn the_casts_are_those_of_numbers_to_floats() {
    for from in Dtype::all() {
        for to in Dtype::all() {
            let is_number = !matches!(from, Dtype::C64 | Dtype::F4 | Dtype::F6E2M3 | Dtype::F6E3M2);
            assert_eq!(has_cast(from, to), from != to && is_number && FLOATS.contains(&to), "{from} to {to}");
        }
    }
}

#[test]
fn a_table_in_a_slot_has_the_kernels_layout() {
    let mut table = Table::default();
    table.push(StridedCopy { target: 64, from: Dtype::F64, to: Dtype::F8E8M0, ..bytes(0x0102, 3, 2, 50) }).unwrap();
    table.push(bytes(5, 1, 1, 0)).unwrap();
    let mut slot = [0xEE; 2 * TASK_BYTES + 3];
    assert_eq!(table.write_to(&mut slot[..2 * TASK_BYTES - 1]).unwrap_err().kind(), Kind::Internal);
    table.write_to(&mut slot).unwrap();
    let mut first = [0; TASK_BYTES];
    for (at, value) in [(0, 2), (1, 1), (8, 64), (16, 3), (24, 50), (32, 2), (40, 7), (41, 44)] {
        first[at] = value;
    }
    assert_eq!(slot[..TASK_BYTES], first);
    // The second task begins behind the first one's only tile.
    assert_eq!((slot[TASK_BYTES], slot[TASK_BYTES + 36]), (5, 1));
    assert_eq!(slot[2 * TASK_BYTES..], [0xEE; 3]);
}

#[test]
fn batches_hold_the_same_tasks() {
    let mut table = Table::default();
    (0..2 * BATCH_TASKS as u64 + 1).for_each(|i| table.push(bytes(i, 1 + i * 300, 1, 0)).unwrap());
    let mut first = 0;
    let mut tasks = Vec::new();
    for batch in table.batches() {
        let count = usize::try_from(batch.task_count).unwrap();
        let mut kept = batch.tasks[..count].to_vec();
        kept.iter_mut().for_each(|task| task.first_tile += first);
        tasks.extend(kept);
        assert!(batch.tasks[count..].iter().all(|task| *task == Task::default()));
        first += batch.tile_count;
    }
    assert_eq!(tasks, table.tasks());
    assert_eq!(first, table.tile_count());
    assert_eq!(Table::default().batches().count(), 0);
}
