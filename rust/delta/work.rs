//! Changes of many tensors by a chain of deltas, which several threads compute while the next frames are read.

use super::chain::{Chain, Delta, FramePlace};
use super::changes::Changes;
use super::decode::{self, Frame, Tensor};
use super::frames::FrameStream;
use super::{BLOCK_BYTES, patch};
use crate::checkpoint::region::StridedRange;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::os::mutex::{Condvar, Mutex};
use crate::os::retry::SharedCheck;
use crate::os::sigint::POLL_INTERVAL;
use crate::os::{memory, threads};
use std::collections::HashMap;

/// Largest size of the frames that are read ahead, of all deltas together, in bytes.
const FRAMES_BYTES_MAX: u64 = 512 << 20;
/// Size of the copies of old values in a batch, in bytes. The copies of the next batch are in flight at the same time.
const COPIES_BYTES: u64 = 512 << 20;
/// Memory of all decoders if the caller has no limit, in bytes.
const DECODERS_BYTES: u64 = 256 << 20;
/// Smallest limit for the decoders, in bytes. Staged values have a limit that may be smaller.
const DECODERS_BYTES_MIN: u64 = 64 << 20;

/// Tensor whose changes are computed.
pub struct Held {
    /// Name in the deltas.
    pub name: String,
    /// Dtype, for errors.
    pub dtype: Option<Dtype>,
    /// Size of an element in bytes.
    pub item_bytes: usize,
    /// Size of the whole tensor in bytes.
    pub tensor_bytes: u64,
    /// Place of the old values in the whole tensor, or `None` if they are all of it.
    pub region: Option<StridedRange>,
    /// Whether the caller copies the old values to memory of the host, for a batch.
    pub is_copied: bool,
}

impl Held {
    /// Returns the size of the old values in bytes.
    pub fn bytes(&self) -> u64 {
        self.region.as_ref().map_or(self.tensor_bytes, StridedRange::bytes)
    }

    /// Checks that the values of a sparse patch fit the tensor.
    fn check(&self, delta: &Delta) -> Result<()> {
        let Some(pair) = delta.pair(&self.name) else { return Ok(()) };
        let items = self.tensor_bytes / to_u64(self.item_bytes.max(1));
        let message = match self.dtype {
            dtype if dtype != Some(pair.dtype) => {
                let ([_, values], is) = (&pair.names, dtype.map_or("of an unknown dtype", Dtype::name));
                format!("{values:?} of the patch has dtype {}, but the target's tensor is {is}", pair.dtype)
            }
            _ if pair.count > items => format!("{} elements change, but the target's tensor has {items}", pair.count),
            _ => return Ok(()),
        };
        let error = Error::new(Kind::Malformed, message).at(&delta.path).tensor(&*self.name).offset(pair.begin);
        Err(self.note_base(error))
    }

    /// Adds to an error what the target is, and what to do if the checkpoint differs.
    fn note_base(&self, error: Error) -> Error {
        error.note(&format!(
            "the target's tensor is {} of {} bytes; if the checkpoint has it in another dtype or layout, give \
             fst.prepare_update the tensors of the base version as base=",
            self.dtype.map_or("of an unknown dtype", Dtype::name),
            self.tensor_bytes
        ))
    }
}

/// Old values in memory of the host.
#[derive(Clone, Copy)]
pub enum Old<'a> {
    /// Memory that stays as it is.
    Memory(&'a [u8]),
    /// Address of the bytes of a mapped file, of which system calls read the part that is left.
    Mapped(u64),
}

/// Tensors whose changes are computed, batch by batch.
pub struct Work {
    chain: Chain,
    tensors: Vec<Held>,
    /// Indices of the tensors in the order of the chain, and the number of them that are in a batch.
    order: Vec<usize>,
    batched: usize,
    limit: Option<u64>,
    state: Mutex<State>,
    released: Condvar,
}

