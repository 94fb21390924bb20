//! Vector clocks: which work is certain to come before which.
//!
//! Each stream numbers its pieces of work 1, 2, 3 and so on. A clock holds one
//! such number per stream and means: all work up to there comes before this
//! point. Clocks follow the calls that the program makes and not the threads
//! that run the work, so a conclusion drawn from them holds for every run.

/// One piece of work: the `number`-th of its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Index of the stream.
    pub stream: usize,
    /// Counted from 1; 0 stands for the time before all work.
    pub number: u64,
}

/// For each stream, the number of its pieces of work that come before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clock(Vec<u64>);

impl Clock {
    /// The last work of `stream` that comes before this point.
    pub fn last(&self, stream: usize) -> Mark {
        let number = self.0.get(stream).copied().unwrap_or(0);
        Mark { stream, number }
    }

    /// Takes in `mark`, and so all work of that stream up to it.
    pub fn include(&mut self, mark: Mark) {
        if self.0.len() <= mark.stream {
            self.0.resize(mark.stream + 1, 0);
        }
        self.0[mark.stream] = self.0[mark.stream].max(mark.number);
    }

    /// Takes in everything that `other` holds.
    pub fn join(&mut self, other: &Clock) {
        for mark in other.marks() {
            self.include(mark);
        }
    }

    /// Adds a new piece of work to the end of `stream`.
    pub fn append(&mut self, stream: usize) -> Mark {
        let number = self.last(stream).number + 1;
        let mark = Mark { stream, number };
        self.include(mark);
        mark
    }

    /// Whether `mark` is certain to come before this point.
    pub fn covers(&self, mark: Mark) -> bool {
        self.last(mark.stream).number >= mark.number
    }

    /// Whether everything that `other` holds is certain to come before.
    pub fn covers_all(&self, other: &Clock) -> bool {
        other.marks().all(|mark| self.covers(mark))
    }

    fn marks(&self) -> impl Iterator<Item = Mark> + '_ {
        let numbers = self.0.iter().enumerate();
        numbers.map(|(stream, &number)| Mark { stream, number })
    }
}

/// What the program as a whole knows.
#[derive(Debug, Default)]
pub struct Order {
    /// Work that the host knows is finished. All host threads share one clock:
    /// how they wait for each other cannot be seen from here, so whatever one
    /// of them knows is taken to be known to all. That may hide a mistake
    /// between two host threads; it never reports one that is not there.
    pub host: Clock,
    /// Work that the host or another stream has waited for.
    pub awaited: Clock,
    /// Work that has really run.
    pub finished: Clock,
}

impl Order {
    /// The host has learned that everything in `clock` is finished.
    pub fn host_learns(&mut self, clock: &Clock) {
        self.host.join(clock);
        self.awaited.join(clock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_covers_what_it_has_joined_and_nothing_later() {
        let mut copies = Clock::default();
        let first = copies.append(3);
        let mut caller = Clock::default();
        assert!(!caller.covers(first));
        caller.join(&copies);
        let second = copies.append(3);
        assert!(caller.covers(first));
        assert!(!caller.covers(second));
        assert!(copies.covers_all(&caller));
        assert!(!caller.covers_all(&copies));
    }
}
