//! Tests of group plans, which are executed without I/O: every byte of every shard
//! is written once, with the correct byte of the file.

use crate::digest_groups::write_matrices;
use crate::files;
use fst::checkpoint::region::IndexRange;
use fst::checkpoint::verify::Verify;
use fst::checkpoint::{Checkpoint, OpenOptions};
use fst::error::Kind;
use fst::ranks::load::{
    Collective, LoadPlan, LoadRequest, Route, Shard, ShardRange, ShardRequest, Strategy as LoadStrategy,
};
use fst::ranks::mesh::{Mesh, MeshLayout, Placement};
use proptest::prelude::*;
use safetensors::tensor::Dtype;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tempfile::TempDir;

/// Opens a checkpoint of two files with tensors of these shapes.
fn checkpoint(shapes: &[(Dtype, Vec<usize>)]) -> Arc<Checkpoint> {
    checkpoint_in(&TempDir::new().unwrap(), shapes)
}

fn checkpoint_in(directory: &TempDir, shapes: &[(Dtype, Vec<usize>)]) -> Arc<Checkpoint> {
    let tensor = |(index, (dtype, shape)): (usize, &(Dtype, Vec<usize>))| {
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (format!("t{index:02}"), *dtype, shape.clone(), files::pattern(index, bytes))
    };
    let tensors: Vec<_> = shapes.iter().enumerate().map(tensor).collect();
    let paths = tensors.chunks(tensors.len().div_ceil(2).max(1)).enumerate().map(|(index, tensors)| {
        let tensors = tensors.iter().map(|(name, dtype, shape, data)| (&**name, *dtype, shape.clone(), data.clone()));
        files::written(directory, &format!("{index}.safetensors"), &tensors.collect::<Vec<_>>())
    });
    Arc::new(Checkpoint::open(&paths.collect::<Vec<_>>()).unwrap())
}

/// Plans a load by one rank for each list, which read through these page caches.
fn plan_through(
    caches: &[Option<u64>],
    checkpoint: &Arc<Checkpoint>,
    requests: Vec<Vec<ShardRequest>>,
    strategy: LoadStrategy,
    window_bytes: u64,
) -> fst::Result<LoadPlan> {
    let list_of_rank = (0..requests.len()).collect();
    let layouts = Vec::new();
    let request = LoadRequest { requests, layouts, list_of_rank, caches: caches.to_vec(), strategy, window_bytes };
    LoadPlan::new(Arc::clone(checkpoint), request)
}

/// Plans a load past the page cache.
fn plan(
    checkpoint: &Arc<Checkpoint>,
    requests: Vec<Vec<ShardRequest>>,
    strategy: LoadStrategy,
    window_bytes: u64,
) -> fst::Result<LoadPlan> {
    plan_through(&vec![None; requests.len()], checkpoint, requests, strategy, window_bytes)
}

fn everything(checkpoint: &Checkpoint, shard: &Shard) -> Vec<ShardRequest> {
    (0..checkpoint.count()).map(|tensor| ShardRequest { tensor, shard: shard.clone() }).collect()
}

/// Source of each byte in memory, as file and offset, or `None` before a write.
type Memory = Vec<Option<(usize, u64)>>;

/// Memory of the shards of all ranks.
struct ShardMemory<'a> {
    group: &'a LoadPlan,
    bytes: Vec<Vec<Memory>>,
}

