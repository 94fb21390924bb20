//! Bytes in rows: what a plain or a strided copy touches.

/// `rows` rows of `width` bytes that start `pitch` bytes apart. Never empty,
/// rows never overlap, and the end fits into 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    start: u64,
    width: u64,
    pitch: u64,
    rows: u64,
}

impl Region {
    /// Rows of `width` bytes, `pitch` bytes apart; `None` if that is empty,
    /// overlaps itself, or ends beyond the address space.
    pub fn new(start: u64, width: u64, pitch: u64, rows: u64) -> Option<Region> {
        let overlaps_itself = rows > 1 && pitch < width;
        if width == 0 || rows == 0 || overlaps_itself {
            return None;
        }
        let last = (rows - 1).checked_mul(pitch)?.checked_add(width)?;
        start.checked_add(last)?;
        Some(Region { start, width, pitch, rows })
    }

    /// `bytes` bytes in one piece; `None` as in [`Region::new`].
    pub fn linear(start: u64, bytes: u64) -> Option<Region> {
        Region::new(start, bytes, bytes, 1)
    }

    /// The first byte's address.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// The address after the last byte.
    pub fn end(&self) -> u64 {
        self.start + self.span()
    }

    /// From the first byte to the last, gaps between rows included.
    pub fn span(&self) -> u64 {
        (self.rows - 1) * self.pitch + self.width
    }

    /// The bytes in the rows.
    pub fn bytes(&self) -> u64 {
        self.rows * self.width
    }

    /// Where each row begins, counted from the start, with its length.
    pub fn rows(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        (0..self.rows).map(|row| {
            let begin = (row * self.pitch) as usize;
            begin..begin + self.width as usize
        })
    }

    /// The rows one behind the other, cut out of the bytes from the first row on.
    pub fn gather(&self, bytes: &[u8]) -> Vec<u8> {
        let mut gathered = Vec::with_capacity(self.bytes() as usize);
        self.rows().for_each(|row| gathered.extend_from_slice(&bytes[row]));
        gathered
    }

    /// Puts `gathered` into the rows, in the bytes from the first row on.
    pub fn scatter(&self, gathered: &[u8], bytes: &mut [u8]) {
        let rows = self.rows().zip(gathered.chunks(self.width as usize));
        rows.for_each(|(row, from)| bytes[row].copy_from_slice(from));
    }

    /// Whether the two have a byte in common.
    pub fn overlaps(&self, other: &Region) -> bool {
        let (few, many) = if self.rows <= other.rows { (self, other) } else { (other, self) };
        few.start < many.end()
            && many.start < few.end()
            && (0..few.rows).any(|row| many.touches(few.start + row * few.pitch, few.width))
    }

    /// Whether a row lies in part in `start .. start + bytes`.
    fn touches(&self, start: u64, bytes: u64) -> bool {
        let end = start + bytes;
        if end <= self.start {
            return false;
        }
        // Rows come in ascending order, so if any row reaches into the range,
        // the last one that begins before its end does.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The same question, asked byte by byte.
    fn share_a_byte(a: &Region, b: &Region) -> bool {
        let bytes = |r: &Region| -> Vec<u64> { r.rows().flatten().map(|offset| r.start + offset as u64).collect() };
        let of_b = bytes(b);
        bytes(a).iter().any(|byte| of_b.contains(byte))
    }

    #[test]
    fn overlap_agrees_with_a_byte_by_byte_comparison() {
        let mut random = crate::random::Random::new(7);
        let mut region = || {
            let width = 1 + random.below(5);
            let pitch = width + random.below(6);
            Region::new(100 + random.below(24), width, pitch, 1 + random.below(5))
        };
        let mut seen = [false; 2];
        for _ in 0..5000 {
            let (Some(a), Some(b)) = (region(), region()) else {
                unreachable!("the rows are neither empty nor overlapping");
            };
            let expected = share_a_byte(&a, &b);
            assert_eq!(a.overlaps(&b), expected, "{a} and {b}");
            seen[usize::from(expected)] = true;
        }
        assert_eq!(seen, [true, true]);
    }

    #[test]
    fn impossible_regions_are_none() {
        assert_eq!(Region::linear(8, 0), None);
        assert_eq!(Region::new(0, 8, 4, 2), None);
        assert_eq!(Region::linear(u64::MAX, 2), None);
        assert_eq!(Region::new(0, 1, u64::MAX, 3), None);
    }
}
