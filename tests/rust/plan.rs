//! Tests of plans, which are executed on memory buffers that record every read and write.

use crate::host_load::slice;
use fst::cast::elements::Cast;
use fst::checkpoint::region::{IndexRange, TensorRegion};
use fst::dtype::Dtype;
use fst::error::Kind;
use fst::format::header::Entry;
use fst::plan::{Chunk, Destination, Limits, Read, SlotCopy, pieces, plan};
use proptest::prelude::*;
use std::collections::HashSet;

const DATA_BEGIN: u64 = 100;

fn entry(dtype: Dtype, shape: &[u64], begin: u64) -> Entry<'_> {
    let bytes = shape.iter().product::<u64>() * dtype.bits() / 8;
    Entry { name: "x", dtype, shape, begin, end: begin + bytes, tensors: None }
}

/// Returns the byte of a file at `offset`.
fn file_byte(source: usize, offset: u64) -> u8 {
    (offset.wrapping_mul(2_654_435_761).wrapping_add(source as u64 * 40_503) >> 11) as u8
}

/// Returns the bytes of an index region, index by index.
fn region_bytes(entry: Entry<'_>, source: usize, index_ranges: &[IndexRange]) -> Vec<u8> {
    let item = entry.dtype.item_bytes();
    let mut begins = vec![0];
    for (index_range, size) in index_ranges.iter().zip(entry.shape) {
        let indices = (0..index_range.length).map(|index| index_range.start + index * index_range.step);
        begins = begins.iter().flat_map(|begin| indices.clone().map(move |index| begin * size + index)).collect();
    }
    let bytes_of = |begin: u64| (0..item).map(move |byte| file_byte(source, entry.begin + begin * item + byte));
    begins.into_iter().flat_map(bytes_of).collect()
}

/// Replaces the cast of an element by a hash of its bytes, with the size of the result.
fn mock_cast(cast: Option<Cast>, item: &[u8]) -> Vec<u8> {
    let Some(cast) = cast else { return item.to_vec() };
    let mix = item.iter().fold(0_u8, |mix, byte| mix.rotate_left(3) ^ byte);
    (0..cast.to.item_bytes() as u8).map(|index| mix.wrapping_add(index)).collect()
}

/// Result of an executed plan: memory, and the number of writes of each byte.
struct Execution {
    memory: Vec<u8>,
    written: Vec<u32>,
}

fn execute(chunks: &[Chunk], limits: &Limits, memory_bytes: usize, data: &[std::ops::Range<u64>]) -> Execution {
    let mut execution = Execution { memory: vec![0; memory_bytes], written: vec![0; memory_bytes] };
    let check_read = |source: usize, begin: u64, length: usize| {
        assert!(length > 0, "an empty read");
        assert!(begin >= data[source].start && begin + length as u64 <= data[source].end, "a read outside the data");
    };
    for chunk in chunks {
        match chunk {
            &Chunk::InPlace { source, offset, length, address, .. } => {
                assert!(length as u64 <= limits.chunk_bytes && limits.in_place_bytes.is_some());
                check_read(source, offset, length);
                for index in 0..length as u64 {
                    execution.memory[(address + index) as usize] = file_byte(source, offset + index);
                    execution.written[(address + index) as usize] += 1;
                }
            }
            Chunk::Staged { source, bytes, reads, copies } => {
                assert!(*bytes as u64 <= limits.chunk_bytes, "a chunk of {bytes}");
                assert!(!reads.is_empty() && !copies.is_empty() && copies.len() <= limits.copies_max);
                let mut slot = vec![None; *bytes];
                let mut widened = vec![false; *bytes];
                for read in reads {
                    check_read(*source, read.offset, read.length);
                    // No other read overlaps this read, widened to the alignment, in the slot.
                    let head = (read.offset % limits.alignment) as usize;
                    let end = (head + read.length).next_multiple_of(limits.alignment as usize);
                    assert_eq!((read.slot_begin - head) % limits.alignment as usize, 0);
                    for byte in &mut widened[read.slot_begin - head..][..end] {
                        assert!(!std::mem::replace(byte, true), "two widened reads overlap in a slot");
                    }
                    for index in 0..read.length {
                        let byte = &mut slot[read.slot_begin + index];
                        assert!(byte.is_none(), "two reads overlap in a slot");
                        *byte = Some(file_byte(*source, read.offset + index as u64));
                    }
                }
                for copy in copies {
                    let item_bytes = copy.cast.map_or(1, |cast| cast.from.item_bytes() as usize);
                    for row in 0..copy.rows {
                        let begin = copy.slot_begin + row * copy.slot_stride;
                        let found = slot[begin..begin + copy.row_bytes].iter();
                        let found: Vec<u8> = found.map(|byte| byte.expect("the byte was read")).collect();
                        let items = found.chunks_exact(item_bytes);
                        assert!(items.remainder().is_empty(), "a copy splits an element");
                        let target: Vec<u8> = items.flat_map(|item| mock_cast(copy.cast, item)).collect();
                        assert_eq!(target.len(), copy.target_row_bytes());
                        for (to, byte) in (copy.address as usize + row * target.len()..).zip(target) {
                            execution.memory[to] = byte;
                            execution.written[to] += 1;
                        }
                    }
                }
                check_pieces(*source, reads, copies, &execution.memory);
            }
        }
    }
    execution
}

