//! Regions of memory: contiguous or strided rows of bytes.

/// `rows` rows of `width` bytes that start `pitch` bytes apart. A region is never
/// empty, its rows never overlap, and its end fits into 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    start: u64,
    width: u64,
    pitch: u64,
    rows: u64,
}

impl Region {
    /// Creates rows of `width` bytes, `pitch` bytes apart. Returns `None` for rows
    /// that are empty, overlap, or end beyond the address space.
    pub fn new(start: u64, width: u64, pitch: u64, rows: u64) -> Option<Region> {
        let overlaps_itself = rows > 1 && pitch < width;
        if width == 0 || rows == 0 || overlaps_itself {
            return None;
        }
        let last = (rows - 1).checked_mul(pitch)?.checked_add(width)?;
        start.checked_add(last)?;
        Some(Region { start, width, pitch, rows })
    }

    /// Creates a contiguous region of `bytes` bytes, or `None` as [`Region::new`] does.
    pub fn linear(start: u64, bytes: u64) -> Option<Region> {
        Region::new(start, bytes, bytes, 1)
    }

    /// Returns the address of the first byte.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Returns the address after the last byte.
    pub fn end(&self) -> u64 {
        self.start + self.span()
    }

    /// Returns the bytes from the start to the end, including gaps between rows.
    pub fn span(&self) -> u64 {
        (self.rows - 1) * self.pitch + self.width
    }

    /// Returns the bytes of all rows.
    pub fn bytes(&self) -> u64 {
        self.rows * self.width
    }

    /// Returns the byte range of each row, relative to the start.
    pub fn rows(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        (0..self.rows).map(|row| {
            let begin = (row * self.pitch) as usize;
            begin..begin + self.width as usize
        })
    }

    /// Returns the concatenated rows. `bytes` begins at the first row.
    pub fn gather(&self, bytes: &[u8]) -> Vec<u8> {
        let mut gathered = Vec::with_capacity(self.bytes() as usize);
        self.rows().for_each(|row| gathered.extend_from_slice(&bytes[row]));
        gathered
    }

    /// Writes `gathered` to the rows. `bytes` begins at the first row.
    pub fn scatter(&self, gathered: &[u8], bytes: &mut [u8]) {
        let rows = self.rows().zip(gathered.chunks(self.width as usize));
        rows.for_each(|(row, from)| bytes[row].copy_from_slice(from));
    }

    /// Returns whether the regions have a byte in common.
    pub fn overlaps(&self, other: &Region) -> bool {
        let (few, many) = if self.rows <= other.rows { (self, other) } else { (other, self) };
        few.start < many.end()
            && many.start < few.end()
            && (0..few.rows).any(|row| many.touches(few.start + row * few.pitch, few.width))
    }

    /// Returns whether a row overlaps `start..start + bytes`.
    fn touches(&self, start: u64, bytes: u64) -> bool {
        let end = start + bytes;
        if end <= self.start {
            return false;
        }
        // Rows are in ascending order. If any row overlaps the range, the last row
        // that begins before the end of the range does.
        let row = ((end - 1 - self.start) / self.pitch).min(self.rows - 1);
        self.start + row * self.pitch + self.width > start
    }
}

impl std::fmt::Display for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x} (", self.start)?;
        if self.rows > 1 {
            write!(f, "{} rows, {} bytes apart, of ", self.rows, self.pitch)?;
        }
        write!(f, "{} bytes)", self.width)
    }
}