impl<'a> ShardMemory<'a> {
    fn new(group: &'a LoadPlan) -> ShardMemory<'a> {
        let empty = |rank| {
            let length = |item| group.region_of(rank, item).unwrap().bytes() as usize;
            (0..group.requests(rank).len()).map(|item| vec![None; length(item)]).collect()
        };
        ShardMemory { group, bytes: (0..group.ranks()).map(empty).collect() }
    }

    /// Returns the source of the bytes of a shard range.
    fn content(&self, shard_range: &ShardRange) -> Vec<(usize, u64)> {
        let region = self.group.region_of(shard_range.rank, shard_range.item).unwrap();
        let range = &region.range;
        let at = |byte: u64| range.row_begin(byte / range.row_bytes) + byte % range.row_bytes;
        (shard_range.begin..shard_range.end).map(|byte| (region.source, at(byte))).collect()
    }

    fn write(&mut self, shard_range: &ShardRange, content: &[(usize, u64)]) {
        let target =
            &mut self.bytes[shard_range.rank][shard_range.item][shard_range.begin as usize..shard_range.end as usize];
        assert_eq!(target.len(), content.len());
        for (byte, &found) in target.iter_mut().zip(content) {
            assert_eq!(byte.replace(found), None, "the byte is written twice: {shard_range:?}");
        }
    }

    fn check(&self) {
        for (rank, items) in self.bytes.iter().enumerate() {
            for (item, bytes) in items.iter().enumerate() {
                let end = bytes.len() as u64;
                let expected = self.content(&ShardRange { rank, item, begin: 0, end });
                let found: Vec<_> = bytes.iter().map(|byte| byte.unwrap()).collect();
                assert_eq!(found, expected, "item {item} of rank {rank}");
            }
        }
    }
}

/// Executes a plan, and returns the number of bytes that each rank reads.
fn execute(group: &LoadPlan) -> Vec<u64> {
    let ranks = group.ranks();
    let mut memory = ShardMemory::new(group);
    let mut read = vec![0; ranks];
    for window in 0..group.windows() {
        let collective = group.collective(window);
        let sent_bytes = group.sent_bytes(window);
        let mut buffers = Vec::new();
        for (rank, read) in read.iter_mut().enumerate() {
            let outgoing = group.outgoing(rank, window);
            for shard_range in &outgoing.local {
                assert_eq!(shard_range.rank, rank);
                let content = memory.content(shard_range);
                memory.write(shard_range, &content);
            }
            let mut buffer = vec![None; outgoing.splits.iter().sum::<u64>() as usize];
            for (shard_range, offset) in &outgoing.sends {
                let content = memory.content(shard_range);
                for (byte, found) in buffer[*offset as usize..][..content.len()].iter_mut().zip(content) {
                    assert_eq!(byte.replace(found), None);
                }
            }
            // The segments of an all-gather are padded to the longest.
            let filled = buffer.iter().flatten().count() as u64;
            for (other, bytes) in sent_bytes[rank].iter().enumerate() {
                let sent =
                    if collective == Collective::Gather { filled } else { *outgoing.splits.get(other).unwrap_or(&0) };
                assert_eq!(*bytes, if other == rank { 0 } else { sent }, "from rank {rank} to {other}");
            }
            *read += group.reads(rank, window).iter().map(|(_, range)| range.end - range.start).sum::<u64>();
            buffers.push((buffer, outgoing.splits));
        }
        for rank in 0..ranks {
            let incoming = group.incoming(rank, window);
            let mut received = Memory::new();
            for (sender, (buffer, splits)) in buffers.iter().enumerate() {
                let begin: u64 = match collective {
                    Collective::None => break,
                    Collective::Gather => 0,
                    Collective::Exchange => splits[..rank].iter().sum(),
                };
                let length = if collective == Collective::Gather { splits[0] } else { splits[rank] };
                assert_eq!(incoming.splits[sender], length);
                received.extend(&buffer[begin as usize..(begin + length) as usize]);
            }
            for (shard_range, offset) in &incoming.shard_ranges {
                assert_eq!(shard_range.rank, rank);
                let length = (shard_range.end - shard_range.begin) as usize;
                let content: Vec<_> = received[*offset as usize..][..length].iter().map(|byte| byte.unwrap()).collect();
                memory.write(shard_range, &content);
            }
        }
    }
    memory.check();
    read
}

fn shapes() -> impl Strategy<Value = Vec<(Dtype, Vec<usize>)>> {
    let dtype = prop_oneof![Just(Dtype::U8), Just(Dtype::BF16), Just(Dtype::F32), Just(Dtype::I64)];
    prop::collection::vec((dtype, prop::collection::vec(0_usize..7, 0..4)), 1..7)
}

/// Generates numbers that select the shard of every rank and tensor.
fn choices() -> impl Strategy<Value = Vec<Vec<(u8, usize, usize)>>> {
    prop::collection::vec(prop::collection::vec((0_u8..5, 0_usize..100, 0_usize..100), 7), 1..6)
}

fn shard(shape: &[usize], layout: u8, (kind, a, b): (u8, usize, usize)) -> Option<Shard> {
    let dims = shape.len();
    match kind {
        0 => None,
        1 => {
            let index_range = |&size: &usize| {
                let start = a % (size + 1);
                IndexRange { start: start as u64, length: (b % (size - start + 1)) as u64, step: 1 }
            };
            Some(Shard::IndexRegion { index_ranges: shape.iter().map(index_range).collect() })
        }
        _ if layout == 0 || dims == 0 => Some(Shard::Whole),
        _ => Some(Shard::Chunk { dim: usize::from(layout) % dims }),
    }
}

proptest! {
    #[test]
    fn every_byte_of_every_shard_is_written_once(
        shapes in shapes(),
        choices in choices(),
        layouts in prop::collection::vec(0_u8..4, 7),
        strategy in prop_oneof![Just(LoadStrategy::Auto), Just(LoadStrategy::Own), Just(LoadStrategy::Exchange)],
        window_bytes in 0_u64..600,
        caches in prop::collection::vec(prop::option::of(0_u64..2), 6),
    ) {
            let checkpoint = checkpoint(&shapes);
        let order: Vec<usize> =
            checkpoint.entries().map(|(_, entry)| entry.name[1..].parse().unwrap()).collect();
        let list = |choices: &Vec<(u8, usize, usize)>| {
            let shard_request = |(tensor, &index): (usize, &usize)| {
                let shard = shard(&shapes[index].1, layouts[index], choices[index])?;
                Some(ShardRequest { tensor, shard })
            };
            order.iter().enumerate().filter_map(shard_request).collect()
        };
        let lists: Vec<_> = choices.iter().map(list).collect();
        execute(&plan_through(&caches[..lists.len()], &checkpoint, lists, strategy, window_bytes).unwrap());
    }
}

/// Generates a layout over the ranks of a mesh in any order, in which each rank has one region of a tensor.
fn mesh_layouts() -> impl Strategy<Value = Vec<MeshLayout>> {
    let placement = prop_oneof![Just(None), Just(None), Just(Some(0_usize)), Just(Some(1)), Just(Some(2))]
        .prop_map(|dim| dim.map_or(Placement::Replicated, |dim| Placement::Sharded { dim, split_factor: 1 }));
    let placements = prop::collection::vec(prop::collection::vec(placement, 3), 1..4);
    (prop::collection::vec(1_usize..4, 3), placements).prop_flat_map(|(shape, placements)| {
        let ranks: Vec<usize> = (0..shape.iter().product()).collect();
        Just(ranks).prop_shuffle().prop_map(move |ranks| {
            let mesh = Mesh::new(shape.clone(), ranks).unwrap();
            placements.iter().map(|of| MeshLayout::new(mesh.clone(), of.clone()).unwrap()).collect()
        })
    })
}

proptest! {
    /// Plans of symbols equal plans of the index regions of every rank.
    #[test]
    fn mesh_layouts_give_the_plan_of_their_regions(
        shapes in prop::collection::vec(prop::collection::vec(0_usize..9, 3), 1..6),
        layouts in mesh_layouts(),
        strategy in prop_oneof![Just(LoadStrategy::Auto), Just(LoadStrategy::Own), Just(LoadStrategy::Exchange)],
        caches in prop::collection::vec(prop::option::of(0_u64..3), 27),
        window_bytes in prop_oneof![100_u64..600, Just(1 << 20)],
    ) {
        let shapes: Vec<_> = shapes.into_iter().map(|shape| (Dtype::BF16, shape)).collect();
        let checkpoint = checkpoint(&shapes);
        let ranks = layouts[0].mesh().ranks().len();
        let symbols: Vec<_> = (0..checkpoint.count())
            .map(|tensor| ShardRequest { tensor, shard: Shard::Local { layout: tensor % layouts.len() } })
            .collect();
        let regions = |rank: usize| symbols.iter().map(|request| {
            let shape: Vec<u64> = checkpoint.entry(request.tensor).unwrap().1.shape.to_vec();
            let index_ranges = request.shard.index_ranges(&layouts, &shape, rank, ranks).unwrap();
            ShardRequest { shard: Shard::IndexRegion { index_ranges }, ..*request }
        }).collect();
        let caches = &caches[..ranks];
        let explicit =
            plan_through(caches, &checkpoint, (0..ranks).map(regions).collect(), strategy, window_bytes).unwrap();
        let request = LoadRequest {
            requests: vec![symbols.clone()],
            layouts: layouts.clone(),
            list_of_rank: vec![0; ranks],
            caches: caches.to_vec(),
            strategy,
            window_bytes,
        };
        let symbolic = LoadPlan::new(Arc::clone(&checkpoint), request).unwrap();
        let read = execute(&symbolic);
        let routes = |group: &LoadPlan| (0..checkpoint.count()).map(|tensor| group.route_of(tensor)).collect::<Vec<_>>();
        prop_assert_eq!(routes(&symbolic), routes(&explicit));
        // Windows of symbols may be shorter, since they are cut for the largest shards.
        prop_assert!(symbolic.windows() >= explicit.windows());
        if window_bytes == 1 << 20 {
            prop_assert_eq!(read, execute(&explicit));
            for window in 0..explicit.windows() {
                prop_assert_eq!(symbolic.sent_bytes(window), explicit.sent_bytes(window));
            }
        }
    }
}

/// Returns shapes of typical weights, and of very small tensors.
fn model() -> Vec<(Dtype, Vec<usize>)> {
    vec![
        (Dtype::BF16, vec![512, 256]),
        (Dtype::F32, vec![256]),
        (Dtype::BF16, vec![256, 1024]),
        (Dtype::F32, vec![]),
        (Dtype::BF16, vec![384, 640]),
        (Dtype::I64, vec![7]),
    ]
}

fn payload(checkpoint: &Checkpoint) -> u64 {
    checkpoint.entries().map(|(_, entry)| entry.end - entry.begin).sum()
}

/// Returns the largest size of the buffers of a rank: two to send and two to receive.
fn buffer_bytes(group: &LoadPlan) -> u64 {
    let all = (0..group.windows()).flat_map(|window| (0..group.ranks()).map(move |rank| (rank, window)));
    let bytes = |(rank, window)| {
        let (outgoing, incoming) = (group.outgoing(rank, window), group.incoming(rank, window));
        2 * outgoing.splits.iter().chain(&incoming.splits).sum::<u64>()
    };
    all.map(bytes).max().unwrap_or(0)
}

#[test]
fn every_byte_is_read_once_and_reads_are_balanced() {
    let shapes: Vec<_> = model().into_iter().filter(|(_, shape)| shape.len() == 2).collect();
    let checkpoint = checkpoint(&shapes);
    let padding_bytes = 2 * 8 * 4;
    for (shard, strategy, ranks, window_bytes) in [
        (Shard::Whole, LoadStrategy::Auto, 2_usize, 100_000),
        (Shard::Chunk { dim: 0 }, LoadStrategy::Auto, 8, 100_000),
        (Shard::Chunk { dim: 1 }, LoadStrategy::Auto, 2, 100_000),
        (Shard::Whole, LoadStrategy::Exchange, 3, 100_000),
        (Shard::Chunk { dim: 0 }, LoadStrategy::Exchange, 2, 4096),
        (Shard::Chunk { dim: 1 }, LoadStrategy::Exchange, 4, 10_000_000),
    ] {
        let lists = vec![everything(&checkpoint, &shard); ranks];
        let group = plan(&checkpoint, lists, strategy, window_bytes).unwrap();
        let read = execute(&group);
        let case = format!("{shard}, {strategy:?} on {ranks} ranks with {window_bytes}: {read:?}");
        assert_eq!(read.iter().sum::<u64>(), payload(&checkpoint), "{case}");
        let (least, most) = (read.iter().min().unwrap(), read.iter().max().unwrap());
        let is_own = strategy == LoadStrategy::Auto && shard == Shard::Chunk { dim: 0 };
        // Chunks of rows are fixed. Other reads differ only by the alignment of the parts of a window.
        assert!(is_own || most - least <= 8 * group.windows() as u64, "{case}");
        assert!(buffer_bytes(&group) <= window_bytes + padding_bytes, "{case}");
        assert!(is_own || group.windows() > 1 || window_bytes > 100_000, "{case}");
    }
}

/// Returns the ranks that read bytes of each group of the files, by its first byte.
fn readers_of_groups(group: &LoadPlan, group_bytes: u64) -> BTreeMap<u64, BTreeSet<usize>> {
    let tensors: Vec<_> = group.checkpoint().entries().map(|(_, entry)| entry.begin..entry.end).collect();
    let mut readers: BTreeMap<u64, BTreeSet<usize>> = BTreeMap::new();
    for (window, rank) in (0..group.windows()).flat_map(|window| (0..group.ranks()).map(move |rank| (window, rank))) {
        for (_, range) in group.reads(rank, window) {
            let tensor = tensors.iter().find(|tensor| tensor.contains(&range.start)).unwrap();
            let mut at = range.start - (range.start - tensor.start) % group_bytes;
            while at < range.end {
                readers.entry(at).or_default().insert(rank);
                at += group_bytes;
            }
        }
    }
    readers
}

const GROUP_BYTES: u64 = 4096;

/// Opens a checkpoint of matrices with groups of [`GROUP_BYTES`]. Most groups have parts of rows.
fn grouped(verify: &Verify) -> Arc<Checkpoint> {
    let directory = TempDir::new().unwrap();
    let path = write_matrices(&directory, &[1000, 64, 5000, 3, 2048], &[256, 8, 64, 40, 128], GROUP_BYTES as usize);
    Arc::new(Checkpoint::open_with(&[path], &verify.clone().into()).unwrap())
}

#[test]
fn one_rank_reads_each_group() {
    let checkpoint = grouped(&Verify::Digests);
    for (shard, ranks, window_bytes) in [
        (Shard::Whole, 2_usize, 1 << 20),
        (Shard::Whole, 4, 100_000),
        (Shard::Chunk { dim: 0 }, 3, 60_000),
        (Shard::Chunk { dim: 0 }, 8, 1 << 20),
        (Shard::Chunk { dim: 1 }, 8, 40_000),
        (Shard::Chunk { dim: 1 }, 4, 100_000),
    ] {
        let lists = vec![everything(&checkpoint, &shard); ranks];
        let group = plan(&checkpoint, lists, LoadStrategy::Exchange, window_bytes).unwrap();
        let read = execute(&group);
        let case = format!("{shard} on {ranks} ranks with {window_bytes}: {read:?}");
        assert_eq!(read.iter().sum::<u64>(), payload(&checkpoint), "{case}");
        let readers = readers_of_groups(&group, GROUP_BYTES);
        // The shards of all ranks may be in one group of a small tensor, so that only one of them sends.
        assert!(readers.values().all(|ranks| ranks.len() == 1), "{case}");
        let (least, most) = (read.iter().min().unwrap(), read.iter().max().unwrap());
        // The fewer groups a window has, the less even are the parts of the ranks.
        let slack = if window_bytes < 100_000 { 16 * GROUP_BYTES } else { 6 * GROUP_BYTES };
        assert!(most - least <= slack, "{case}");
        assert!(buffer_bytes(&group) <= window_bytes, "{case}: {} bytes", buffer_bytes(&group));
    }
}

#[test]
fn ranks_exchange_groups_of_which_each_keeps_a_part() {
    let route = |verify, shard, caches: &[Option<u64>]| {
        let checkpoint = grouped(&verify);
        let lists = vec![everything(&checkpoint, &shard); caches.len()];
        let group = plan_through(caches, &checkpoint, lists, LoadStrategy::Auto, 1 << 20).unwrap();
        execute(&group);
        assert_eq!(group.route_of(4), group.route_of(2));
        (group.route_of(2).unwrap(), group.route_of(1).unwrap())
    };
    let (rows, columns) = (Shard::Chunk { dim: 0 }, Shard::Chunk { dim: 1 });
    // Shards of rows have many blocks and groups of the matrix, but only a part of a few of the small one.
    assert_eq!(route(Verify::Nothing, rows.clone(), &[None; 2]), (Route::Own, Route::Exchange));
    assert_eq!(route(Verify::Digests, rows.clone(), &[None; 2]), (Route::Own, Route::Exchange));
    // The ranks of a machine that keeps a half of each group would read and compare the other half, too.
    let two_machines = [Some(1), Some(1), Some(2), Some(2)];
    assert_eq!(route(Verify::Digests, columns, &two_machines), (Route::Exchange, Route::Exchange));
}

#[test]
fn ranks_with_one_page_cache_divide_the_files_to_verify_them() {
    let parts_with = |strategy, verify, shard: &Shard, caches: &[Option<u64>]| {
        let checkpoint = grouped(&verify);
        let lists = vec![everything(&checkpoint, shard); caches.len()];
        let group = plan_through(caches, &checkpoint, lists, strategy, 1 << 20).unwrap();
        let parts: Vec<_> = (0..caches.len()).map(|rank| group.part_to_verify(rank)).collect();
        // Shards are then taken from the page cache, as without digests.
        assert!(parts.iter().all(Option::is_none) || group.route_of(2) == Some(Route::Cached));
        parts
    };
    let parts = |verify, shard: &Shard, caches: &[_]| parts_with(LoadStrategy::Auto, verify, shard, caches);
    let (rows, columns) = (Shard::Chunk { dim: 0 }, Shard::Chunk { dim: 1 });
    for shard in [&Shard::Whole, &rows, &columns] {
        assert_eq!(parts(Verify::Digests, shard, &[Some(7); 3]), [Some((0, 3)), Some((1, 3)), Some((2, 3))]);
        assert_eq!(parts(Verify::Nothing, shard, &[Some(7); 3]), [None; 3]);
        assert_eq!(parts(Verify::Digests, shard, &[None; 3]), [None; 3]);
        assert_eq!(parts(Verify::Digests, shard, &[Some(7), Some(7), None]), [None; 3]);
    }
    // Ranks of two machines exchange replicated tensors, unless each is to read its own.
    let machines = [Some(1), Some(2), Some(1)];
    assert_eq!(parts(Verify::Digests, &Shard::Whole, &machines), [None; 3]);
    let of_machines = [Some((0, 2)), Some((0, 1)), Some((1, 2))];
    assert_eq!(parts_with(LoadStrategy::Own, Verify::Digests, &Shard::Whole, &machines), of_machines);
    assert_eq!(parts_with(LoadStrategy::Own, Verify::Digests, &rows, &machines), [None; 3]);
}

#[test]
fn windows_are_as_long_as_buffers_allow() {
    let checkpoint = checkpoint(&[(Dtype::U8, vec![1024, 1024])]);
    // Four pairs of ranks. The ranks of a pair split the columns.
    let columns = |rank: u64| Shard::IndexRegion {
        index_ranges: vec![IndexRange::whole(1024), IndexRange { start: rank % 2 * 512, length: 512, step: 1 }],
    };
    let lists: Vec<_> = (0..8).map(|rank| vec![ShardRequest { tensor: 0, shard: columns(rank) }]).collect();
    let window_bytes = 1 << 19;
    let group = plan(&checkpoint, lists, LoadStrategy::Auto, window_bytes).unwrap();
    execute(&group);
    // Each rank receives half of the bytes, and has two buffers to receive and two to send.
    assert_eq!(group.windows() as u64, (1 << 20) / 2 / (window_bytes / 4));
}

#[test]
fn own_reads_reduce_the_part_of_a_rank_in_the_exchange() {
    let checkpoint = checkpoint(&[(Dtype::U8, vec![1000]), (Dtype::U8, vec![64, 64])]);
    let columns = ShardRequest { tensor: 1, shard: Shard::Chunk { dim: 1 } };
    let alone = ShardRequest { tensor: 0, shard: Shard::Whole };
    let lists = vec![vec![alone, columns.clone()], vec![columns]];
    let group = plan(&checkpoint, lists, LoadStrategy::Auto, 1 << 20).unwrap();
    assert_eq!([0, 1].map(|position| group.route_of(position)), [Some(Route::Own), Some(Route::Exchange)]);
    let half = payload(&checkpoint) / 2;
    assert_eq!(execute(&group), [half, half]);
}

/// Returns the bytes of the blocks that all ranks read, with the gaps that the readers cover.
fn block_bytes(group: &LoadPlan) -> u64 {
    let gap_bytes = if group.leaves_gaps() { 0 } else { 16 << 10 };
    let mut total = 0;
    for rank in 0..group.ranks() {
        let mut reads: Vec<_> = (0..group.windows()).flat_map(|window| group.reads(rank, window)).collect();
        reads.sort_by_key(|(source, range)| (*source, range.start));
        let mut last = (usize::MAX, 0);
        for (source, range) in reads {
            let (begin, end) = (range.start / 4096 * 4096, range.end.next_multiple_of(4096));
            let is_near = last.0 == source && begin <= last.1 + gap_bytes;
            total += end - (if is_near { last.1.min(end) } else { begin });
            last = (source, if is_near { end.max(last.1) } else { end });
        }
    }
    total
}

#[test]
fn ranks_read_the_blocks_of_small_shards_once() {
    let rows = |_: usize, tensor: usize| Some(ShardRequest { tensor, shard: Shard::Chunk { dim: 0 } });
    let whole = |tensor: usize| Some(ShardRequest { tensor, shard: Shard::Whole });
    // Eight ranks: each needs rows of all tensors, every eighth tensor, some of these, or an eighth of the file.
    let turns = move |rank: usize, tensor: usize| whole(tensor).filter(|_| tensor % 8 == rank);
    let some_turns = move |rank: usize, tensor: usize| whole(tensor).filter(|_| tensor % 16 == 2 * rank);
    let stages = move |rank: usize, tensor: usize| whole(tensor).filter(|_| tensor / 50 == rank);
    for row_bytes in [100, 2 << 10, 20 << 10, 200 << 10] {
        let shapes = vec![(Dtype::U8, vec![8, row_bytes]); if row_bytes > 10_000 { 24 } else { 400 }];
        let checkpoint = checkpoint(&shapes);
        let route = |request: &dyn Fn(usize, usize) -> Option<ShardRequest>| {
            let list = |rank| (0..checkpoint.count()).filter_map(|tensor| request(rank, tensor)).collect();
            let lists = (0..8).map(list).collect();
            let group = plan(&checkpoint, lists, LoadStrategy::Auto, 1 << 20).unwrap();
            let (read, all) = (block_bytes(&group), payload(&checkpoint));
            assert!(read * 16 <= all * 17 + (8 << 16), "{read} of {all} bytes, {row_bytes} in a row");
            group.route_of(0)
        };
        let is_small = row_bytes < 100_000;
        assert_eq!(route(&rows), Some(if is_small { Route::Exchange } else { Route::Own }));
        route(&turns);
        route(&some_turns);
        // The parts of a short file have as many blocks at their ends as between them.
        assert_eq!(route(&stages), Some(if row_bytes == 100 { Route::Exchange } else { Route::Own }));
    }
}

#[test]
fn ranks_with_one_page_cache_read_their_own_shards() {
    let checkpoint = checkpoint(&[(Dtype::U8, vec![1 << 8, 1 << 8])]);
    for (shard, exchanged) in [(Shard::Whole, Route::Gather), (Shard::Chunk { dim: 1 }, Route::Exchange)] {
        let route = |caches: [Option<u64>; 4]| {
            let lists = vec![everything(&checkpoint, &shard); 4];
            let group = plan_through(&caches, &checkpoint, lists, LoadStrategy::Auto, 1 << 20).unwrap();
            group.route_of(0).unwrap()
        };
        assert_eq!(route([Some(1); 4]), Route::Cached);
        assert_eq!(route([Some(1), Some(1), Some(2), Some(2)]), exchanged);
        assert_eq!(route([Some(1), Some(1), Some(1), None]), exchanged);
        assert_eq!(route([None; 4]), exchanged);
    }
}

#[test]
fn small_shards_are_exchanged_with_others_that_are() {
    let shapes = [(Dtype::U8, vec![1 << 10]), (Dtype::U8, vec![1 << 20]), (Dtype::U8, vec![1 << 8, 1 << 8])];
    let checkpoint = checkpoint(&shapes);
    // Ranks 0 and 1 share a page cache, and all ranks need the last tensor.
    let shared = |tensor| ShardRequest { tensor, shard: Shard::Whole };
    let near = vec![shared(0), shared(1), shared(2)];
    let routes = |lists: Vec<Vec<ShardRequest>>| {
        let caches = [Some(1), Some(1), Some(2)];
        let group = plan_through(&caches, &checkpoint, lists, LoadStrategy::Auto, 1 << 20).unwrap();
        [0, 1, 2].map(|position| group.route_of(position))
    };
    let [own, exchanged] = [Some(Route::Cached), Some(Route::Exchange)];
    assert_eq!(routes(vec![near.clone(), near.clone(), vec![]]), [own; 3]);
    assert_eq!(routes(vec![near.clone(), near, vec![shared(2)]]), [exchanged, own, Some(Route::Gather)]);
}

#[test]
fn conflicting_layouts_are_rejected_by_rank_and_tensor() {
    let checkpoint = checkpoint(&[(Dtype::U8, vec![8, 8])]);
    let list = |shard: Shard| vec![ShardRequest { tensor: 0, shard }];
    let plan = |lists| plan(&checkpoint, lists, LoadStrategy::Auto, 0);
    let chunk = |dim| Shard::Chunk { dim };
    for (first, second) in [(Shard::Whole, chunk(0)), (chunk(0), chunk(1))] {
        let error = plan(vec![vec![], list(first), list(second)]).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidArgument);
        let text = error.to_string();
        assert!(text.contains("rank 1") && text.contains("rank 2") && text.contains("t00"), "{text}");
    }
    let region =
        Shard::IndexRegion { index_ranges: vec![IndexRange::whole(8), IndexRange { start: 2, length: 3, step: 1 }] };
    execute(&plan(vec![list(region), list(chunk(0)), list(chunk(0)), vec![]]).unwrap());
}

