//! Rows of a trace for threads. Worker threads end with their load, so a new thread reuses the row of an ended thread
//! with the same name: ten loads need as many rows as one.

use std::sync::{Mutex, MutexGuard, PoisonError};

struct Row {
    name: String,
    is_used: bool,
}

static ROWS: Mutex<Vec<Row>> = Mutex::new(Vec::new());

/// Row of a running thread, which is free again once the thread ends.
struct OwnedRow(usize);

thread_local! {
    static ROW: OwnedRow = OwnedRow(acquire(name()));
}

impl Drop for OwnedRow {
    fn drop(&mut self) {
        if let Some(row) = rows().get_mut(self.0) {
            row.is_used = false;
        }
    }
}

/// Returns the row of the calling thread.
pub fn current() -> usize {
    // A thread that is ending has already released its row.
    ROW.try_with(|row| row.0).unwrap_or(0)
}

/// Returns the names of all rows.
pub fn names() -> Vec<String> {
    rows().iter().map(|row| row.name.clone()).collect()
}

fn acquire(name: String) -> usize {
    let mut rows = rows();
    let free = rows.iter().position(|row| !row.is_used && row.name == name);
    match free.and_then(|index| Some((index, rows.get_mut(index)?))) {
        Some((index, row)) => {
            row.is_used = true;
            index
        }
        None => {
            rows.push(Row { name, is_used: true });
            rows.len() - 1
        }
    }
}

/// Returns the name of a Rust thread, or the name that the operating system has for another thread.
fn name() -> String {
    if let Some(name) = std::thread::current().name() {
        return name.to_owned();
    }
    rustix::thread::name().map_or_else(|_| "thread".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn rows() -> MutexGuard<'static, Vec<Row>> {
    ROWS.lock().unwrap_or_else(PoisonError::into_inner)
}
