//! Salsa20, eight blocks at a time.
//!
//! The `salsa20` crate computes one block at a time. Here, the blocks are independent turns of a loop without branches,
//! which the compiler turns into vector instructions.

use crate::num::to_u64;
use crypto_secretbox::cipher::consts::{U8, U16, U32, U64};
use crypto_secretbox::cipher::generic_array::GenericArray;
use crypto_secretbox::cipher::inout::InOutBuf;
use crypto_secretbox::cipher::{
    Block, BlockSizeUser, Iv, IvSizeUser, Key, KeyIvInit, KeySizeUser, ParBlocks, ParBlocksSizeUser, StreamBackend,
    StreamCipher, StreamCipherCore, StreamCipherCoreWrapper, StreamCipherError, StreamClosure,
};
use crypto_secretbox::{Kdf, XSalsa20Poly1305};
use std::{array, iter};

/// Blocks that are computed at a time.
const BLOCKS: usize = 8;
/// Size of a word in bytes. A block has 16 words.
const WORD_BYTES: usize = 4;

/// Stream cipher, as `crypto_secretbox::SecretBox` takes one.
pub(super) struct Salsa20(StreamCipherCoreWrapper<Core>);

impl KeySizeUser for Salsa20 {
    type KeySize = U32;
}

impl IvSizeUser for Salsa20 {
    type IvSize = U8;
}

impl KeyIvInit for Salsa20 {
    fn new(key: &Key<Salsa20>, nonce: &Iv<Salsa20>) -> Salsa20 {
        Salsa20(StreamCipherCoreWrapper::from_core(Core::new(key, nonce)))
    }
}

impl StreamCipher for Salsa20 {
    fn try_apply_keystream_inout(&mut self, data: InOutBuf<'_, '_, u8>) -> Result<(), StreamCipherError> {
        self.0.try_apply_keystream_inout(data)
    }
}

impl Kdf for Salsa20 {
    fn kdf(key: &Key<Salsa20>, nonce: &GenericArray<u8, U16>) -> Key<Salsa20> {
        XSalsa20Poly1305::kdf(key, nonce)
    }
}

/// Words of all blocks before the rounds, without the number of the block.
struct Core {
    words: [u32; 16],
    next_block: u64,
}

impl Core {
    fn new(key: &[u8], nonce: &[u8]) -> Core {
        let mut bytes = key.as_chunks::<WORD_BYTES>().0.iter().chain(nonce.as_chunks::<WORD_BYTES>().0);
        let words: [u32; 10] = array::from_fn(|_| bytes.next().map_or(0, |bytes| u32::from_le_bytes(*bytes)));
        let [k0, k1, k2, k3, k4, k5, k6, k7, n0, n1] = words;
        // The constants are the text "expand 32-byte k".
        let (c0, c1, c2, c3) = (0x6170_7865, 0x3320_646e, 0x7962_2d32, 0x6b20_6574);
        Core { words: [c0, k0, k1, k2, k3, c1, n0, n1, 0, 0, c2, k4, k5, k6, k7, c3], next_block: 0 }
    }

    /// Writes the key stream of the next blocks, up to [`BLOCKS`] of them.
    fn write(&mut self, blocks: &mut [GenericArray<u8, U64>]) {
        let first = self.next_block;
        self.next_block = first.wrapping_add(to_u64(blocks.len()));
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { write_with_avx2(&self.words, first, blocks) };
        }
        write(&self.words, first, blocks);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn write_with_avx2(words: &[u32; 16], first: u64, blocks: &mut [GenericArray<u8, U64>]) {
    write(words, first, blocks);
}

#[inline(always)]
#[allow(clippy::indexing_slicing, reason = "the index counts the blocks of an array")]
fn write(words: &[u32; 16], first: u64, blocks: &mut [GenericArray<u8, U64>]) {
    let numbers: [[u32; 2]; BLOCKS] = array::from_fn(|block| halves(first.wrapping_add(to_u64(block))));
    // Word by word, so that a vector has the same word of all blocks.
    let mut results = [[0; BLOCKS]; 16];
    for block in 0..BLOCKS {
        let mut before = *words;
        [before[8], before[9]] = numbers[block];
        let after = rounds(before);
        for (result, (one, other)) in results.iter_mut().zip(iter::zip(before, after)) {
            result[block] = one.wrapping_add(other);
        }
    }
    for (block, bytes) in blocks.iter_mut().enumerate().take(BLOCKS) {
        for (chunk, result) in bytes.as_chunks_mut::<WORD_BYTES>().0.iter_mut().zip(&results) {
            *chunk = result[block].to_le_bytes();
        }
    }
}

/// Returns the lower and the upper half of a number.
fn halves(number: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = number.to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}

macro_rules! quarter_round {
    ($words:ident, $a:literal, $b:literal, $c:literal, $d:literal) => {
        $words[$b] ^= $words[$a].wrapping_add($words[$d]).rotate_left(7);
        $words[$c] ^= $words[$b].wrapping_add($words[$a]).rotate_left(9);
        $words[$d] ^= $words[$c].wrapping_add($words[$b]).rotate_left(13);
        $words[$a] ^= $words[$d].wrapping_add($words[$c]).rotate_left(18);
    };
}

/// Expands to two rounds for each mention of the words. A loop would not become vector instructions.
macro_rules! double_rounds {
    ($($words:ident)*) => {$(
        quarter_round!($words, 0, 4, 8, 12);
        quarter_round!($words, 5, 9, 13, 1);
        quarter_round!($words, 10, 14, 2, 6);
        quarter_round!($words, 15, 3, 7, 11);
        quarter_round!($words, 0, 1, 2, 3);
        quarter_round!($words, 5, 6, 7, 4);
        quarter_round!($words, 10, 11, 8, 9);
        quarter_round!($words, 15, 12, 13, 14);
    )*};
}

#[inline(always)]
fn rounds(mut words: [u32; 16]) -> [u32; 16] {
    double_rounds!(words words words words words words words words words words);
    words
}

impl BlockSizeUser for Core {
    type BlockSize = U64;
}

impl StreamCipherCore for Core {
    fn remaining_blocks(&self) -> Option<usize> {
        usize::try_from(u64::MAX - self.next_block).ok()
    }

    fn process_with_backend(&mut self, closure: impl StreamClosure<BlockSize = U64>) {
        closure.call(&mut Backend(self));
    }
}

struct Backend<'a>(&'a mut Core);

impl BlockSizeUser for Backend<'_> {
    type BlockSize = U64;
}

impl ParBlocksSizeUser for Backend<'_> {
    type ParBlocksSize = U8;
}

impl StreamBackend for Backend<'_> {
    fn gen_ks_block(&mut self, block: &mut Block<Self>) {
        self.0.write(std::slice::from_mut(block));
    }

    fn gen_par_ks_blocks(&mut self, blocks: &mut ParBlocks<Self>) {
        self.0.write(blocks);
    }

    fn gen_tail_blocks(&mut self, blocks: &mut [Block<Self>]) {
        self.0.write(blocks);
    }
}
