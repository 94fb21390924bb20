//! The plan of a group, carried out on paper: every byte of every share comes
//! from its place in the file, once.

use crate::files;
use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::Span;
use fst::error::Kind;
use fst::group::{Collective, Group, Piece, Request, Share, Strategy as Way, Want};
use proptest::prelude::*;
use safetensors::tensor::Dtype;
use std::sync::Arc;
use tempfile::TempDir;

/// Two files with tensors of these shapes.
fn checkpoint(directory: &TempDir, shapes: &[(Dtype, Vec<usize>)]) -> Arc<Checkpoint> {
    let tensor = |(index, (dtype, shape)): (usize, &(Dtype, Vec<usize>))| {
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (format!("t{index:02}"), *dtype, shape.clone(), files::pattern(index, bytes))
    };
    let tensors: Vec<_> = shapes.iter().enumerate().map(tensor).collect();
    let paths = tensors.chunks(tensors.len().div_ceil(2).max(1)).enumerate().map(|(index, part)| {
        let part = part.iter().map(|(name, dtype, shape, data)| (&**name, *dtype, shape.clone(), data.clone()));
        files::written(directory, &format!("{index}.safetensors"), &part.collect::<Vec<_>>())
    });
    Arc::new(Checkpoint::open(&paths.collect::<Vec<_>>()).unwrap())
}

fn request(lists: Vec<Vec<Want>>, strategy: Way, window_bytes: u64) -> Request {
    let ranks = lists.len();
    Request { wants: lists, wants_of: (0..ranks).collect(), caches: vec![None; ranks], strategy, window_bytes }
}

fn everything(checkpoint: &Checkpoint, share: &Share) -> Vec<Want> {
    (0..checkpoint.count()).map(|tensor| Want { tensor, share: share.clone() }).collect()
}

/// Which byte of which file stands in each place of a piece of memory, or nothing yet.
type Memory = Vec<Option<(usize, u64)>>;

/// For each rank its shares.
struct Shares<'a> {
    group: &'a Group,
    bytes: Vec<Vec<Memory>>,
}

