//! BLAKE3 digests of inputs whose pieces come in any order.
//!
//! BLAKE3 divides an input into blocks of 1024 bytes and hashes them as the leaves of a binary tree. The whole blocks of
//! a piece form subtrees, which are hashed at once, without the other pieces. Blocks of which a piece has only a part
//! are collected:
//!
//! ```text
//! blocks     |     |     |     |     |     |     |     |     |  |
//! piece               [..|=====|===========|...]
//!             a part of a block ^ subtrees   ^ a part of a block
//! ```
//!
//! The subtrees of groups of the same size, a power of two of blocks, have chaining values of their own. The digest
//! follows from them: each two neighbours are merged, level by level, and the last one without a neighbour moves up.

use crate::num::{to_u64, to_usize};
use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, left_subtree_len, max_subtree_len, merge_subtrees_non_root, merge_subtrees_root,
};
use std::collections::BTreeMap;
use std::ops::Range;

/// Size of a leaf in bytes.
const BLOCK_BYTES: u64 = 1024;

/// Hashed piece of an input.
pub struct Piece<'a> {
    /// Beginning, length and value of each subtree.
    subtrees: Vec<(u64, u64, ChainingValue)>,
    /// Beginning and bytes of each part of a block, at most two.
    parts: Vec<(u64, &'a [u8])>,
}

impl<'a> Piece<'a> {
    /// Hashes the bytes from `begin` of an input of `length` bytes, with subtrees of at most `subtree_bytes_max`. The piece
    /// lies inside the input.
    pub fn new(begin: u64, bytes: &'a [u8], length: u64, subtree_bytes_max: u64) -> Piece<'a> {
        let mut piece = Piece { subtrees: Vec::new(), parts: Vec::new() };
        let (mut at, mut rest) = (begin, bytes);
        while !rest.is_empty() {
            let block_end = (at / BLOCK_BYTES + 1).saturating_mul(BLOCK_BYTES).min(length);
            let is_whole = at.is_multiple_of(BLOCK_BYTES) && at.saturating_add(to_u64(rest.len())) >= block_end;
            // The root of a tree is hashed differently, so that the only block of an input is always collected.
            let bytes = if is_whole && length > BLOCK_BYTES {
                subtree_bytes(at, to_u64(rest.len()).min(subtree_bytes_max), length)
            } else {
                (block_end - at).min(to_u64(rest.len()))
            };
            let (own, after) = rest.split_at_checked(to_usize(bytes)).unwrap_or((rest, &[]));
            if is_whole && length > BLOCK_BYTES {
                piece.subtrees.push((at, bytes, subtree(at, own)));
            } else {
                piece.parts.push((at, own));
            }
            at = at.saturating_add(bytes);
            rest = after;
        }
        piece
    }
}

/// Returns the size of the largest subtree at block `begin` that has at most `available` bytes and is not the root.
fn subtree_bytes(begin: u64, available: u64, length: u64) -> u64 {
    // A subtree on the left has a power of two of whole blocks. On the right edge a single block may be shorter.
    let blocks = available / BLOCK_BYTES;
    let Some(blocks) = blocks.checked_ilog2() else { return available };
    let bytes = (1 << blocks) * BLOCK_BYTES;
    let bytes = max_subtree_len(begin).map_or(bytes, |most| bytes.min(most));
    if bytes == length { bytes / 2 } else { bytes }
}

/// Returns the chaining value of the subtree with these bytes of an input, which begin at `begin`. It is not the root.
pub fn subtree(begin: u64, bytes: &[u8]) -> ChainingValue {
    let mut hasher = blake3::Hasher::new();
    hasher.set_input_offset(begin).update(bytes).finalize_non_root()
}

/// Part of the tree of an input.
pub struct Tree {
    length: u64,
    added: u64,
    /// Length and value of each known subtree, by its beginning.
    subtrees: BTreeMap<u64, (u64, ChainingValue)>,
    /// Incomplete blocks, by their beginning.
    blocks: BTreeMap<u64, Block>,
}

/// Block of which some bytes are missing.
struct Block {
    bytes: Vec<u8>,
    /// Number of bytes that were added.
    filled: u64,
    /// Positions in the block from the first byte that was added to the end of the last.
    hull: Range<usize>,
}

impl Tree {
    /// Creates the tree of an input of `length` bytes.
    pub fn new(length: u64) -> Tree {
        Tree { length, added: 0, subtrees: BTreeMap::new(), blocks: BTreeMap::new() }
    }

    /// Adds a piece, and returns the digest after the last one. Returns `None` if bytes were added twice.
    pub fn add(&mut self, piece: Piece<'_>) -> Option<Option<[u8; 32]>> {
        for (begin, bytes, value) in piece.subtrees {
            self.added = self.added.checked_add(bytes)?;
            if self.subtrees.insert(begin, (bytes, value)).is_some() {
                return None;
            }
        }
        for (begin, part) in piece.parts {
            self.added = self.added.checked_add(to_u64(part.len()))?;
            let block = begin - begin % BLOCK_BYTES;
            let block_bytes = BLOCK_BYTES.min(self.length.checked_sub(block)?);
            let column = to_usize(begin - block);
            let range = column..column.checked_add(part.len())?;
            let known = self.blocks.entry(block).or_insert_with(|| Block {
                bytes: vec![0; to_usize(block_bytes)],
                filled: 0,
                hull: range.clone(),
            });
            known.filled += to_u64(part.len());
            known.hull = known.hull.start.min(range.start)..known.hull.end.max(range.end);
            known.bytes.get_mut(range)?.copy_from_slice(part);
            if known.filled >= block_bytes && self.length > BLOCK_BYTES {
                let value = subtree(block, &known.bytes);
                self.blocks.remove(&block);
                if self.subtrees.insert(block, (block_bytes, value)).is_some() {
                    return None;
                }
            }
        }
        match self.added {
            added if added < self.length => Some(None),
            added if added > self.length => None,
            _ => self.root().map(Some),
        }
    }

