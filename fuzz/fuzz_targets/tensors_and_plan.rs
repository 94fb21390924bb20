//! Parses arbitrary bytes as the metadata of a file in tensorizer's format, plans every accepted file, and checks that the
//! plan stays inside the file. Parses the bytes as the header of each tensor, too, and as its encryption.
//!
//! `make fuzz`, or `cargo fuzz run tensors_and_plan` with a nightly compiler.
#![no_main]

mod plans;

use fst::format::header::Header;
use fst::format::tensors::encryption::Encryption;
use fst::format::tensors::preamble::{PREAMBLE_BYTES, Preamble};
use fst::format::tensors::tensor_header;
use libfuzzer_sys::fuzz_target;

/// Assumed length of the data section, in bytes.
const DATA_BYTES: u64 = 64;

fuzz_target!(|bytes: &[u8]| {
    // The first byte chooses the version and the number of tensors. The rest of the preamble is random, too, in
    // tests/rust/tensors_format.rs.
    let Some((&choice, metadata)) = bytes.split_first() else { return };
    let version = u32::from(choice % 5) + 1;
    let preamble = Preamble {
        version,
        is_encrypted: version >= 3 && choice >= 128,
        has_entry_versions: version == 5,
        tensor_bytes: 0,
        tensors: u64::from(choice / 5 % 4),
        metadata_bytes: metadata.len() as u64,
    };
    let header_bytes = [&preamble.encode()[..], metadata].concat();
    let data_begin = PREAMBLE_BYTES + metadata.len() as u64;
    let file_bytes = data_begin + DATA_BYTES;
    let Ok(header) = Header::parse(&header_bytes, file_bytes) else { return };
    plans::check(&header, data_begin, file_bytes);
    let _ = Encryption::parse(metadata, 0);
    for entry in header.entries() {
        let _ = tensor_header::parse(metadata, entry, entry.tensors.expect("the format has it"));
    }
});