struct State {
    /// Frames of each delta.
    streams: Vec<FrameStream>,
    /// Number of tensors that a thread has begun.
    begun: usize,
    /// Memory of the decoders at work, in bytes.
    decoders_bytes: u64,
}

impl Work {
    /// Begins to read the frames of tensors. `limit` is the caller's limit for staged values, in bytes.
    ///
    /// # Errors
    /// `invalid-argument` for a name that occurs twice or that no delta changes; `malformed` for a sparse patch with values
    /// of another dtype; the errors of [`FrameStream::open`].
    pub fn begin(chain: &Chain, tensors: Vec<Held>, limit: Option<u64>, options: &Options) -> Result<Work> {
        let mut positions: HashMap<&str, usize> = chain.names().into_iter().zip(0..).collect();
        let mut order = Vec::with_capacity(tensors.len());
        for (index, held) in tensors.iter().enumerate() {
            let message = "no delta changes it; give each name of names() once";
            let unknown = || Error::new(Kind::InvalidArgument, message).tensor(&*held.name);
            order.push((positions.remove(&*held.name).ok_or_else(unknown)?, index));
        }
        order.sort_unstable();
        for delta in chain.deltas() {
            tensors.iter().try_for_each(|held| held.check(delta))?;
        }
        let names: Vec<&str> = tensors.iter().map(|held| held.name.as_str()).collect();
        let deltas = chain.deltas();
        let window_bytes = limit.map_or(FRAMES_BYTES_MAX, |limit| limit.clamp(DECODERS_BYTES_MIN, FRAMES_BYTES_MAX));
        let window_bytes = window_bytes / to_u64(deltas.len().max(1));
        let mut streams = Vec::with_capacity(deltas.len());
        for delta in deltas {
            let mut stream = FrameStream::open(delta, &names, window_bytes, options)?;
            stream.read_ahead()?;
            streams.push(stream);
        }
        Ok(Work {
            chain: chain.clone(),
            order: order.into_iter().map(|(_, index)| index).collect(),
            tensors,
            batched: 0,
            limit: limit.map(|limit| limit.max(DECODERS_BYTES_MIN)),
            state: Mutex::new(State { streams, begun: 0, decoders_bytes: 0 }),
            released: Condvar::new(),
        })
    }

    /// Returns the indices of the tensors of the next batch: those whose copies take up to 512 MiB, at least one tensor.
    /// Empty after the last.
    pub fn next_batch(&mut self) -> Vec<usize> {
        let begin = self.batched;
        let mut bytes = 0_u64;
        while let Some(held) = self.order.get(self.batched).and_then(|&index| self.tensors.get(index)) {
            if held.is_copied {
                bytes = bytes.saturating_add(held.bytes());
                if bytes > COPIES_BYTES && self.batched > begin {
                    break;
                }
            }
            self.batched += 1;
        }
        self.order.get(begin..self.batched).unwrap_or_default().to_vec()
    }

