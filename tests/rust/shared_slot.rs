//! Slots that are filled in parts.

use fst::device::host::Host;
use fst::error::{Error, Kind, Result};
use fst::plan::{Read, SlotCopy};
use fst::staging::shared_slot::SharedSlot;
use fst::staging::{Request, Staging};
use proptest::prelude::*;
use std::sync::Arc;

/// Staging of one slot.
fn staging(bytes: usize) -> Staging<Host> {
    let request = Request { bytes: bytes.next_multiple_of(4096), node: None, staging_bytes: 256 << 20 };
    Staging::new(Arc::new(Host), 1, request)
}

fn busy() -> Result<()> {
    Err(Error::new(Kind::Interrupted, "the slot is in use"))
}

fn byte_at(offset: u64) -> u8 {
    u8::try_from((offset ^ (offset >> 8) ^ (offset >> 16)) % 256).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(50))]
    #[test]
    fn parts_read_each_byte_once(
        reads in prop::collection::vec((0_usize..100_000, 1_usize..500_000), 1..8),
        workers in 1_usize..9,
        is_reversed in any::<bool>(),
    ) {
        let mut bytes = 0;
        let reads: Vec<Read> = reads
            .into_iter()
            .map(|(gap, length)| {
                let slot_begin = bytes + gap;
                bytes = slot_begin + length;
                Read { offset: 3 * slot_begin as u64, slot_begin, length }
            })
            .collect();
        let mut target = vec![0; bytes];
        let address = target.as_mut_ptr().expose_provenance() as u64;
        let copy = SlotCopy {
            tensor: 0, slot_begin: 0, row_bytes: bytes, rows: 1, slot_stride: bytes, address, cast: None,
        };
        let staging = staging(bytes);
        let mut slot = staging.acquire(1, &|| Ok(())).unwrap();
        slot.bytes_mut().fill(0);
        let shared = SharedSlot::new(slot, bytes, workers);
        let mut started = Vec::new();
        // One number too many.
        for part in 0..=workers {
            let part = if is_reversed { workers - part } else { part };
            started.push(staging.fill_part(&shared, part, &reads, &[copy], |reads, part| {
                for read in reads {
                    let into = &mut part[read.slot_begin..][..read.length];
                    for (byte, offset) in into.iter_mut().zip(read.offset..) {
                        *byte = byte.wrapping_add(byte_at(offset));
                    }
                }
                Ok(())
            }).unwrap());
        }
        prop_assert_eq!(started.iter().filter(|is_started| **is_started).count(), 1);
        let mut expected = vec![0; bytes];
        for read in &reads {
            let into = &mut expected[read.slot_begin..][..read.length];
            into.iter_mut().zip(read.offset..).for_each(|(byte, offset)| *byte = byte_at(offset));
        }
        prop_assert!(target == expected);
    }
}

#[test]
fn a_slot_with_a_failed_part_is_free_once_no_part_is_filled() {
    let bytes = 1 << 20;
    let staging = staging(bytes);
    let shared = SharedSlot::new(staging.acquire(1, &|| Ok(())).unwrap(), bytes, 4);
    let fill = |part: usize, result: Result<()>| staging.fill_part(&shared, part, &[], &[], |_, _| result);
    let ended = staging.fill_part(&shared, 0, &[], &[], |_, _| {
        assert_eq!(fill(1, Ok(())), Ok(false));
        assert_eq!(fill(1, Ok(())).unwrap_err().kind(), Kind::Internal);
        assert_eq!(fill(2, Err(Error::new(Kind::Io, "part"))).unwrap_err().kind(), Kind::Io);
        assert_eq!(staging.acquire(1, &busy).map(drop).unwrap_err().kind(), Kind::Interrupted);
        Ok(())
    });
    assert_eq!(ended, Ok(false));
    staging.acquire(1, &busy).unwrap();
    assert_eq!(fill(3, Ok(())), Ok(false));
}
