//! Reproducible random numbers.

use std::time::Duration;

/// The splitmix64 generator.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator whose numbers depend only on `seed`.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Returns a number from 0 to `limit - 1`. `limit` must not be 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % limit
    }

    /// Delays the thread: mostly not at all, sometimes by a yield, and sometimes by
    /// 20 to 420 microseconds.
    pub fn delay(&mut self) {
        match self.below(16) {
            0..9 => {}
            9..14 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(20 + self.below(400))),
        }
    }
}
