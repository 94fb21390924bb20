//! Parses arbitrary bytes as answers of services and as files of AWS.
//!
//! `make fuzz`, or `cargo fuzz run answers` with a nightly compiler.
#![no_main]

use fst::remote::credentials::ini::{self, split_words};
use fst::remote::internals::{http_answer, hub_commit, redis_answers};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    redis_answers(bytes);
    for status in [200, 206, 416] {
        for range in [0..100, 5..7] {
            if let Some((found, length)) = http_answer(status, bytes, &range) {
                assert!(
                    found.start <= found.end && length.is_none_or(|length| found.end <= length),
                    "{found:?} of {length:?}"
                );
            }
        }
    }
    if let Some(commit) = hub_commit(bytes) {
        assert!(!commit.is_empty() && !commit.contains('/'), "{commit}");
    }
    if let Ok(text) = str::from_utf8(bytes) {
        let _ = ini::parse(text);
        let _ = split_words(text);
    }
});
