//! Names for the threads of a trace. Workers live as long as a load, so a
//! thread takes over the row of an earlier one with its name that has ended:
//! ten loads then show as many rows as one.

use std::sync::{Mutex, MutexGuard, PoisonError};

struct Row {
    name: String,
    is_taken: bool,
}

static ROWS: Mutex<Vec<Row>> = Mutex::new(Vec::new());

/// The row of a thread that lives.
struct Taken(usize);

thread_local! {
    static TAKEN: Taken = Taken(take(name()));
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(row) = rows().get_mut(self.0) {
            row.is_taken = false;
        }
    }
}

/// The row of the calling thread.
pub fn current() -> usize {
    // A thread that is ending has given its row back.
    TAKEN.try_with(|taken| taken.0).unwrap_or(0)
}

/// What the rows are called.
pub fn names() -> Vec<String> {
    rows().iter().map(|row| row.name.clone()).collect()
}

fn take(name: String) -> usize {
    let mut rows = rows();
    let left = rows.iter().position(|row| !row.is_taken && row.name == name);
    match left.and_then(|index| Some((index, rows.get_mut(index)?))) {
        Some((index, row)) => {
            row.is_taken = true;
            index
        }
        None => {
            rows.push(Row { name, is_taken: true });
            rows.len() - 1
        }
    }
}

/// The name of a thread of ours, or what the operating system calls another.
fn name() -> String {
    if let Some(name) = std::thread::current().name() {
        return name.to_owned();
    }
    let mut text: [libc::c_char; 16] = [0; 16];
    // SAFETY: writes a name that ends in zero and is at most that long.
    let code = unsafe { libc::pthread_getname_np(libc::pthread_self(), text.as_mut_ptr(), text.len()) };
    if code != 0 {
        return "thread".to_owned();
    }
    // SAFETY: the call has put the zero there.
    unsafe { std::ffi::CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
}

fn rows() -> MutexGuard<'static, Vec<Row>> {
    ROWS.lock().unwrap_or_else(PoisonError::into_inner)
}