impl<'a> Shares<'a> {
    fn new(group: &'a Group) -> Shares<'a> {
        let empty = |rank| {
            let length = |item| group.wanted(rank, item).unwrap().bytes() as usize;
            (0..group.wants(rank).len()).map(|item| vec![None; length(item)]).collect()
        };
        Shares { group, bytes: (0..group.ranks()).map(empty).collect() }
    }

    /// Where in the files the bytes of a piece are.
    fn content(&self, piece: &Piece) -> Vec<(usize, u64)> {
        let wanted = self.group.wanted(piece.rank, piece.item).unwrap();
        let region = &wanted.region;
        let at = |byte: u64| region.row_begin(byte / region.row_bytes) + byte % region.row_bytes;
        (piece.begin..piece.end).map(|byte| (wanted.source, at(byte))).collect()
    }

    fn place(&mut self, piece: &Piece, content: &[(usize, u64)]) {
        let into = &mut self.bytes[piece.rank][piece.item][piece.begin as usize..piece.end as usize];
        assert_eq!(into.len(), content.len());
        for (byte, &found) in into.iter_mut().zip(content) {
            assert_eq!(byte.replace(found), None, "written twice: {piece:?}");
        }
    }

    fn check(&self) {
        for (rank, items) in self.bytes.iter().enumerate() {
            for (item, bytes) in items.iter().enumerate() {
                let end = bytes.len() as u64;
                let expected = self.content(&Piece { rank, item, begin: 0, end });
                let found: Vec<_> = bytes.iter().map(|byte| byte.unwrap()).collect();
                assert_eq!(found, expected, "item {item} of rank {rank}");
            }
        }
    }
}

/// Carries a plan out, and says how many bytes each rank has read, exchanged ones once.
fn carry_out(group: &Group) -> Vec<u64> {
    let ranks = group.ranks();
    let mut shares = Shares::new(group);
    let mut read = vec![0; ranks];
    for window in 0..group.windows() {
        let collective = group.collective(window);
        let mut buffers = Vec::new();
        for (rank, read) in read.iter_mut().enumerate() {
            let outgoing = group.outgoing(rank, window);
            for piece in &outgoing.kept {
                assert_eq!(piece.rank, rank);
                let content = shares.content(piece);
                shares.place(piece, &content);
            }
            let mut buffer = vec![None; outgoing.splits.iter().sum::<u64>() as usize];
            for (piece, offset) in &outgoing.sent {
                let content = shares.content(piece);
                for (byte, found) in buffer[*offset as usize..][..content.len()].iter_mut().zip(content) {
                    assert_eq!(byte.replace(found), None);
                }
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
            for (piece, offset) in &incoming.pieces {
                assert_eq!(piece.rank, rank);
                let length = (piece.end - piece.begin) as usize;
                let content: Vec<_> = received[*offset as usize..][..length].iter().map(|byte| byte.unwrap()).collect();
                shares.place(piece, &content);
            }
        }
    }
    shares.check();
    read
}

fn shapes() -> impl Strategy<Value = Vec<(Dtype, Vec<usize>)>> {
    let dtype = prop_oneof![Just(Dtype::U8), Just(Dtype::BF16), Just(Dtype::F32), Just(Dtype::I64)];
    prop::collection::vec((dtype, prop::collection::vec(0_usize..7, 0..4)), 1..7)
}

/// For every rank and tensor a number that chooses the share.
fn choices() -> impl Strategy<Value = Vec<Vec<(u8, usize, usize)>>> {
    prop::collection::vec(prop::collection::vec((0_u8..5, 0_usize..100, 0_usize..100), 7), 1..6)
}

fn share(shape: &[usize], agreed: u8, (kind, a, b): (u8, usize, usize)) -> Option<Share> {
    let dims = shape.len();
    match kind {
        0 => None,
        1 => {
            let span = |&size: &usize| {
                let start = a % (size + 1);
                Span { start: start as u64, length: (b % (size - start + 1)) as u64, step: 1 }
            };
            Some(Share::Part { spans: shape.iter().map(span).collect() })
        }
        _ if agreed == 0 || dims == 0 => Some(Share::Whole),
        _ => Some(Share::Chunk { dim: usize::from(agreed) % dims }),
    }
}

proptest! {
    #[test]
    fn every_byte_comes_where_it_belongs(
        shapes in shapes(),
        choices in choices(),
        agreed in prop::collection::vec(0_u8..4, 7),
        strategy in prop_oneof![Just(Way::Auto), Just(Way::Own), Just(Way::Exchange)],
        window_bytes in 0_u64..600,
    ) {
        let directory = TempDir::new().unwrap();
        let checkpoint = checkpoint(&directory, &shapes);
        let order: Vec<usize> =
            checkpoint.entries().map(|(_, entry)| entry.name[1..].parse().unwrap()).collect();
        let list = |choices: &Vec<(u8, usize, usize)>| {
            let want = |(tensor, &index): (usize, &usize)| {
                let share = share(&shapes[index].1, agreed[index], choices[index])?;
                Some(Want { tensor, share })
            };
            order.iter().enumerate().filter_map(want).collect()
        };
        let lists = choices.iter().map(list).collect();
        let group = Group::plan(Arc::clone(&checkpoint), request(lists, strategy, window_bytes)).unwrap();
        carry_out(&group);
    }
}

/// Weights as they are in models, and some that are as small as they come.
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

#[test]
fn every_byte_is_read_once_and_by_all_ranks_alike() {
    let directory = TempDir::new().unwrap();
    let shapes: Vec<_> = model().into_iter().filter(|(_, shape)| shape.len() == 2).collect();
    let checkpoint = checkpoint(&directory, &shapes);
    for share in [Share::Whole, Share::Chunk { dim: 0 }, Share::Chunk { dim: 1 }] {
        for ranks in [2_usize, 3, 4, 8] {
            let lists = vec![everything(&checkpoint, &share); ranks];
            let group = Group::plan(Arc::clone(&checkpoint), request(lists, Way::Auto, 100_000)).unwrap();
            let read = carry_out(&group);
            assert_eq!(read.iter().sum::<u64>(), payload(&checkpoint), "{share} on {ranks} ranks: {read:?}");
            let (least, most) = (read.iter().min().unwrap(), read.iter().max().unwrap());
            // A shard of rows is what it is; everything else differs by what aligns the parts of the windows.
            let slack = 8 * group.windows() as u64;
            assert!(share == Share::Chunk { dim: 0 } || most - least <= slack, "{share} on {ranks} ranks: {read:?}");
        }
    }
}

#[test]
fn what_is_sent_is_what_others_have_read() {
    let directory = TempDir::new().unwrap();
    let checkpoint = checkpoint(&directory, &model());
    for share in [Share::Whole, Share::Chunk { dim: 0 }] {
        let wants: Vec<Want> = everything(&checkpoint, &share)
            .into_iter()
            .filter(|want| share == Share::Whole || !checkpoint.entry(want.tensor).unwrap().1.shape.is_empty())
            .collect();
        let group = Group::plan(Arc::clone(&checkpoint), request(vec![wants; 4], Way::Exchange, 50_000)).unwrap();
        let mut sent = 0;
        let mut kept = 0;
        for window in 0..group.windows() {
            sent += group.sent_bytes(window).iter().flatten().sum::<u64>();
            for rank in 0..4 {
                let outgoing = group.outgoing(rank, window);
                kept += outgoing.kept.iter().map(|piece| piece.end - piece.begin).sum::<u64>();
                if group.collective(window) == Collective::Gather {
                    kept += outgoing.sent.iter().map(|(piece, _)| piece.end - piece.begin).sum::<u64>();
                }
            }
        }
        let wanted: u64 = (0..4)
            .flat_map(|rank| (0..group.wants(rank).len()).map(move |item| (rank, item)))
            .map(|(rank, item)| group.wanted(rank, item).unwrap().bytes())
            .sum();
        assert_eq!(sent + kept, wanted, "{share}");
    }
}

#[test]
fn buffers_keep_to_their_limit() {
    let directory = TempDir::new().unwrap();
    let checkpoint = checkpoint(&directory, &model());
    let padding_bytes = 2 * 8 * 4;
    for share in [Share::Whole, Share::Chunk { dim: 0 }] {
        for (ranks, window_bytes) in [(2_usize, 4096), (4, 4096), (3, 100_000), (4, 10_000_000)] {
            let wants: Vec<Want> = everything(&checkpoint, &share)
                .into_iter()
                .filter(|want| share == Share::Whole || !checkpoint.entry(want.tensor).unwrap().1.shape.is_empty())
                .collect();
            let request = request(vec![wants; ranks], Way::Exchange, window_bytes);
            let group = Group::plan(Arc::clone(&checkpoint), request).unwrap();
            let mut most = 0;
            for window in 0..group.windows() {
                for rank in 0..ranks {
                    let out = group.outgoing(rank, window).splits.iter().sum::<u64>();
                    let into = group.incoming(rank, window).splits.iter().sum::<u64>();
                    most = most.max(2 * (out + into));
                }
            }
            assert!(most <= window_bytes + padding_bytes, "{most} on {ranks} ranks for {share}");
            assert!(group.windows() > 1 || window_bytes > 100_000);
        }
    }
}

#[test]
fn windows_are_as_long_as_the_buffers_allow() {
    let directory = TempDir::new().unwrap();
    let checkpoint = checkpoint(&directory, &[(Dtype::U8, vec![1024, 1024])]);
    // Columns in chunks over two ranks, and four of these pairs.
    let columns = |rank: u64| Share::Part {
        spans: vec![Span::whole(1024), Span { start: rank % 2 * 512, length: 512, step: 1 }],
    };
    let lists: Vec<_> = (0..8).map(|rank| vec![Want { tensor: 0, share: columns(rank) }]).collect();
    let window_bytes = 1 << 19;
    let group = Group::plan(Arc::clone(&checkpoint), request(lists, Way::Auto, window_bytes)).unwrap();
    carry_out(&group);
    // Each rank gets half of what is read, and has two buffers for that and two for what it sends.
    assert_eq!(group.windows() as u64, (1 << 20) / 2 / (window_bytes / 4));
}

#[test]
fn who_reads_for_itself_already_reads_less_for_others() {
    let directory = TempDir::new().unwrap();
    let checkpoint = checkpoint(&directory, &[(Dtype::U8, vec![1000]), (Dtype::U8, vec![64, 64])]);
    let columns = Want { tensor: 1, share: Share::Chunk { dim: 1 } };
    let alone = Want { tensor: 0, share: Share::Whole };
    let lists = vec![vec![alone, columns.clone()], vec![columns]];
    let group = Group::plan(Arc::clone(&checkpoint), request(lists, Way::Auto, 1 << 20)).unwrap();
    assert!(group.is_own(0) && !group.is_own(1));
    let half = payload(&checkpoint) / 2;
    assert_eq!(carry_out(&group), [half, half]);
}

#[test]
fn one_page_cache_is_read_by_all_who_have_it() {
    let directory = TempDir::new().unwrap();
    let checkpoint = checkpoint(&directory, &[(Dtype::U8, vec![1 << 16])]);
    let plan = |caches: [Option<u64>; 4]| {
        let request = Request {
            caches: caches.to_vec(),
            ..request(vec![everything(&checkpoint, &Share::Whole); 4], Way::Auto, 1 << 20)
        };
        Group::plan(Arc::clone(&checkpoint), request).unwrap()
    };
    assert!(plan([Some(1); 4]).is_own(0));
    assert!(!plan([Some(1), Some(1), Some(2), Some(2)]).is_own(0));
    assert!(!plan([Some(1), Some(1), Some(1), None]).is_own(0));
    assert!(!plan([None; 4]).is_own(0));
}

#[test]
fn ranks_agree_about_a_layout_or_are_told() {
    let directory = TempDir::new().unwrap();
    let checkpoint = checkpoint(&directory, &[(Dtype::U8, vec![8, 8])]);
    let list = |share: Share| vec![Want { tensor: 0, share }];
    let plan = |lists| Group::plan(Arc::clone(&checkpoint), request(lists, Way::Auto, 0));
    let chunk = |dim| Share::Chunk { dim };
    for (first, second) in [(Share::Whole, chunk(0)), (chunk(0), chunk(1))] {
        let error = plan(vec![vec![], list(first), list(second)]).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidArgument);
        let text = error.to_string();
        assert!(text.contains("rank 1") && text.contains("rank 2") && text.contains("t00"), "{text}");
    }
    let part = Share::Part { spans: vec![Span::whole(8), Span { start: 2, length: 3, step: 1 }] };
    carry_out(&plan(vec![list(part), list(chunk(0)), list(chunk(0)), vec![]]).unwrap());
}

#[test]
fn digests_tell_plans_apart() {
    let directory = TempDir::new().unwrap();
    let checkpoint = checkpoint(&directory, &model());
    let plan = |share: &Share, window_bytes| {
        let request = request(vec![everything(&checkpoint, share); 2], Way::Auto, window_bytes);
        Group::plan(Arc::clone(&checkpoint), request).unwrap().digest()
    };
    assert_eq!(plan(&Share::Whole, 100), plan(&Share::Whole, 100));
    assert_ne!(plan(&Share::Whole, 100), plan(&Share::Whole, 101));
    let joined = Arc::new(Checkpoint::join(&[directory.path()], &checkpoint.share().unwrap()).unwrap());
    let request = request(vec![everything(&joined, &Share::Whole); 2], Way::Auto, 100);
    assert_eq!(Group::plan(joined, request).unwrap().digest(), plan(&Share::Whole, 100));
}

#[test]
fn numbers_that_are_no_wants_are_refused() {
    let directory = TempDir::new().unwrap();
    let checkpoint = checkpoint(&directory, &[(Dtype::U8, vec![8, 8])]);
    let whole = Want { tensor: 0, share: Share::Whole };
    let part = |spans: [(u64, u64); 2]| Share::Part {
        spans: spans.map(|(start, length)| Span { start, length, step: 1 }).to_vec(),
    };
    let decoded = Want::decode(&[0, 0, 0, 1, -1, 0, 2, 0, 4, 8, 2], &checkpoint).unwrap();
    let expected = [Share::Whole, Share::Chunk { dim: 1 }, part([(0, 8), (4, 2)])];
    assert_eq!(decoded, expected.map(|share| Want { share, ..whole.clone() }));
    let wrong: [&[i64]; 10] = [
        &[0],
        &[1, 0],
        &[-1, 0],
        &[0, 3],
        &[0, 1],
        &[0, 1, 2],
        &[0, 1, -3],
        &[0, 2, 0, 0, 8],
        &[0, 2, 0, 0, 8, 9],
        &[0, 2, -1, 0, 8, 8],
    ];
    for numbers in wrong {
        assert_eq!(Want::decode(numbers, &checkpoint).unwrap_err().kind(), Kind::InvalidArgument, "{numbers:?}");
    }
}
