//! New memory whose pages are made present, and memory that is gone.

use crate::files::{self, PAGE_BYTES};
use fst::os::memory::{populate, read};
use memmap2::{MmapMut, MmapOptions};
use std::fs::{self, OpenOptions};

const PAGES: usize = 64;

/// Returns which pages of a mapping are present.
fn present(memory: &MmapMut) -> Vec<bool> {
    let mut states = vec![0_u8; memory.len() / PAGE_BYTES];
    // SAFETY: there is one state per page.
    let code = unsafe { libc::mincore(memory.as_ptr().cast_mut().cast(), memory.len(), states.as_mut_ptr()) };
    assert_eq!(code, 0);
    states.into_iter().map(|state| state & 1 == 1).collect()
}

#[test]
fn pages_of_new_memory_become_present_and_bytes_stay() {
    let mut memory = MmapMut::map_anon(PAGES * PAGE_BYTES).unwrap();
    let inside = PAGE_BYTES + 1..(PAGES - 2) * PAGE_BYTES + 1;
    populate(&mut memory[inside]);
    let expected: Vec<bool> = (0..PAGES).map(|page| (1..PAGES - 1).contains(&page)).collect();
    assert_eq!(present(&memory), expected);
    memory[PAGE_BYTES * 20..PAGE_BYTES * 30].fill(7);
    populate(&mut memory);
    let is_written = |at: usize| (20..30).contains(&(at / PAGE_BYTES));
    assert!(memory.iter().enumerate().all(|(at, byte)| (*byte == 7) == is_written(at)));
    assert!(present(&memory).into_iter().all(|page| page));
}

#[test]
fn small_memory_is_left_alone() {
    let mut memory = MmapMut::map_anon(PAGES * PAGE_BYTES).unwrap();
    populate(&mut memory[..PAGE_BYTES]);
    populate(&mut memory[..0]);
    assert!(present(&memory).into_iter().all(|page| !page));
}

#[test]
fn missing_pages_of_a_mapped_file_are_errors() {
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().join("x");
    fs::write(&path, files::pattern(1, 3 * PAGE_BYTES)).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    // SAFETY: the mapping is accessed with system calls only.
    let mapping = unsafe { MmapOptions::new().map_copy(&file) }.unwrap();
    let address = mapping.as_ptr().expose_provenance() as u64;
    let mut into = vec![0; 3 * PAGE_BYTES - 1];
    // SAFETY: nothing writes to the mapping.
    assert_eq!(unsafe { read(address + 1, &mut into) }, Ok(()));
    assert_eq!(into, files::pattern(1, 3 * PAGE_BYTES)[1..]);
    file.set_len(2 * PAGE_BYTES as u64).unwrap();
    // SAFETY: nothing writes to the mapping.
    assert_eq!(unsafe { read(address + 1, &mut into) }, Err(2 * PAGE_BYTES - 1));
}
