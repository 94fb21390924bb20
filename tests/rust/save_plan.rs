//! Plans of saves by ranks: all ranks simulated in memory.

use fst::dtype::Dtype;
use fst::ranks::mesh::{Mesh, MeshLayout, Placement};
use fst::ranks::save::{IndexBox, Layout, RankPlan, SavePlan, SaveRequest, SaveTensor};
use proptest::collection::vec;
use proptest::prelude::*;
use std::ops::Range;

const DTYPES: [Dtype; 4] = [Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::I64];

/// Mesh of some of the ranks, whose placements shard dimensions that `ndim` has.
fn mesh_layout(ranks: usize, ndim: usize) -> impl Strategy<Value = Layout> {
    let sharded = (0..ndim.max(1), 1_u64..3).prop_map(move |(dim, split_factor)| match ndim {
        0 => Placement::Replicated,
        _ => Placement::Sharded { dim, split_factor },
    });
    let placement = prop_oneof![Just(Placement::Replicated), sharded.clone(), sharded];
    let dims = vec((1_usize..4, placement), 1..4)
        .prop_filter("too many ranks", move |dims| dims.iter().map(|(size, _)| size).product::<usize>() <= ranks);
    (dims, Just((0..ranks).collect::<Vec<_>>()).prop_shuffle()).prop_map(|(dims, mut ranks)| {
        let (shape, placements): (Vec<usize>, Vec<Placement>) = dims.into_iter().unzip();
        ranks.truncate(shape.iter().product());
        Layout::Mesh(MeshLayout::new(Mesh::new(shape, ranks).unwrap(), placements).unwrap())
    })
}

/// Regions that cut a tensor again and again, each with a rank of its own.
fn boxes(ranks: usize, shape: Vec<u64>) -> impl Strategy<Value = Layout> {
    let cuts = vec((any::<prop::sample::Index>(), 0_usize..4, 0_u64..12), 0..ranks);
    (cuts, Just((0..ranks).collect::<Vec<_>>()).prop_shuffle()).prop_map(move |(cuts, order)| {
        let mut regions: Vec<Vec<Range<u64>>> = vec![shape.iter().map(|&size| 0..size).collect()];
        for (which, dim, at) in cuts.into_iter().filter(|_| !shape.is_empty()) {
            let dim = dim % shape.len();
            let which = which.index(regions.len());
            let mut other = regions[which].clone();
            let middle = (other[dim].start + at).min(other[dim].end);
            regions[which][dim].end = middle;
            other[dim].start = middle;
            regions.push(other);
        }
        let boxes = regions.into_iter().zip(order).map(|(indices, rank)| IndexBox { rank, indices });
        Layout::Boxes(boxes.collect())
    })
}

fn request() -> impl Strategy<Value = SaveRequest> {
    let tensor = |ranks: usize, files: usize| {
        (vec(0_u64..13, 0..4), 0..files, 0..DTYPES.len()).prop_flat_map(move |(shape, file, dtype)| {
            let layout = prop_oneof![
                mesh_layout(ranks, shape.len()).boxed(),
                mesh_layout(ranks, shape.len()).boxed(),
                boxes(ranks, shape.clone()).boxed(),
            ];
            (layout, Just((shape, file, DTYPES[dtype])))
        })
    };
    (1_usize..9, 1_usize..3)
        .prop_flat_map(move |(ranks, files)| {
            let tensors = vec(tensor(ranks, files), 0..8);
            let block_bytes = prop_oneof![Just(16_u64), Just(64), Just(512)];
            let sizes = (block_bytes, 0_u64..100, 0_u64..4096, prop_oneof![0_u64..200, Just(u64::MAX)]);
            (tensors, Just((ranks, files)), sizes)
        })
        .prop_map(|(tensors, (ranks, files), (block_bytes, run_bytes_min, window_bytes, write_bytes_max))| {
            let (layouts, tensors): (Vec<Layout>, Vec<_>) = tensors.into_iter().unzip();
            let tensor = |(position, (shape, file, dtype))| SaveTensor {
                name: format!("tensor {position}"),
                dtype,
                shape,
                file,
                layout: position,
            };
            SaveRequest {
                files: vec![None; files],
                layouts,
                tensors: tensors.into_iter().enumerate().map(tensor).collect(),
                ranks,
                window_bytes: window_bytes + 8 * block_bytes,
                block_bytes,
                run_bytes_min,
                write_bytes_max,
            }
        })
}