/// Checks that the pieces of a chunk, if it has any, are the bytes that its copies have written.
fn check_pieces(source: usize, reads: &[Read], copies: &[SlotCopy], memory: &[u8]) {
    let copied: usize = copies.iter().map(SlotCopy::bytes).sum();
    let read: usize = reads.iter().map(|read| read.length).sum();
    let Some(pieces) = pieces(reads, copies, 1) else {
        let has_cast = copies.iter().any(|copy| copy.cast.is_some());
        assert!(has_cast || copied > used_bytes(reads, copies), "pieces exist: {copies:?}");
        return;
    };
    assert!(copied <= read);
    assert_eq!(pieces.iter().map(|piece| piece.length).sum::<usize>(), copied);
    assert!(pieces.windows(2).all(|pair| pair[0].offset + pair[0].length as u64 <= pair[1].offset));
    for piece in pieces {
        for index in 0..piece.length as u64 {
            assert_eq!(memory[(piece.address + index) as usize], file_byte(source, piece.offset + index));
        }
    }
}

/// Returns the number of different bytes of the file that the copies use. Two reads of a chunk may bring the same byte.
fn used_bytes(reads: &[Read], copies: &[SlotCopy]) -> usize {
    let offset_of = |slot: usize| {
        let read = reads.iter().find(|read| (read.slot_begin..read.slot_begin + read.length).contains(&slot)).unwrap();
        read.offset + (slot - read.slot_begin) as u64
    };
    let slot_rows = copies.iter().flat_map(|copy| {
        (0..copy.rows).map(|row| copy.slot_begin + row * copy.slot_stride).map(|begin| begin..begin + copy.row_bytes)
    });
    slot_rows.flatten().map(offset_of).collect::<HashSet<u64>>().len()
}

#[derive(Clone, Debug)]
struct Case {
    source: usize,
    shape: Vec<u64>,
    dtype: Dtype,
    index_ranges: Vec<IndexRange>,
    cast: Option<Cast>,
    cuts: Vec<prop::sample::Index>,
}

