//! Limits of a plan, which follow from the readers and the device.

/// Limits of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest chunk, in bytes. At least `alignment + 16`, so that an element always fits.
    pub chunk_bytes: u64,
    /// Largest gap between two regions that one read covers, in bytes. Reading a short gap costs less than a second
    /// read.
    pub gap_bytes: u64,
    /// Smallest region that is read directly into its destination, in bytes. `None` if only the device can write there,
    /// or if reads must be aligned.
    pub in_place_bytes: Option<u64>,
    /// Multiple to which a reader may widen each read, in bytes; the slot has room for it. 1 if reads may begin and end
    /// at any byte. `chunk_bytes` is a multiple of it, and `gap_bytes` is at least as large unless it is 1.
    pub alignment: u64,
    /// Largest number of copies of a chunk.
    pub copies_max: usize,
    /// Size of the units that a reader reads as a whole, in bytes from the start of a tensor. Long rows are divided
    /// between units where a chunk has room for one. 1 if there are none.
    pub unit_bytes: u64,
    /// Size of the first chunk, in bytes, from which chunks double until they are full. `None` if all are full.
    pub first_bytes: Option<u64>,
}

impl Limits {
    /// Returns how many bytes of a row at `begin` of a tensor at `tensor_begin` fit one chunk, in whole elements.
    pub(super) fn part_bytes(&self, begin: u64, tensor_begin: u64, item_bytes: u64) -> u64 {
        let room = self.chunk_bytes - begin % self.alignment;
        let before = begin - tensor_begin;
        let units = (before + room) / self.unit_bytes * self.unit_bytes;
        let room = units.checked_sub(before).filter(|bytes| *bytes >= item_bytes).unwrap_or(room);
        room - room % item_bytes
    }

    /// Returns the largest row that fits a chunk at any file offset.
    pub(super) fn row_bytes_max(&self) -> u64 {
        self.chunk_bytes - (self.alignment - 1)
    }

    /// Returns whether one read covers rows with this stride and the gaps between them.
    pub(super) fn are_near(&self, row_bytes: u64, stride: u64) -> bool {
        stride - row_bytes <= self.gap_bytes && stride <= self.chunk_bytes
    }

    /// Returns the file offset multiple at which near rows are split, so that regions with columns of the same rows are
    /// split alike. It is smaller than a chunk by one stride, so that the last row fits. `None` for strides above half
    /// a chunk.
    pub(super) fn cell_bytes(&self, stride: u64) -> Option<u64> {
        let room = self.row_bytes_max();
        (stride <= room / 2).then(|| room - stride)
    }

    /// Returns how many rows of a run at `begin` start in the same cell.
    pub(super) fn rows_in_cell(&self, begin: u64, row_bytes: u64, stride: u64) -> u64 {
        let cell = self.cell_bytes(stride).filter(|_| self.are_near(row_bytes, stride));
        cell.map_or(u64::MAX, |cell| (cell - begin % cell).div_ceil(stride))
    }
}