    /// Returns the chaining values of the groups of an input that is complete and longer than a group, or `None` if its
    /// pieces had larger subtrees.
    pub fn groups(&self, group_bytes: u64) -> Option<Vec<ChainingValue>> {
        let count = self.length.div_ceil(group_bytes);
        let group = |index| {
            let begin = index * group_bytes;
            self.value(begin, group_bytes.min(self.length - begin))
        };
        (0..count).map(group).collect()
    }

    /// Appends the values of the largest subtrees of at most `subtree_bytes_max` bytes whose bytes were all added, and the
    /// bytes of incomplete blocks, for [`add_encoded`](Tree::add_encoded). Returns `None` if bytes in the middle of a block
    /// are missing.
    pub fn encode(&self, subtree_bytes_max: u64, into: &mut Vec<u8>) -> Option<()> {
        let mut subtrees = Vec::new();
        self.collect(0, self.length, subtree_bytes_max, &mut subtrees);
        let mut put = |number: u64| into.extend(number.to_le_bytes());
        put(to_u64(subtrees.len()));
        put(to_u64(self.blocks.len()));
        for (begin, bytes, value) in subtrees {
            into.extend(begin.to_le_bytes());
            into.extend(bytes.to_le_bytes());
            into.extend(value);
        }
        for (begin, block) in &self.blocks {
            let bytes = block.bytes.get(block.hull.clone()).filter(|bytes| to_u64(bytes.len()) == block.filled)?;
            into.extend((begin + to_u64(block.hull.start)).to_le_bytes());
            into.extend(block.filled.to_le_bytes());
            into.extend(bytes);
        }
        Some(())
    }

    /// Adds what [`encode`](Tree::encode) has written for a tree of the same length, and returns the digest if no byte is
    /// missing. Returns `None` if bytes were added twice, or if the encoded bytes are not complete.
    pub fn add_encoded(&mut self, encoded: &mut &[u8]) -> Option<Option<[u8; 32]>> {
        fn take<'a>(encoded: &mut &'a [u8], bytes: u64) -> Option<&'a [u8]> {
            let (own, rest) = encoded.split_at_checked(usize::try_from(bytes).ok()?)?;
            *encoded = rest;
            Some(own)
        }
        let number = |encoded: &mut &[u8]| Some(u64::from_le_bytes(take(encoded, 8)?.try_into().ok()?));
        let (subtrees, parts) = (number(encoded)?, number(encoded)?);
        let mut piece = Piece { subtrees: Vec::new(), parts: Vec::new() };
        for _ in 0..subtrees {
            let (begin, bytes) = (number(encoded)?, number(encoded)?);
            piece.subtrees.push((begin, bytes, take(encoded, 32)?.try_into().ok()?));
        }
        for _ in 0..parts {
            let (begin, bytes) = (number(encoded)?, number(encoded)?);
            piece.parts.push((begin, take(encoded, bytes)?));
        }
        self.add(piece)
    }

    /// Adds the largest known subtrees of a subtree to a list.
    fn collect(&self, begin: u64, length: u64, subtree_bytes_max: u64, into: &mut Vec<(u64, u64, ChainingValue)>) {
        if self.subtrees.range(begin..begin.saturating_add(length)).next().is_none() {
            return;
        }
        let is_root = length == self.length;
        if length <= subtree_bytes_max
            && !is_root
            && let Some(value) = self.value(begin, length)
        {
            into.push((begin, length, value));
            return;
        }
        if length > BLOCK_BYTES {
            let left = left_subtree_len(length);
            self.collect(begin, left, subtree_bytes_max, into);
            self.collect(begin.saturating_add(left), length - left, subtree_bytes_max, into);
        }
    }

    fn root(&self) -> Option<[u8; 32]> {
        if self.length <= BLOCK_BYTES {
            let (_, block) = self.blocks.first_key_value()?;
            return Some(*blake3::hash(&block.bytes).as_bytes());
        }
        let left = left_subtree_len(self.length);
        let (left, right) = (self.value(0, left)?, self.value(left, self.length - left)?);
        Some(*merge_subtrees_root(&left, &right, Mode::Hash).as_bytes())
    }

    /// Returns the value of a subtree, or `None` if bytes are missing.
    fn value(&self, begin: u64, length: u64) -> Option<ChainingValue> {
        if let Some((known, value)) = self.subtrees.get(&begin)
            && *known == length
        {
            return Some(*value);
        }
        if length <= BLOCK_BYTES {
            return None;
        }
        let left = left_subtree_len(length);
        let (left, right) = (self.value(begin, left)?, self.value(begin.checked_add(left)?, length - left)?);
        Some(merge_subtrees_non_root(&left, &right, Mode::Hash))
    }
}

/// Returns the chaining values of groups of twice the size.
pub fn parents(values: &[ChainingValue]) -> Vec<ChainingValue> {
    let parent = |pair: &[ChainingValue]| match pair {
        [left, right] => Some(merge_subtrees_non_root(left, right, Mode::Hash)),
        [alone] => Some(*alone),
        _ => None,
    };
    values.chunks(2).filter_map(parent).collect()
}

/// Returns the digest of an input whose groups have these chaining values, or `None` if there are fewer than two.
pub fn root_of(mut values: Vec<ChainingValue>) -> Option<[u8; 32]> {
    while values.len() > 2 {
        values = parents(&values);
    }
    let [left, right] = values.try_into().ok()?;
    Some(*merge_subtrees_root(&left, &right, Mode::Hash).as_bytes())
}