fn case() -> impl Strategy<Value = Case> {
    let dtype = prop::sample::select(vec![Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::F64, Dtype::Bool]);
    let shape = prop::collection::vec(0_u64..9, 0..4);
    (
        0_usize..3,
        shape,
        dtype,
        prop::option::of(any::<[prop::sample::Index; 3]>()),
        prop::option::of(prop::sample::select(vec![Dtype::BF16, Dtype::F32, Dtype::F64])),
        prop::collection::vec(any::<prop::sample::Index>(), 0..4),
    )
        .prop_map(|(source, shape, dtype, picks, to, cuts)| {
            let index_ranges = index_ranges_of(&shape, picks.as_ref());
            let cast = to.filter(|_| dtype.is_castable()).and_then(|to| Cast::new(dtype, to));
            Case { source, shape, dtype, index_ranges, cast, cuts }
        })
}

/// Returns the whole shape without picks, and else a slice of one dimension or any index region.
fn index_ranges_of(shape: &[u64], picks: Option<&[prop::sample::Index; 3]>) -> Vec<IndexRange> {
    let index_range = |(dim, &size): (usize, &u64)| {
        // Derive other numbers for each dimension from the same three picks.
        let pick = |which: usize, count: u64| Some((picks?[which].index(1 << 20) as u64 >> (3 * dim)) % count);
        let is_whole = picks.is_none_or(|picks| picks[2].index(2) == 0 && picks[0].index(shape.len()) != dim);
        let index_range = pick(0, size + 1).zip(pick(1, 4)).map(|(start, step)| {
            let length_max = (size - start).div_ceil(1 + step);
            let length = length_max - pick(2, length_max + 1).unwrap_or(0);
            IndexRange { start, length, step: 1 + step }
        });
        index_range.filter(|_| !is_whole).unwrap_or(IndexRange::whole(size))
    };
    shape.iter().enumerate().map(index_range).collect()
}