/// Byte of the full tensor.
fn value(position: usize, byte: u64) -> u8 {
    (byte.wrapping_mul(31) ^ (byte >> 8).wrapping_mul(101) ^ (position as u64 * 57)) as u8
}

/// Indices of a tensor that a rank has, or `None` if it has none.
fn indices_of(layout: &Layout, shape: &[u64], rank: usize) -> Option<Vec<Vec<u64>>> {
    let ranges: Vec<Vec<Range<u64>>> = match layout {
        Layout::Mesh(layout) => layout.indices(shape, &layout.mesh().coordinate(rank)?),
        Layout::Boxes(boxes) => {
            let own = boxes.iter().find(|index_box| index_box.rank == rank)?;
            own.indices.iter().map(|range| vec![range.clone()]).collect()
        }
        Layout::Whole | Layout::Chunk { .. } => return None,
    };
    let indices: Vec<Vec<u64>> = ranges.into_iter().map(|ranges| ranges.into_iter().flatten().collect()).collect();
    Some(indices).filter(|indices| indices.iter().all(|indices| !indices.is_empty()))
}

/// Local tensor of a rank.
fn local(request: &SaveRequest, position: usize, rank: usize) -> Option<Vec<u8>> {
    let tensor = &request.tensors[position];
    let indices = indices_of(&request.layouts[tensor.layout], &tensor.shape, rank)?;
    let item_bytes = tensor.dtype.item_bytes();
    let mut elements = vec![0];
    for (indices, size) in indices.iter().zip(&tensor.shape) {
        elements =
            elements.iter().flat_map(|element| indices.iter().map(move |index| element * size + index)).collect();
    }
    let bytes = |element: u64| (element * item_bytes..(element + 1) * item_bytes).map(|byte| value(position, byte));
    Some(elements.into_iter().flat_map(bytes).collect())
}

/// Buffer of a rank, divided by other ranks.
fn split(buffer: &[u8], splits: &[u64]) -> Vec<Vec<u8>> {
    let mut rest = buffer;
    let part = |&bytes: &u64| {
        let (part, after) = rest.split_at(bytes as usize);
        rest = after;
        part.to_vec()
    };
    splits.iter().map(part).collect()
}

