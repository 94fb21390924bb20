//! Locks that stay usable after a panic. A panic becomes an error of its operation, and the data is whole between any two
//! statements that change it, so what waits for a lock goes on.

use std::sync::{self, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// Mutex of the standard library, without its poison.
#[derive(Debug, Default)]
pub struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    /// Creates an unlocked mutex.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(sync::Mutex::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock, or returns `None` if a thread has it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Returns the value.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Condition variable of the standard library, for a [`Mutex`].
#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

impl Condvar {
    /// Creates a condition variable for which nobody waits.
    pub const fn new() -> Condvar {
        Condvar(sync::Condvar::new())
    }

    /// Wakes a thread that waits.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all threads that wait.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Waits while the condition holds.
    pub fn wait_while<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        condition: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        self.0.wait_while(guard, condition).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits to be woken, for `time` at most.
    pub fn wait_timeout<'a, T>(&self, guard: MutexGuard<'a, T>, time: Duration) -> MutexGuard<'a, T> {
        self.0.wait_timeout(guard, time).map_or_else(|poisoned| poisoned.into_inner().0, |(guard, _)| guard)
    }
}