fn limits() -> impl Strategy<Value = Limits> {
    let alignment = prop::sample::select(vec![1_u64, 4, 16]);
    let unit_bytes = prop::sample::select(vec![1_u64, 3, 16, 64]);
    let first_bytes = prop::option::of(1_u64..60);
    (alignment, 1_u64..20, 0_u64..20, prop::option::of(1_u64..60), 1_usize..20, unit_bytes, first_bytes).prop_map(
        |(alignment, chunk, gap_bytes, in_place_bytes, copies_max, unit_bytes, first_bytes)| Limits {
            chunk_bytes: (7 + chunk * 9).next_multiple_of(alignment) + alignment,
            gap_bytes: gap_bytes.max(alignment),
            in_place_bytes: in_place_bytes.filter(|_| alignment == 1),
            alignment,
            copies_max,
            unit_bytes,
            first_bytes,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    #[test]
    fn every_byte_is_written_once_with_its_value(cases in prop::collection::vec(case(), 0..8), limits in limits(), repeat in prop::option::of(any::<[prop::sample::Index; 3]>())) {
        let mut cases = cases;
        let repeat = repeat.filter(|_| !cases.is_empty());
        if let Some(picks) = &repeat {
            // Add a second region of the same tensor, which may overlap the first region.
            let index_ranges = index_ranges_of(&cases[0].shape, Some(picks).filter(|_| picks[0].index(3) > 0));
            cases.push(Case { index_ranges, ..cases[0].clone() });
        }
        let mut ends = [DATA_BEGIN; 3];
        let (mut regions, mut destinations, mut expectation) = (Vec::new(), Vec::new(), Vec::new());
        for (index, case) in cases.iter().enumerate() {
            let is_repeat = repeat.is_some() && index + 1 == cases.len();
            let begin = if is_repeat { DATA_BEGIN } else { ends[case.source] };
            let entry = entry(case.dtype, &case.shape, begin);
            if !is_repeat {
                ends[case.source] = entry.end;
            }
            let tensor = TensorRegion::indexed(case.source, entry, &case.index_ranges).unwrap();
            let bytes = region_bytes(entry, case.source, &case.index_ranges);
            prop_assert_eq!(tensor.bytes(), bytes.len() as u64);
            // Split the tensor into ranges with a destination each.
            let item_bytes = case.cast.map_or(1, |cast| cast.from.item_bytes() as usize);
            let items = bytes.len() / item_bytes;
            let mut cuts: Vec<usize> = case.cuts.iter().map(|cut| cut.index(items + 1) * item_bytes).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            for pair in cuts.windows(2) {
                let (begin, end) = (pair[0] as u64, pair[1] as u64);
                let address = expectation.len() as u64;
                destinations.push(Destination { tensor: regions.len(), begin, end, address, cast: case.cast });
                let items = bytes[pair[0]..pair[1]].chunks_exact(item_bytes);
                expectation.extend(items.flat_map(|item| mock_cast(case.cast, item)));
            }
            regions.push(tensor);
        }
        let data: Vec<_> = ends.iter().map(|&end| DATA_BEGIN..end).collect();
        let chunks = plan(&regions, &destinations, &limits).unwrap();
        let execution = execute(&chunks, &limits, expectation.len(), &data);
        prop_assert!(execution.written.iter().all(|&count| count == 1), "{:?}", execution.written);
        prop_assert_eq!(execution.memory, expectation);
    }
}

proptest! {
    #[test]
    fn byte_of_several_ranges_is_read_once(
        ranges in prop::collection::vec((0_u64..5000, 1_u64..3000), 1..6),
        (alignment, chunk_bytes) in prop::sample::select(vec![(1, 1000), (1, 77), (16, 512)]),
        in_place_bytes in prop::option::of(1_u64..600),
        first_bytes in prop::option::of(1_u64..200),
        is_cast in any::<bool>(),
    ) {
        let tensor = entry(Dtype::BF16, &[8000], DATA_BEGIN);
        let cast = Cast::new(Dtype::BF16, Dtype::F32).filter(|_| is_cast);
        let ranges: Vec<_> = ranges.iter().map(|(begin, length)| 2 * begin..2 * (begin + length)).collect();
        let (mut regions, mut destinations, mut expected) = (Vec::new(), Vec::new(), Vec::new());
        for (index, range) in ranges.iter().enumerate() {
            regions.push(slice(0, tensor, 0, range.start / 2, (range.end - range.start) / 2));
            let end = range.end - range.start;
            destinations.push(Destination { tensor: index, begin: 0, end, address: expected.len() as u64, cast });
            let bytes: Vec<u8> = range.clone().map(|offset| file_byte(0, DATA_BEGIN + offset)).collect();
            let item_bytes = cast.map_or(1, |cast| cast.from.item_bytes() as usize);
            expected.extend(bytes.chunks_exact(item_bytes).flat_map(|item| mock_cast(cast, item)));
        }
        let in_place_bytes = in_place_bytes.filter(|_| alignment == 1);
        let limits = Limits { chunk_bytes, alignment, in_place_bytes, gap_bytes: if alignment == 1 { 0 } else { alignment }, first_bytes, ..LIMITS };
        let chunks = plan(&regions, &destinations, &limits).unwrap();
        let execution = execute(&chunks, &limits, expected.len(), std::slice::from_ref(&(tensor.begin..tensor.end)));
        prop_assert_eq!(execution.memory, expected);
        let union = (0..16_000).filter(|byte| ranges.iter().any(|range| range.contains(byte))).count() as u64;
        let gaps = limits.gap_bytes * ranges.len() as u64;
        prop_assert!((union..=union + gaps).contains(&read_bytes(&chunks)), "{} of {union}", read_bytes(&chunks));
    }
}

const LIMITS: Limits = Limits {
    chunk_bytes: 1000,
    gap_bytes: 16,
    in_place_bytes: None,
    alignment: 1,
    copies_max: 100,
    unit_bytes: 1,
    first_bytes: None,
};

fn whole_plan(regions: &[TensorRegion], limits: &Limits) -> Vec<Chunk> {
    let mut address = 0;
    let destination = |(index, tensor): (usize, &TensorRegion)| {
        let begin = address;
        address += tensor.bytes();
        Destination { tensor: index, begin: 0, end: tensor.bytes(), address: begin, cast: None }
    };
    let destinations: Vec<_> = regions.iter().enumerate().map(destination).collect();
    plan(regions, &destinations, limits).unwrap()
}

fn read_bytes(chunks: &[Chunk]) -> u64 {
    chunks
        .iter()
        .map(|chunk| match chunk {
            Chunk::InPlace { length, .. } => *length as u64,
            Chunk::Staged { reads, .. } => reads.iter().map(|read| read.length as u64).sum(),
        })
        .sum()
}

#[test]
fn adjacent_tensors_are_read_together_in_file_order() {
    let tensors: Vec<_> = (0..50).rev().map(|index| entry(Dtype::U8, &[10], DATA_BEGIN + index * 10)).collect();
    let regions: Vec<_> = tensors.iter().map(|tensor| TensorRegion::whole(0, *tensor).unwrap()).collect();
    let chunks = whole_plan(&regions, &LIMITS);
    assert_eq!(chunks.len(), 1);
    let Chunk::Staged { reads, copies, .. } = &chunks[0] else { panic!("{chunks:?}") };
    assert_eq!((reads.len(), reads[0].offset, reads[0].length, copies.len()), (1, DATA_BEGIN, 500, 50));
    assert_eq!(whole_plan(&regions, &Limits { copies_max: 20, ..LIMITS }).len(), 3);
}

#[test]
fn long_rows_are_divided_between_units() {
    let tensor = entry(Dtype::F32, &[1000], DATA_BEGIN);
    let region = slice(0, tensor, 0, 30, 900);
    let limits = Limits { in_place_bytes: Some(0), unit_bytes: 512, ..LIMITS };
    let begins: Vec<u64> = whole_plan(&[region], &limits)
        .iter()
        .map(|chunk| match chunk {
            Chunk::InPlace { offset, .. } => offset - DATA_BEGIN,
            Chunk::Staged { .. } => panic!("{chunk:?}"),
        })
        .collect();
    // A chunk of 1000 bytes has room for one unit, the first one also for a part of another.
    assert_eq!(begins, [120, 1024, 1536, 2048, 2560, 3072, 3584]);
}

#[test]
fn columns_of_the_same_rows_are_read_once_across_chunks() {
    let shape = [3000, 96];
    for slices in [2, 3, 8] {
        for (alignment, chunk_bytes) in [(1, 4096), (1, 70_001), (512, 8192)] {
            for begin in [DATA_BEGIN, DATA_BEGIN + 5000] {
                let limits = Limits { chunk_bytes, alignment, gap_bytes: 1000, ..LIMITS };
                let entry = entry(Dtype::U8, &shape, begin);
                let columns = |index: u64| slice(0, entry, 1, index * 96 / slices, 96 / slices);
                let regions: Vec<TensorRegion> = (0..slices).map(columns).collect();
                let chunks = whole_plan(&regions, &limits);
                assert_eq!(read_bytes(&chunks), 3000 * 96, "{slices} slices, {limits:?}, from byte {begin}");
            }
        }
    }
}

#[test]
fn overlapping_regions_with_large_gaps_are_read_once_and_copied_together() {
    let entry = entry(Dtype::U8, &[300, 400], DATA_BEGIN);
    for (alignment, chunk_bytes) in [(1, 1000), (1, 70_001), (512, 8192)] {
        let limits = Limits { chunk_bytes, alignment, gap_bytes: alignment.max(16), copies_max: 1000, ..LIMITS };
        // Two regions request each half.
        let columns = [(0, 200), (200, 200), (0, 200), (200, 200)];
        let regions: Vec<TensorRegion> =
            columns.iter().map(|&(start, length)| slice(0, entry, 1, start, length)).collect();
        let chunks = whole_plan(&regions, &limits);
        assert_eq!(read_bytes(&chunks), 300 * 400, "{limits:?}");
        for chunk in &chunks {
            let Chunk::Staged { copies, .. } = chunk else { panic!("{chunk:?}") };
            assert!(copies.len() <= 4, "{copies:?}");
        }
    }
    // The gap between the two columns is not read.
    let regions = [(0, 100), (200, 200), (0, 100)].map(|(start, length)| slice(0, entry, 1, start, length));
    assert_eq!(read_bytes(&whole_plan(&regions, &LIMITS)), 300 * 300);
}

#[test]
fn rows_are_read_with_small_gaps_and_without_large_ones() {
    // 40 rows of 2 bytes, 100 apart.
    let tensor = entry(Dtype::U8, &[40, 100], DATA_BEGIN);
    let chunks = whole_plan(&[slice(0, tensor, 1, 7, 2)], &LIMITS);
    assert_eq!(read_bytes(&chunks), 80);
    let Chunk::Staged { copies, .. } = &chunks[0] else { panic!("{chunks:?}") };
    assert_eq!((chunks.len(), copies.len(), copies[0].row_bytes), (1, 1, 80));
    // 40 rows of 10 bytes, 20 apart.
    let tensor = entry(Dtype::U8, &[40, 20], DATA_BEGIN);
    let chunks = whole_plan(&[slice(0, tensor, 1, 0, 10)], &LIMITS);
    let Chunk::Staged { reads, copies, .. } = &chunks[0] else { panic!("{chunks:?}") };
    assert_eq!((reads.len(), copies.len()), (1, 1));
    assert_eq!((copies[0].rows, copies[0].row_bytes, copies[0].slot_stride), (40, 10, 20));
    // Every second row.
    let regions = indexed(&[40, 100], &[(0, 20, 2), (0, 100, 1)]);
    assert_eq!(read_bytes(&whole_plan(&[regions], &LIMITS)), 2000);
    // Elements with small gaps are read with the gaps, from the first element to the last.
    let regions = indexed(&[100], &[(10, 20, 3)]);
    assert_eq!(read_bytes(&whole_plan(&[regions], &LIMITS)), 58);
}

fn indexed(shape: &[u64], index_ranges: &[(u64, u64, u64)]) -> TensorRegion {
    let index_ranges: Vec<_> =
        index_ranges.iter().map(|&(start, length, step)| IndexRange { start, length, step }).collect();
    TensorRegion::indexed(0, entry(Dtype::U8, shape, DATA_BEGIN), &index_ranges).unwrap()
}

#[test]
fn index_regions_merge_contiguous_rows() {
    // Index ranges of the shape [4, 6, 10], bytes of a row, and count and bytes of each stride.
    let whole = (0, 10, 1);
    for (index_ranges, row_bytes, strides) in [
        ([(0, 4, 1), (0, 6, 1), whole], 240, vec![]),
        ([(1, 2, 1), (0, 6, 1), whole], 120, vec![]),
        ([(2, 1, 1), (1, 3, 1), whole], 30, vec![]),
        ([(0, 4, 1), (1, 3, 1), whole], 30, vec![(4, 60)]),
        ([(0, 2, 2), (0, 6, 1), whole], 60, vec![(2, 120)]),
        ([(0, 4, 1), (0, 6, 1), (2, 5, 1)], 5, vec![(24, 10)]),
        ([(0, 4, 1), (0, 3, 2), whole], 10, vec![(12, 20)]),
        ([(0, 4, 1), (0, 6, 1), (0, 5, 2)], 1, vec![(120, 2)]),
        ([(0, 4, 1), (0, 2, 4), (0, 5, 2)], 1, vec![(4, 60), (2, 40), (5, 2)]),
        ([(0, 4, 1), (3, 1, 1), (7, 1, 1)], 1, vec![(4, 60)]),
        ([(0, 4, 1), (6, 0, 1), whole], 0, vec![]),
    ] {
        let range = indexed(&[4, 6, 10], &index_ranges).range;
        assert_eq!(range.row_bytes, row_bytes, "{index_ranges:?}");
        let found: Vec<_> = range.strides.iter().map(|stride| (stride.count, stride.bytes)).collect();
        assert_eq!(found, strides, "{index_ranges:?}");
    }
}

#[test]
fn index_regions_outside_the_shape_are_rejected() {
    let tensor = entry(Dtype::F32, &[4, 6], DATA_BEGIN);
    let whole = IndexRange::whole(6);
    for (start, length, step) in
        [(0, 5, 1), (4, 1, 1), (5, 0, 1), (0, 3, 2), (0, 1, 0), (1, u64::MAX, 1), (0, 3, u64::MAX)]
    {
        let error = TensorRegion::indexed(0, tensor, &[IndexRange { start, length, step }, whole]).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidArgument, "{start} {length} {step}");
        assert!(error.to_string().contains("dimension 0"), "{error}");
    }
    for index_ranges in [&[][..], &[whole], &[IndexRange::whole(4), whole, whole]] {
        assert_eq!(TensorRegion::indexed(0, tensor, index_ranges).unwrap_err().kind(), Kind::InvalidArgument);
    }
    assert_eq!(
        TensorRegion::indexed(0, tensor, &[IndexRange { start: 4, length: 0, step: 9 }, whole]).unwrap().bytes(),
        0
    );
}

#[test]
fn unsupported_dtypes_are_rejected_by_name() {
    for (dtype, shape) in [(Dtype::F6E2M3, [4]), (Dtype::F6E3M2, [8])] {
        let error = TensorRegion::whole(0, entry(dtype, &shape, DATA_BEGIN)).unwrap_err();
        assert_eq!(error.kind(), Kind::UnsupportedDtype);
        assert!(error.to_string().contains("tensor \"x\"") && error.to_string().contains(dtype.name()));
    }
    assert_eq!(TensorRegion::whole(0, entry(Dtype::F4, &[3, 4], DATA_BEGIN)).unwrap().shape, [3, 2]);
    // F4 packs two adjacent elements of the last dimension, which has only one element here.
    assert_eq!(
        TensorRegion::whole(0, entry(Dtype::F4, &[4, 1], DATA_BEGIN)).unwrap_err().kind(),
        Kind::UnsupportedDtype
    );
}

#[test]
fn destinations_that_do_not_fit_their_tensor_are_internal_errors() {
    let regions = [TensorRegion::whole(0, entry(Dtype::BF16, &[2], DATA_BEGIN)).unwrap()];
    let cast = Cast::new(Dtype::BF16, Dtype::F32);
    // The last two split an element.
    for (tensor, begin, end, cast) in
        [(1, 0, 1, None), (0, 0, 5, None), (0, 3, 2, None), (0, 0, 3, cast), (0, 1, 4, cast)]
    {
        let destination = Destination { tensor, begin, end, address: 0, cast };
        assert_eq!(plan(&regions, &[destination], &LIMITS).unwrap_err().kind(), Kind::Internal);
    }
}

#[test]
fn rows_of_overlapping_slices_are_copied_separately() {
    let tensor = entry(Dtype::U8, &[3, 300], DATA_BEGIN);
    let columns = |length| [IndexRange::whole(3), IndexRange { start: 0, length, step: 1 }];
    let regions = [290, 1].map(|length| TensorRegion::indexed(0, tensor, &columns(length)).unwrap());
    let execution =
        execute(&whole_plan(&regions, &LIMITS), &LIMITS, 873, std::slice::from_ref(&(tensor.begin..tensor.end)));
    let expected = [region_bytes(tensor, 0, &columns(290)), region_bytes(tensor, 0, &columns(1))].concat();
    assert_eq!(execution.memory, expected);
}
