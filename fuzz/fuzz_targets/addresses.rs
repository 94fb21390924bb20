//! Parses arbitrary text as an address, and opens the service that it names, without a request.
//!
//! `make fuzz`, or `cargo fuzz run addresses` with a nightly compiler.
#![no_main]

use fst::remote;
use fst::remote::find::location::{Location, is_url};
use fst::remote::find::name::Name;
use fst::remote::find::version::Version;
use fst::remote::transfer::object::open_known;
use fst::source::files::{local_path, url_of};
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|text: &str| {
    let path = Path::new(text);
    let _ = url_of(path);
    if let Ok(local) = local_path(path) {
        assert!(!text.starts_with("file://") || local.is_absolute());
    }
    let Ok(location) = Location::parse(text) else { return };
    assert!(is_url(path));
    let shown = location.to_string();
    assert!(Location::parse(&shown).is_ok(), "{shown}");
    let Ok(name) = Name::parse("model.safetensors") else { return };
    for other in [location.child(&name), location.sibling(&name)].iter().flatten() {
        assert_eq!((other.host(), other.file_name()), (location.host(), "model.safetensors"));
    }
    let _ = open_known(&location, 0, Version::default(), Vec::new());
    // Otherwise the process would keep every store.
    remote::release();
});