fn expected(plan: &SavePlan, request: &SaveRequest, file: usize) -> Vec<u8> {
    let layout = plan.file(file).unwrap();
    let mut bytes = layout.header().to_vec();
    let own: Vec<usize> =
        (0..request.tensors.len()).filter(|&position| request.tensors[position].file == file).collect();
    for (&index, range) in layout.order().iter().zip(layout.ranges()) {
        bytes.extend((0..range.end - range.start).map(|byte| value(own[index], byte)));
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Every byte of every file is written once, with its value, in whole blocks, and buffers keep to the bound.
    #[test]
    fn ranks_write_each_byte_once(mut request in request()) {
        let plan = loop {
            match SavePlan::new(&request) {
                Ok(plan) => break plan,
                Err(error) => {
                    prop_assert!(error.to_string().contains("the save needs at least"), "{}", error);
                    request.window_bytes *= 2;
                }
            }
        };
        let ranks: Vec<RankPlan> = (0..request.ranks).map(|rank| plan.rank_plan(rank)).collect();
        let locals: Vec<Vec<Option<Vec<u8>>>> = (0..request.ranks)
            .map(|rank| (0..request.tensors.len()).map(|position| local(&request, position, rank)).collect())
            .collect();
        for (position, tensor) in request.tensors.iter().enumerate() {
            for (rank, locals) in locals.iter().enumerate() {
                let elements = plan.local_shape(position, rank).map(|shape| shape.iter().product::<u64>());
                let bytes = locals[position].as_ref().map(|local| local.len() as u64);
                prop_assert_eq!(elements.map(|elements| elements * tensor.dtype.item_bytes()), bytes);
            }
        }
        let mut files: Vec<Vec<Option<u8>>> = (0..plan.files())
            .map(|file| vec![None; plan.file(file).unwrap().file_bytes() as usize])
            .collect();
        for window in 0..plan.windows() {
            let mut sent = Vec::new();
            for (rank, rank_plan) in ranks.iter().enumerate() {
                let work = &rank_plan.windows[window];
                let (send_splits, receive_splits) = work.splits(request.ranks);
                for splits in [&send_splits, &receive_splits] {
                    prop_assert!(splits.iter().sum::<u64>() <= request.window_bytes / 4);
                }
                prop_assert_eq!((send_splits[rank], receive_splits[rank]), (0, 0));
                let mut buffer = Vec::new();
                for send in &work.sends {
                    prop_assert_eq!(send.offset, buffer.len() as u64);
                    let local = locals[rank][send.tensor].as_ref().unwrap();
                    buffer.extend_from_slice(&local[send.range.start as usize..send.range.end as usize]);
                }
                sent.push(split(&buffer, &send_splits));
            }
            for (rank, rank_plan) in ranks.iter().enumerate() {
                let work = &rank_plan.windows[window];
                let received: Vec<&Vec<u8>> = sent.iter().map(|sent| &sent[rank]).collect();
                let lengths: Vec<u64> = received.iter().map(|bytes| bytes.len() as u64).collect();
                prop_assert_eq!(lengths, work.splits(request.ranks).1);
                let received = received.into_iter().flatten().copied().collect::<Vec<u8>>();
                for write in &work.writes {
                    let file = &mut files[write.file];
                    prop_assert_eq!(write.range.start % request.block_bytes, 0);
                    prop_assert!(write.range.end % request.block_bytes == 0 || write.range.end as usize == file.len());
                    let header = plan.file(write.file).unwrap().header();
                    let header_blocks = (header.len() as u64).next_multiple_of(request.block_bytes);
                    let most = request.write_bytes_max.max(header_blocks);
                    prop_assert!(write.range.end - write.range.start <= most);
                    for byte in write.range.start..write.range.end.min(header.len() as u64) {
                        prop_assert_eq!(file[byte as usize].replace(header[byte as usize]), None);
                    }
                    for source in &work.sources[write.sources.clone()] {
                        let held = match source.received {
                            Some(offset) => &received[offset as usize..],
                            None => &locals[rank][source.tensor].as_ref().unwrap()[source.local.start as usize..],
                        };
                        let held = &held[..(source.local.end - source.local.start) as usize];
                        // Threads write a range in chunks.
                        for first in write.range.clone().step_by(request.block_bytes as usize) {
                            let chunk = first..(first + request.block_bytes).min(write.range.end);
                            let mut pieces = Vec::new();
                            plan.for_each_piece(source, &chunk, |range, offset| pieces.push((range, offset)));
                            for (range, offset) in pieces {
                                prop_assert!(chunk.start <= range.start && range.end <= chunk.end);
                                for byte in range.clone() {
                                    let value = held[(offset + byte - range.start) as usize];
                                    prop_assert_eq!(file[byte as usize].replace(value), None);
                                }
                            }
                        }
                    }
                }
            }
        }
        for (number, file) in files.into_iter().enumerate() {
            let written: Option<Vec<u8>> = file.into_iter().collect();
            prop_assert_eq!(written, Some(expected(&plan, &request, number)));
        }
    }
}