    /// Computes the changes of a batch on several threads, given the old values of its tensors. Batches follow each other
    /// in their order.
    ///
    /// # Errors
    /// The errors of [`decode::changes`] and [`FrameStream::take`]; `invalid-argument` for old values of another size;
    /// `out-of-memory` if the decoders of a tensor exceed the caller's limit; `io` for a mapped file that became shorter.
    pub fn compute(&self, threads: usize, old: &[Old<'_>], check: SharedCheck<'_>) -> Result<Vec<(usize, Changes)>> {
        let first = self.state.lock().begun;
        threads::map(threads, old.len(), |_| {
            let taken = self.take(check)?;
            let missing = || Error::new(Kind::Internal, "a tensor of another batch");
            let held = self.tensors.get(taken.index).ok_or_else(missing)?;
            let mut copy = Vec::new();
            let old = match *old.get(taken.turn - first).ok_or_else(missing)? {
                Old::Memory(bytes) => bytes,
                Old::Mapped(address) => {
                    copy.resize(to_usize(held.bytes()), 0);
                    let gone = |_| {
                        let message = "its old values are in a mapped file that became shorter or cannot be read";
                        Error::new(Kind::Io, message).tensor(&*held.name)
                    };
                    // SAFETY: the caller's promise for `Old::Mapped`.
                    unsafe { memory::read(address, &mut copy) }.map_err(gone)?;
                    &copy
                }
            };
            Ok((taken.index, self.changes(held, old, &taken.frames, check)?))
        })
    }

    fn changes(&self, held: &Held, old: &[u8], frames: &[(usize, Vec<u8>)], check: SharedCheck<'_>) -> Result<Changes> {
        if held.bytes() != to_u64(old.len()) {
            let message = format!("has {} bytes; its shape and index region have {}", old.len(), held.bytes());
            return Err(Error::new(Kind::InvalidArgument, message).tensor(&*held.name));
        }
        let mut stored = Vec::with_capacity(frames.len());
        for (delta, bytes) in frames {
            let Some(delta) = self.chain.deltas().get(*delta) else { continue };
            let Some(place) = delta.frame(&held.name)? else { continue };
            let encoding = delta.properties.encoding;
            let FramePlace { path, begin, checksum, values_begin } = place;
            stored.push(Frame { encoding, bytes, values_begin, checksum, path, begin });
        }
        let (item_bytes, tensor_bytes, region) = (held.item_bytes, held.tensor_bytes, held.region.clone());
        let tensor = Tensor { name: &held.name, old, item_bytes, tensor_bytes, region, frames: stored };
        decode::changes(&tensor, check).map_err(|error| match error.kind() {
            Kind::Malformed | Kind::Integrity => held.note_base(error),
            _ => error,
        })
    }

    /// Takes the next tensor and its frames, when there is memory for its decoders.
    fn take(&self, check: SharedCheck<'_>) -> Result<Taken<'_>> {
        let mut state = self.state.lock();
        let turn = state.begun;
        let missing = || Error::new(Kind::Internal, "all tensors of the batches were taken");
        let index = *self.order.get(turn).ok_or_else(missing)?;
        let held = self.tensors.get(index).ok_or_else(missing)?;
        state.begun += 1;
        let mut frames = Vec::new();
        let mut bytes = 2 * to_u64(BLOCK_BYTES);
        for ((number, stream), delta) in state.streams.iter_mut().enumerate().zip(self.chain.deltas()) {
            let Some(place) = delta.frame(&held.name)? else { continue };
            let mut frame = Vec::new();
            for stored in delta.stored(&held.name) {
                let part = stream.take(&stored)?.ok_or_else(missing)?;
                frame = if frame.is_empty() { part } else { [frame, part].concat() };
            }
            bytes += patch::memory_bytes(delta.properties.encoding, &frame, place.values_begin, held.tensor_bytes);
            frames.push((number, frame));
        }
        if let Some(limit) = self.limit.filter(|&limit| bytes > limit) {
            let message = format!(
                "its {} frames take {bytes} bytes to decode at once, but at most {limit} are available; raise \
                 staging_bytes, or apply fewer deltas at once; nothing was written",
                frames.len()
            );
            return Err(Error::new(Kind::OutOfMemory, message).tensor(&*held.name));
        }
        let limit = self.limit.unwrap_or(DECODERS_BYTES);
        while state.decoders_bytes > 0 && state.decoders_bytes + bytes > limit {
            check()?;
            state = self.released.wait_timeout(state, POLL_INTERVAL);
        }
        state.decoders_bytes += bytes;
        Ok(Taken { work: self, turn, index, frames, bytes })
    }
}

/// Tensor that a thread has begun. Others may use the memory of its decoders when it is dropped.
struct Taken<'a> {
    work: &'a Work,
    turn: usize,
    index: usize,
    /// Frames, each with the index of its delta.
    frames: Vec<(usize, Vec<u8>)>,
    /// Memory of the decoders in bytes.
    bytes: u64,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.work.state.lock().decoders_bytes -= self.bytes;
        self.work.released.notify_all();
    }
}
