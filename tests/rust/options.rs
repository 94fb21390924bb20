//! Defaults of the options.

use fst::options::default_threads;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::thread;

#[test]
fn ranks_share_the_cores() {
    assert_eq!([1, 7, 192].map(|cores| default_threads(cores, None)), [4, 7, 16]);
    assert_eq!([16, 64, 192].map(|cores| default_threads(cores, Some("8"))), [4, 8, 16]);
    for text in ["0", "1", "-8", "eight"] {
        assert_eq!(default_threads(14, Some(text)), 14, "{text}");
    }
}

#[test]
fn a_rank_may_have_cores_of_its_own() {
    let all = sched_getaffinity(None).unwrap();
    let first = (0..CpuSet::MAX_CPU).find(|core| all.is_set(*core)).unwrap();
    let on_one_core = thread::spawn(move || {
        let mut one = CpuSet::new();
        one.set(first);
        // Changes the cores of this thread only.
        sched_setaffinity(None, &one).unwrap();
        default_threads(14, Some("2"))
    });
    assert_eq!(on_one_core.join().unwrap(), if all.count() > 1 { 14 } else { 7 });
}
