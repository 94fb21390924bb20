//! Switches of experiments with loads to a GPU: what would otherwise take a rebuild on a machine that has no compiler.
//!
//! They are no part of the interface. Names and meanings change without notice, and no program should set them.
//!
//! ```text
//! FST_EXPERIMENTS=copies_ahead=4,first_chunk_kib=512
//! ```

use super::variable;
use crate::error::{Error, Kind, Result};
use std::ops::RangeInclusive;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Decision of a load to a GPU that `FST_EXPERIMENTS` changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// `workers_per_slot`: largest number of workers that read parts of one chunk.
    WorkersPerSlot,
    /// `copies_ahead`: number of copies in flight up to which a load takes another slot.
    CopiesAhead,
    /// `windows`: number of windows in which tensors are allocated, with about as many tensors each.
    Windows,
    /// `window_mib`: bytes of the first window, in MiB. Each later one has at least twice the bytes of the one before.
    WindowMib,
    /// `first_chunk_kib`: size of the first chunk of a large load, in KiB. The next ones double until a chunk fills a slot. 0: all
    /// chunks fill their slots.
    FirstChunkKib,
    /// `query_us`: interval at which a thread that waits for a copy queries it, in microseconds.
    QueryMicroseconds,
    /// `huge_pages`: whether slots ask for huge pages, 0 or 1, whatever the kernel's counts say.
    HugePages,
    /// `pin_ahead`: number of slots that a thread pins while a load opens its files and allocates tensors, whatever its size.
    PinAhead,
    /// `reader_node`: whether threads that read run on the CPUs near the GPU, 0 or 1.
    ReaderNode,
}

/// Number of switches.
const COUNT: usize = 9;

/// Name of each switch and its values.
const SWITCHES: [(Switch, &str, RangeInclusive<usize>); COUNT] = [
    (Switch::WorkersPerSlot, "workers_per_slot", 1..=64),
    (Switch::CopiesAhead, "copies_ahead", 0..=64),
    (Switch::Windows, "windows", 1..=1024),
    (Switch::WindowMib, "window_mib", 1..=1 << 20),
    (Switch::FirstChunkKib, "first_chunk_kib", 0..=64 << 10),
    (Switch::QueryMicroseconds, "query_us", 1..=100_000),
    (Switch::HugePages, "huge_pages", 0..=1),
    (Switch::PinAhead, "pin_ahead", 0..=64),
    (Switch::ReaderNode, "reader_node", 0..=1),
];

type Values = [Option<usize>; COUNT];

/// Returns the value of a switch, or `None` if it is not set. The environment is read once in a process.
pub fn value(switch: Switch) -> Option<usize> {
    // A forked child needs no lock: the values never change.
    static VALUES: AtomicPtr<Values> = AtomicPtr::new(ptr::null_mut());
    let mut values = VALUES.load(Ordering::Acquire);
    if values.is_null() {
        // Loads report what is wrong with the variable.
        values = Box::into_raw(Box::new(from_env().unwrap_or_default()));
        // Threads that come first at the same time leak all values but one, which are equal.
        if let Err(other) = VALUES.compare_exchange(ptr::null_mut(), values, Ordering::AcqRel, Ordering::Acquire) {
            values = other;
        }
    }
    let index = SWITCHES.iter().position(|(known, ..)| *known == switch)?;
    // SAFETY: the pointer points to a box that is never dropped or changed.
    unsafe { &*values }.get(index).copied().flatten()
}

/// Parses `FST_EXPERIMENTS`. Fails with `invalid-argument`, with the switches and their values.
pub(super) fn from_env() -> Result<Values> {
    let mut values = Values::default();
    let Some(text) = variable("FST_EXPERIMENTS") else { return Ok(values) };
    for item in text.split(',') {
        let known = item.split_once('=').and_then(|(name, number)| {
            let index = SWITCHES.iter().position(|(_, known, _)| *known == name.trim())?;
            let (_, _, allowed) = SWITCHES.get(index)?;
            let number = number.trim().parse().ok().filter(|number| allowed.contains(number))?;
            Some((values.get_mut(index)?, number))
        });
        let Some((value, number)) = known else {
            let switches: Vec<String> = SWITCHES
                .iter()
                .map(|(_, name, allowed)| format!("{name}={}..{}", allowed.start(), allowed.end()))
                .collect();
            let message = format!("FST_EXPERIMENTS has {item:?}; it is a list of some of {}", switches.join(", "));
            return Err(Error::new(Kind::InvalidArgument, message));
        };
        *value = Some(number);
    }
    Ok(values)
}