#[test]
fn digests_differ_between_plans() {
    let directory = TempDir::new().unwrap();
    let checkpoint = checkpoint_in(&directory, &model());
    let digest = |checkpoint: &Arc<Checkpoint>, window_bytes| {
        let lists = vec![everything(checkpoint, &Shard::Whole); 2];
        plan(checkpoint, lists, LoadStrategy::Auto, window_bytes).unwrap().digest()
    };
    assert_eq!(digest(&checkpoint, 100), digest(&checkpoint, 100));
    assert_ne!(digest(&checkpoint, 100), digest(&checkpoint, 101));
    let headers = OpenOptions { headers: Some(checkpoint.export_headers().unwrap()), ..OpenOptions::default() };
    let joined = Arc::new(Checkpoint::open_with(&[directory.path()], &headers).unwrap());
    assert_eq!(digest(&joined, 100), digest(&checkpoint, 100));
}

#[test]
fn invalid_encoded_requests_are_rejected() {
    let checkpoint = checkpoint(&[(Dtype::U8, vec![8, 8])]);
    let whole = ShardRequest { tensor: 0, shard: Shard::Whole };
    let region = |index_ranges: [(u64, u64); 2]| Shard::IndexRegion {
        index_ranges: index_ranges.map(|(start, length)| IndexRange { start, length, step: 1 }).to_vec(),
    };
    // Two ranks split the columns.
    let columns = [1, 2, 0, 1, 1, 1];
    let layout = MeshLayout::decode(&columns).unwrap().0;
    let mut layouts = vec![MeshLayout::decode(&[1, 1, 0, -1, 0]).unwrap().0];
    let numbers = [&[4, 2, 3, -1, 1, 1, 2, 0, 0, 4, 8, 2, 0][..], &columns, &[0, 0, 0, 1, 0, 2, 0, 3]].concat();
    let expected = [Shard::Whole, Shard::Chunk { dim: 1 }, region([(0, 8), (4, 2)]), Shard::Local { layout: 1 }];
    let expected = expected.map(|shard| ShardRequest { shard, ..whole.clone() });
    for _ in 0..2 {
        assert_eq!(ShardRequest::decode(&numbers, &checkpoint, &mut layouts).unwrap(), expected);
        assert_eq!(layouts[1..], *std::slice::from_ref(&layout));
    }
    let invalid: [&[i64]; 16] = [
        &[],
        &[1],
        &[-1],
        &[0, 0],
        &[1, 2, 1, 0],
        &[1, 2, -1, 0],
        &[1, 2, 0, 1],
        &[1, 2, 0, -1],
        &[1, 4],
        &[1, 3],
        &[1, 3, 2, 0, 0],
        &[1, 3, -3, 0, 0],
        &[1, 1, 1, 2, 0, 0, 0, 8],
        &[1, 1, 1, 2, 0, 0, 0, 8, 9, 0, 0],
        &[1, 1, 1, 2, 0, -1, 0, 8, 8, 0, 0],
        &[1, 0, 1, 2, 0, 1, 2, 1, 0, 0],
    ];
    for numbers in invalid {
        assert_eq!(
            ShardRequest::decode(numbers, &checkpoint, &mut Vec::new()).unwrap_err().kind(),
            Kind::InvalidArgument,
            "{numbers:?}"
        );
    }
    // Rank 2 is not in the mesh. If each half of the columns is split, rank 0 has two regions.
    for (factor, message) in [(1, "rank 2 requests its part of a mesh"), (2, "rank 0 has several index regions")] {
        let numbers = [1, 0, 1, 2, 0, 1, 1, factor, 0, 0];
        let mut layouts = Vec::new();
        let requests = vec![ShardRequest::decode(&numbers, &checkpoint, &mut layouts).unwrap()];
        let (caches, strategy) = (vec![None; 3], LoadStrategy::Auto);
        let request =
            LoadRequest { requests, layouts, list_of_rank: vec![0; 3], caches, strategy, window_bytes: 1 << 20 };
        let text = LoadPlan::new(Arc::clone(&checkpoint), request).unwrap_err().to_string();
        assert!(text.contains("t00") && text.contains(message), "{text}");
    }
}

/// A plan with a window for every few bytes would exhaust the memory before the first collective.
#[test]
fn window_bytes_that_give_too_many_windows_are_refused() {
    let checkpoint = checkpoint(&[(Dtype::U8, vec![1 << 11, 1 << 11])]);
    for shard in [Shard::Whole, Shard::Chunk { dim: 1 }] {
        let lists = || vec![everything(&checkpoint, &shard); 2];
        let plan = |window_bytes| plan(&checkpoint, lists(), LoadStrategy::Exchange, window_bytes);
        let error = plan(1).map(|group| group.windows()).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidArgument);
        assert!(error.to_string().contains("window_bytes is 1, which divides the 4194304 bytes"), "{error}");
        assert!(plan(1 << 10).unwrap().windows() > 1000);
    }
}
