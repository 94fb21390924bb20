//! Tests of the kernel's table. `kernels.rs` launches random tables.

use fst::cast::put::Put;
use fst::cast::scatter::{BATCH_TASKS, StridedCopy, TASK_BYTES, TILE_BYTES, TILE_POSITIONS, Table, Task};
use fst::dtype::Dtype;
use fst::error::Kind;

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
fn contiguous_rows_merge() {
    let mut table = Table::default();
    table.push(bytes(0, 100, 1 << 30, 100)).unwrap();
    assert_eq!((table.tasks()[0].rows, table.tasks()[0].row_elements), (1, 100 << 30));
}

#[test]
fn unsupported_copies_are_rejected() {
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
fn unsupported_puts_are_rejected() {
    let good = Put { positions: 4, values: 16, target: 32, elements: 1, target_elements: 1, item_bytes: 16 };
    Table::default().push_put(good).unwrap();
    for bad in [
        Put { positions: 6, ..good },
        Put { values: 8, ..good },
        Put { target: 40, ..good },
        Put { item_bytes: 3, ..good },
        Put { elements: 1 << 48, ..good },
    ] {
        assert_eq!(Table::default().push_put(bad).unwrap_err().kind(), Kind::Internal, "{bad:?}");
    }
}

#[test]
fn serialized_table_matches_the_kernel() {
    let mut table = Table::default();
    table.push(StridedCopy { target: 64, from: Dtype::F64, to: Dtype::F8E8M0, ..bytes(0x0102, 3, 2, 50) }).unwrap();
    let elements = TILE_POSITIONS + 1;
    table
        .push_put(Put { positions: 20, values: 6, target: 2, elements: 0, target_elements: 1, item_bytes: 2 })
        .unwrap();
    table.push_put(Put { positions: 20, values: 6, target: 2, elements, target_elements: 2, item_bytes: 2 }).unwrap();
    table.push(bytes(5, 1, 1, 0)).unwrap();
    let mut slot = [0xEE; 3 * TASK_BYTES + 3];
    assert_eq!(table.write_to(&mut slot[..3 * TASK_BYTES - 1]).unwrap_err().kind(), Kind::Internal);
    table.write_to(&mut slot).unwrap();
    let mut first = [0; TASK_BYTES];
    for (at, value) in [(0, 2), (1, 1), (8, 64), (16, 3), (24, 50), (32, 2), (40, 7), (41, 44)] {
        first[at] = value;
    }
    let mut second = [0; TASK_BYTES];
    for (at, value) in [(0, 6), (8, 2), (16, 1), (17, 16), (24, 20), (32, 1), (36, 1), (42, 2)] {
        second[at] = value;
    }
    assert_eq!(slot[..TASK_BYTES], first);
    assert_eq!(slot[TASK_BYTES..2 * TASK_BYTES], second);
    // The last task begins at tile 3, because the first task has one tile and the second task two.
    assert_eq!((slot[2 * TASK_BYTES], slot[2 * TASK_BYTES + 36]), (5, 3));
    assert_eq!(slot[3 * TASK_BYTES..], [0xEE; 3]);
}

#[test]
fn batches_contain_all_tasks() {
    let mut table = Table::default();
    (0..2 * BATCH_TASKS as u64 + 1).for_each(|i| table.push(bytes(i, 1 + i * 300, 1, 0)).unwrap());
    let mut first = 0;
    let mut tasks = Vec::new();
    for batch in table.batches() {
        let count = usize::try_from(batch.task_count).unwrap();
        let mut batch_tasks = batch.tasks[..count].to_vec();
        batch_tasks.iter_mut().for_each(|task| task.first_tile += first);
        tasks.extend(batch_tasks);
        assert!(batch.tasks[count..].iter().all(|task| *task == Task::default()));
        first += batch.tile_count;
    }
    assert_eq!(tasks, table.tasks());
    assert_eq!(first, table.tile_count());
    assert_eq!(Table::default().batches().count(), 0);
}
