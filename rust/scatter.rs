//! The table from which the device's kernel knows where the bytes of a chunk belong.

use crate::cast::Cast;

/// Bytes of one task.
pub const TASK_BYTES: usize = 48;
/// A table begins at a multiple of this.
pub const TASK_ALIGNMENT: usize = 16;

/// Rows of bytes on the device that go, one behind the other, to another place there.
pub struct Piece {
    /// The address of the first row.
    pub source: u64,
    /// Where it goes.
    pub target: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// How many rows.
    pub rows: u64,
    /// Bytes from the start of a row to the start of the next.
    pub source_stride_bytes: u64,
    /// What becomes of the elements.
    pub cast: Option<Cast>,
}

/// The tasks of one launch.
pub struct Table {
    tasks: Vec<Piece>,
}

impl Table {
    /// A table of all pieces.
    pub fn new(pieces: impl Iterator<Item = Piece>) -> Table {
        Table { tasks: pieces.collect() }
    }

    /// How many tasks there are.
    pub fn task_count(&self) -> u32 {
        u32::try_from(self.tasks.len()).unwrap_or(u32::MAX)
    }

    /// How many tiles they have together.
    pub fn tile_count(&self) -> u32 {
        0
    }

    /// How long the table is.
    pub fn bytes(&self) -> usize {
        self.tasks.len() * TASK_BYTES
    }

    /// Writes the table.
    pub fn write(&self, _: &mut [u8]) {}
}
