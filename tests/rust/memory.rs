//! New memory whose pages are made present or huge, and memory that is gone.

use crate::files::{self, PAGE_BYTES};
use crate::smaps::mappings;
use fst::os::huge_pages::{advise_for_disk, free_bytes_of, huge_page_bytes, is_order, is_reporting};
use fst::os::memory::{populate, read};
use fst::os::{numa, threads};
use fst::staging::pool::Block;
use memmap2::{MmapMut, MmapOptions};
use rustix::thread::{CpuSet, sched_getaffinity};
use std::fs::{self, OpenOptions};
use std::sync::Barrier;
use std::thread;
use tempfile::TempDir;

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
fn pages_between_written_neighbours_become_present() {
    let mut memory = MmapMut::map_anon(PAGES * PAGE_BYTES).unwrap();
    let inside = 1..PAGES * PAGE_BYTES - 1;
    (memory[0], memory[inside.end]) = (1, 1);
    populate(&mut memory[inside]);
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
fn free_blocks_are_those_of_the_fullest_node() {
    let one = "Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3 \n\
               Node 0, zone   Normal  30498  58458  29816  15093  10757   5648   2005    899    353    309    248 \n";
    let bytes = 309 * (2 << 20) + 248 * (4 << 20);
    assert_eq!(free_bytes_of(one, 4096), bytes);
    assert_eq!(free_bytes_of(&format!("{one}Node 1, zone   Normal 9 9 9 9 9 9 9 9 9 2 0 \n"), 4096), 4 << 20);
    // Blocks of 64 MiB, where a huge page has 512 MiB.
    assert_eq!(free_bytes_of(one, 64 << 10), 0);
    assert_eq!(free_bytes_of("no buddyinfo", 4096), 0);
    for (order, is_reported) in [("9\n", true), ("4294967295\n", false), ("-1\n", false), ("", false)] {
        assert_eq!(is_order(order), is_reported, "{order:?}");
    }
}

#[test]
fn large_blocks_begin_at_huge_pages() {
    let huge_page_bytes = huge_page_bytes() as usize;
    for bytes in [PAGE_BYTES, huge_page_bytes, 3 * huge_page_bytes - PAGE_BYTES] {
        let mut block = Block::allocate(bytes, None).unwrap();
        let memory = block.bytes_mut();
        assert_eq!(memory.len(), bytes);
        assert_eq!(memory.as_ptr().addr() % bytes.min(huge_page_bytes), 0);
        memory.fill(1);
    }
}

#[test]
fn new_memory_for_a_disk_has_huge_pages_where_free_ones_are_reported() {
    for is_used in [false, true] {
        let mut memory = MmapMut::map_anon(2 * huge_page_bytes() as usize).unwrap();
        if is_used {
            memory.fill(1);
        }
        advise_for_disk(&mut memory);
        let page = (memory.as_ptr().addr() as u64).next_multiple_of(huge_page_bytes());
        assert_eq!(has_advice(page), is_reporting() && !is_used, "is_used: {is_used}");
    }
}

/// Returns whether the mapping that begins at or contains an address has the advice `MADV_HUGEPAGE`.
fn has_advice(address: u64) -> bool {
    mappings().iter().any(|mapping| mapping.addresses.contains(&address) && mapping.words("VmFlags").contains(&"hg"))
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

#[test]
fn readers_move_to_the_cpus_near_a_device_on_which_they_may_run() {
    let system = TempDir::new().unwrap();
    let folder = system.path().join("bus/pci/devices/0000:3b:00.0");
    std::fs::create_dir_all(&folder).unwrap();
    let near = || numa::cpus_near(system.path(), "0000:3B:00.0");
    assert_eq!(near(), None);
    for (list, cpus) in [
        ("0-1,3\n", Some(&[0, 1, 3][..])),
        ("7", Some(&[7])),
        ("\n", None),
        ("3-1", None),
        ("0-4096", None),
        ("all", None),
    ] {
        std::fs::write(folder.join("local_cpulist"), list).unwrap();
        let found = near().map(|found| (0..CpuSet::MAX_CPU).filter(|cpu| found.is_set(*cpu)).collect::<Vec<_>>());
        assert_eq!(found.as_deref(), cpus, "{list:?}");
    }
    let allowed = sched_getaffinity(None).unwrap();
    let (mut one, mut other) = (CpuSet::new(), CpuSet::new());
    for cpu in 0..CpuSet::MAX_CPU {
        match allowed.is_set(cpu) {
            true if one.count() == 0 => one.set(cpu),
            true => {}
            false => other.set(cpu),
        }
    }
    let caller = thread::current().id();
    for (cpus, expected) in [(&one, &one), (&other, &allowed)] {
        let both = Barrier::new(2);
        let start = || numa::move_to(cpus);
        threads::for_each_after(start, 2, 2, |_| {
            both.wait();
            let found = sched_getaffinity(None).unwrap();
            assert_eq!(&found, if thread::current().id() == caller { &allowed } else { expected });
            Ok(())
        })
        .unwrap();
    }
}
