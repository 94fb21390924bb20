//! Rows of a trace for threads. Worker threads end with their load, so a new thread reuses the row of an ended thread
//! with the same name: ten loads need as many rows as one.

use crate::os::mutex::Mutex;
use crate::os::per_process::PerProcess;
use std::cell::RefCell;
use std::ptr;

struct Row {
    name: String,
    is_used: bool,
}

type Rows = Mutex<Vec<Row>>;

static ROWS: PerProcess<Rows> = PerProcess::new(Mutex::default);

/// Row of a running thread, which is free again once the thread ends.
struct OwnedRow {
    index: usize,
    rows: &'static Rows,
}

thread_local! {
    static ROW: RefCell<OwnedRow> = RefCell::new(OwnedRow::acquire(name()));
}

impl OwnedRow {
    fn acquire(name: String) -> OwnedRow {
        let rows = ROWS.get();
        let mut used = rows.lock();
        let free = used.iter().position(|row| !row.is_used && row.name == name);
        let index = match free.and_then(|index| Some((index, used.get_mut(index)?))) {
            Some((index, row)) => {
                row.is_used = true;
                index
            }
            None => {
                used.push(Row { name, is_used: true });
                used.len() - 1
            }
        };
        OwnedRow { index, rows }
    }

    /// Returns whether the row is one of this process, not of the parent that forked it.
    fn is_of_process(&self) -> bool {
        ptr::eq(self.rows, ROWS.get())
    }
}

impl Drop for OwnedRow {
    fn drop(&mut self) {
        if self.is_of_process()
            && let Some(row) = self.rows.lock().get_mut(self.index)
        {
            row.is_used = false;
        }
    }
}

/// Returns the row of the calling thread.
pub fn current() -> usize {
    let row = ROW.try_with(|row| {
        let mut row = row.borrow_mut();
        if !row.is_of_process() {
            *row = OwnedRow::acquire(name());
        }
        row.index
    });
    // A thread that is ending has already released its row.
    row.unwrap_or(0)
}

/// Returns the names of all rows.
pub fn names() -> Vec<String> {
    ROWS.get().lock().iter().map(|row| row.name.clone()).collect()
}

/// Returns the name of a Rust thread, or the name that the operating system has for another thread.
fn name() -> String {
    if let Some(name) = std::thread::current().name() {
        return name.to_owned();
    }
    rustix::thread::name().map_or_else(|_| "thread".to_owned(), |name| name.to_string_lossy().into_owned())
}
