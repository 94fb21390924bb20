//! Frames of one delta, which are read in the background.

use super::chain::Delta;
use crate::checkpoint::selection::Selection;
use crate::device::host::Host;
use crate::error::{Error, Kind, Result};
use crate::load::stream::{Order, Stream};
use crate::num::{to_u64, to_usize};
use crate::options::Options;
use crate::plan::Destination;
use std::collections::HashMap;
use std::sync::Arc;

/// Frames of one delta in the order in which they are stored.
pub(super) struct FrameStream {
    /// Declared before the memory that it writes to, so that it is dropped first.
    stream: Stream<Host>,
    selection: Selection,
    /// Indices of the frames in the order of the files, and the number of them that were submitted.
    queue: Vec<usize>,
    submitted: usize,
    /// Frames that are being read, and their size in bytes.
    pending: HashMap<usize, Vec<u8>>,
    pending_bytes: u64,
    /// Frames that were read before they are used: another delta has the tensors in another order.
    ready: HashMap<usize, Vec<u8>>,
    /// Indices of the frames that were not taken, by the names of the stored tensors.
    left: HashMap<String, usize>,
    window_bytes: u64,
}

impl FrameStream {
    /// Opens the frames of the named tensors, of which the delta may have some only. The positions and values of a sparse
    /// patch count as frames: they are read by turns, although a file has all positions first. Up to `window_bytes` are read ahead.
    pub(super) fn open(delta: &Delta, names: &[&str], window_bytes: u64, options: &Options) -> Result<FrameStream> {
        let stored: Vec<Vec<String>> =
            names.iter().map(|name| delta.stored(name)).filter(|all| !all.is_empty()).collect();
        let for_each = stored.first().map_or(1, Vec::len);
        let changed = stored.concat();
        let selection = Selection::named(&delta.frames, &changed)?;
        let regions = Arc::clone(selection.regions());
        let stream = Stream::open(&delta.frames, regions, Arc::new(Host), options.clone(), Order::Submitted)?;
        let last_of_each = selection.in_file_order().into_iter().filter(|index| index % for_each == for_each - 1);
        Ok(FrameStream {
            stream,
            queue: last_of_each.flat_map(|last| last + 1 - for_each..=last).collect(),
            selection,
            submitted: 0,
            pending: HashMap::new(),
            pending_bytes: 0,
            ready: HashMap::new(),
            left: changed.into_iter().zip(0..).collect(),
            window_bytes,
        })
    }

    /// Returns the frame in a stored tensor, or `None` if it was not opened. Each is returned once.
    pub(super) fn take(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(wanted) = self.left.remove(name) else { return Ok(None) };
        loop {
            if let Some(frame) = self.ready.remove(&wanted) {
                return Ok(Some(frame));
            }
            self.read_ahead()?;
            let index = self.stream.take()?;
            let missing = || Error::new(Kind::Internal, "the stream returned a frame that was not submitted");
            let frame = self.pending.remove(&index).ok_or_else(missing)?;
            self.pending_bytes -= to_u64(frame.len());
            self.ready.insert(index, frame);
            self.read_ahead()?;
        }
    }

    /// Submits frames, if less than half of the window is pending.
    pub(super) fn read_ahead(&mut self) -> Result<()> {
        if self.pending_bytes > self.window_bytes / 2 {
            return Ok(());
        }
        let mut destinations = Vec::new();
        while let Some(&tensor) = self.queue.get(self.submitted)
            && let Some(region) = self.selection.regions().get(tensor)
        {
            let bytes = region.bytes();
            if self.pending_bytes > 0 && self.pending_bytes.saturating_add(bytes) > self.window_bytes {
                break;
            }
            let mut frame = vec![0; to_usize(bytes)];
            let address = to_u64(frame.as_mut_ptr().expose_provenance());
            destinations.push(Destination { tensor, begin: 0, end: bytes, address, cast: None });
            self.pending.insert(tensor, frame);
            self.pending_bytes += bytes;
            self.submitted += 1;
        }
        if destinations.is_empty() {
            return Ok(());
        }
        let batch = self.stream.planner().prepare(&destinations)?;
        let tensors: Vec<usize> = destinations.iter().map(|destination| destination.tensor).collect();
        // SAFETY: `pending` keeps the memory until the frame is taken, and is dropped after the stream.
        unsafe { self.stream.submit(&tensors, batch) }
    }
}
