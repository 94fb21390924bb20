//! Loads of all tensors of a checkpoint into memory of the tests.

#![allow(dead_code, reason = "each test program uses its own part of this")]

use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::{IndexRange, TensorRegion};
use fst::checkpoint::selection::Selection;
use fst::device::Scratch;
use fst::device::host::Host;
use fst::format::header::Entry;
use fst::load::transfer::Transfer;
use fst::options::Options;
use fst::plan::Destination;
use std::sync::Arc;

pub fn regions(checkpoint: &Arc<Checkpoint>) -> Arc<[TensorRegion]> {
    Arc::clone(Selection::all(checkpoint).unwrap().regions())
}

/// Returns the region with these indices of one dimension.
pub fn slice(source: usize, entry: Entry<'_>, dim: usize, start: u64, length: u64) -> TensorRegion {
    let shape = TensorRegion::whole(source, entry).unwrap().shape;
    let mut index_ranges: Vec<_> = shape.into_iter().map(IndexRange::whole).collect();
    index_ranges[dim] = IndexRange { start, length, step: 1 };
    TensorRegion::indexed(source, entry, &index_ranges).unwrap()
}

/// Loads regions, and returns them in their order.
pub fn load(checkpoint: &Checkpoint, regions: &Arc<[TensorRegion]>, options: Options) -> fst::Result<Vec<Vec<u8>>> {
    let mut memory: Vec<Vec<u8>> = regions.iter().map(|region| vec![0xEE; region.bytes() as usize]).collect();
    let destinations = destinations(&mut memory);
    let mut transfer = Transfer::open(checkpoint, Arc::clone(regions), Arc::new(Host), options)?;
    // The second call finds the staging memory of the first.
    let (first, second) = destinations.split_at(destinations.len() / 3);
    for destinations in [first, second] {
        let batch = transfer.planner().prepare(destinations)?;
        assert_eq!(batch.scratch_bytes(), 0);
        // SAFETY: the memory lives until the transfer has finished.
        unsafe { transfer.fill(&batch, Scratch::default()) }?;
    }
    transfer.finish()?;
    Ok(memory)
}

pub fn destinations(memory: &mut [Vec<u8>]) -> Vec<Destination> {
    let destination = |(tensor, bytes): (usize, &mut Vec<u8>)| Destination {
        tensor,
        begin: 0,
        end: bytes.len() as u64,
        address: bytes.as_mut_ptr().expose_provenance() as u64,
        cast: None,
    };
    memory.iter_mut().enumerate().map(destination).collect()
}
