//! Parses arbitrary bytes as a safetensors header, plans every accepted header, and checks that the plan stays inside the
//! file.
//!
//! `make fuzz`, or `cargo fuzz run header_and_plan` with a nightly compiler.
#![no_main]

mod plans;

use fst::format::header::Header;
use libfuzzer_sys::fuzz_target;

/// Assumed length of the data section, in bytes: short enough that random headers match it.
const DATA_BYTES: u64 = 64;

fuzz_target!(|json: &[u8]| {
    let data_begin = 8 + json.len() as u64;
    let file_bytes = data_begin + DATA_BYTES;
    if json.starts_with(b"{") {
        let Ok(header) = Header::parse(json, file_bytes) else { return };
        plans::check(&header, data_begin, file_bytes);
    }
});
