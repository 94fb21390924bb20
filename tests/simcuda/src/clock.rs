//! Vector clocks, which define the happens-before relation of queued work.
//!
//! Each stream numbers its work 1, 2, 3 and so on. A clock holds one number per
//! stream: all work up to this number happens before the clock's point in time.
//! Clocks follow the calls of the program and not the threads that run the
//! work, so a conclusion drawn from clocks holds for every run.

/// Identifier of queued work: the `number`-th work of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkId {
    /// Index of the stream.
    pub stream: usize,
    /// Number, counted from 1; 0 refers to the time before all work.
    pub number: u64,
}

/// Number of the last work of each stream that happens before a point in time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clock(Vec<u64>);

impl Clock {
    /// Returns the last work of `stream` that happens before this point.
    pub fn last(&self, stream: usize) -> WorkId {
        let number = self.0.get(stream).copied().unwrap_or(0);
        WorkId { stream, number }
    }

    /// Adds `id` and all earlier work of its stream.
    pub fn include(&mut self, id: WorkId) {
        if self.0.len() <= id.stream {
            self.0.resize(id.stream + 1, 0);
        }
        self.0[id.stream] = self.0[id.stream].max(id.number);
    }

    /// Adds all work of `other`.
    pub fn join(&mut self, other: &Clock) {
        for id in other.ids() {
            self.include(id);
        }
    }

    /// Appends new work to `stream` and returns its identifier.
    pub fn append(&mut self, stream: usize) -> WorkId {
        let number = self.last(stream).number + 1;
        let id = WorkId { stream, number };
        self.include(id);
        id
    }

    /// Returns whether `id` happens before this point.
    pub fn covers(&self, id: WorkId) -> bool {
        self.last(id.stream).number >= id.number
    }

    /// Returns whether all work of `other` happens before this point.
    pub fn covers_all(&self, other: &Clock) -> bool {
        other.ids().all(|id| self.covers(id))
    }

    fn ids(&self) -> impl Iterator<Item = WorkId> + '_ {
        let numbers = self.0.iter().enumerate();
        numbers.map(|(stream, &number)| WorkId { stream, number })
    }
}

/// Happens-before state of the whole program.
#[derive(Debug, Default)]
pub struct Order {
    /// Work for which the host has waited. All host threads share one clock,
    /// because the driver cannot observe synchronization between host threads.
    /// The shared clock may hide an error between two host threads, but never
    /// causes a false report.
    pub host: Clock,
    /// Work for which the host or another stream has waited.
    pub awaited: Clock,
    /// Work that has run.
    pub finished: Clock,
}

impl Order {
    /// Records that the host has waited for all work in `clock`.
    pub fn set_host_waited(&mut self, clock: &Clock) {
        self.host.join(clock);
        self.awaited.join(clock);
    }
}
