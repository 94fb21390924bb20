//! Plans loads of the tensors of a header, and checks that they stay inside the file.

use fst::checkpoint::region::{IndexRange, TensorRegion};
use fst::format::header::Header;
use fst::plan::{Chunk, Destination, Limits, plan};

/// Size of a chunk in bytes: the least with which an element of 16 bytes always fits.
const CHUNK_BYTES: u64 = 24;

/// Checks plans of whole tensors, slices and strided regions. The data begins at byte `data_begin`.
pub fn check(header: &Header, data_begin: u64, file_bytes: u64) {
    let mut regions = Vec::new();
    for entry in header.entries() {
        assert_eq!(header.find(entry.name), Some(entry));
        regions.extend(TensorRegion::whole(0, entry));
        for dim in 0..entry.shape.len() {
            let mut slice: Vec<IndexRange> = entry.shape.iter().map(|size| IndexRange::whole(*size)).collect();
            slice[dim] = IndexRange { start: 1, length: 1, step: 1 };
            regions.extend(TensorRegion::indexed(0, entry, &slice));
        }
        let index_ranges: Vec<IndexRange> =
            entry.shape.iter().map(|size| IndexRange { start: 0, length: size.div_ceil(2), step: 2 }).collect();
        regions.extend(TensorRegion::indexed(0, entry, &index_ranges));
    }
    let mut address = 0;
    let destinations: Vec<_> = regions
        .iter()
        .enumerate()
        .map(|(index, tensor)| {
            let begin = address;
            address += tensor.bytes();
            Destination { tensor: index, begin: 0, end: tensor.bytes(), address: begin, cast: None }
        })
        .collect();
    for (in_place_bytes, alignment) in [(None, 1), (Some(8), 1), (None, 8)] {
        let limits = Limits {
            chunk_bytes: CHUNK_BYTES,
            gap_bytes: 8,
            in_place_bytes,
            alignment,
            copies_max: 3,
            unit_bytes: 1,
            first_bytes: None,
        };
        let mut written = 0;
        for chunk in plan(&regions, &destinations, &limits).expect("every destination is inside its region") {
            match chunk {
                Chunk::InPlace { offset, length, .. } => {
                    assert!(offset >= data_begin && offset + length as u64 <= file_bytes);
                    written += length;
                }
                Chunk::Staged { bytes, reads, copies, .. } => {
                    assert!(bytes as u64 <= CHUNK_BYTES && copies.len() <= 3);
                    for read in reads {
                        assert!(read.offset >= data_begin && read.offset + read.length as u64 <= file_bytes);
                        assert!(read.slot_begin + read.length <= bytes);
                    }
                    for copy in copies {
                        let end = copy.slot_begin + (copy.rows - 1) * copy.slot_stride + copy.row_bytes;
                        assert!(end <= bytes);
                        written += copy.rows * copy.row_bytes;
                    }
                }
            }
        }
        assert_eq!(written as u64, address);
    }
}
