//! Names below a prefix, URLs of the Hub, and listings, without a server.

use fst::remote::find::location::Location;
use fst::remote::find::name::Name;
use fst::remote::internals::{Bounds, Keys, take_keys};
use fst::remote::stores::FailureClass;
use fst::source::Place;
use fst::source::files::{local_path, place_of};
use percent_encoding::percent_decode_str;
use proptest::prelude::*;
use reqwest::Url;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const BASE: &str = "https://host:8443/a%20b/";

proptest! {
    /// Server and prefix stay what they are, whatever is in a name, and the server decodes the name itself.
    #[test]
    fn urls_of_names_are_below_the_prefix(text in "([a-z]|[.%?#\\\\/:@&+;= \t\u{e4}\u{202e}]|%2[eEfF]|%5c|https?://){0,24}") {
        let index = Location::parse("https://user:QX@host:8443/a%20b/i.json?signature").unwrap();
        let Ok(name) = Name::parse(&text) else { return Ok(()) };
        for location in [index.sibling(&name).unwrap(), Location::parse(BASE).unwrap().child(&name).unwrap()] {
            let url = Url::parse(&location.secret_url()).unwrap();
            prop_assert_eq!(url.origin(), Url::parse(BASE).unwrap().origin());
            let below = url.path().strip_prefix("/a%20b/").unwrap();
            prop_assert_eq!(below.split('/').count(), text.split('/').count());
            prop_assert_eq!(percent_decode_str(below).decode_utf8().unwrap(), text.as_str());
            prop_assert_eq!(url.fragment(), None);
        }
        let key = Location::parse("s3://bucket/p/").unwrap().child(&name).unwrap();
        prop_assert_eq!(key.key(), format!("p/{text}"));
    }

    /// A location is shared with other ranks as text.
    #[test]
    fn urls_of_the_hub_are_parsed_again(text in "((models|datasets|spaces|buckets)/)?[a-z]{1,3}(/[a-z]{1,3})?(@(refs/pr/1|[a-z]{1,2}(%2F[a-z])?))?(/[a-z%#@.]{1,4}){0,2}") {
        let Ok(location) = Location::parse(&format!("hf://{text}")) else { return Ok(()) };
        let inside = location.child(&Name::parse("100%.safetensors").unwrap()).unwrap();
        for location in [location, inside] {
            let again = Location::parse(&location.secret_url()).unwrap();
            prop_assert_eq!((again.host().split('@').next(), again.key()), (location.host().split('@').next(), location.key()));
            prop_assert_eq!(again.to_string(), location.to_string());
        }
    }
}

#[test]
fn names_are_parts_between_slashes() {
    for text in ["a", "a/b", "...", "..a", "%2e%2e", "..\\..\\a", "a b", "100%#?.safetensors", "\u{e4}"] {
        assert_eq!(Name::parse(text).unwrap().as_str(), text);
    }
    for text in
        ["", "/", "/a", "a/", "a//b", ".", "..", "./a", "a/./b", "a/../b", "a/..", "a\0", "\ta", "a\n", "\u{85}"]
    {
        assert!(Name::parse(text).is_err(), "{text:?}");
    }
}

#[test]
fn directories_end_at_the_last_slash_of_the_parsed_url() {
    let name = Name::parse("s").unwrap();
    let sibling = |url: &str| Location::parse(url).unwrap().sibling(&name).map(|location| location.secret_url());
    assert_eq!(sibling("http://host/a/../b/i").unwrap(), "http://host/a/../b/s");
    assert_eq!(sibling("http://host/i?q").unwrap(), "http://host/s?q");
    assert_eq!(sibling("redis://host//i").unwrap(), "redis://host//s");
    // A server sees /a/b/i, so the file beside it is not /a/s.
    assert!(sibling("http://host/a/b\\i").unwrap_err().to_string().contains("outside the directory"));
    assert!(sibling("http://host/a/%2e%2e").is_err());
    let child = |url: &str| Location::parse(url).unwrap().child(&name).unwrap().secret_url();
    assert_eq!(
        ["s3://b", "s3://b/", "s3://b/p", "s3://b/p/", "redis://b/p//"].map(child),
        ["s3://b/s", "s3://b/s", "s3://b/p/s", "s3://b/p/s", "redis://b/p//s"]
    );
}

#[test]
fn urls_of_the_hub_name_repositories() {
    // The URL as it is shown, and the path in the repository.
    for (url, shown, path) in [
        ("hf://gpt2", "hf://gpt2", ""),
        ("hf://gpt2@main", "hf://gpt2@main", ""),
        ("hf://gpt2@main/a/b", "hf://gpt2@main/a/b", "a/b"),
        ("hf://o/n/", "hf://o/n", ""),
        ("hf://o/n/a@1.safetensors", "hf://o/n/a@1.safetensors", "a@1.safetensors"),
        ("hf://models/o/n/a", "hf://o/n/a", "a"),
        ("hf://datasets/o/n@v1/a", "hf://datasets/o/n@v1/a", "a"),
        ("hf://spaces/o/n", "hf://spaces/o/n", ""),
        ("hf://kernels/o/n/a", "hf://kernels/o/n/a", "a"),
        ("hf://buckets/o/n/a/b", "hf://buckets/o/n/a/b", "a/b"),
        ("hf://o/n@refs/pr/1/a", "hf://o/n@refs%2Fpr%2F1/a", "a"),
        ("hf://o/n@refs/convert/parquet", "hf://o/n@refs%2Fconvert%2Fparquet", ""),
        ("hf://o/n@refs%2fpr%2F1/a", "hf://o/n@refs%2Fpr%2F1/a", "a"),
        ("hf://o/n@refs/a", "hf://o/n@refs/a", "a"),
        ("hf://o/n/%41#?.safetensors", "hf://o/n/%41#?.safetensors", "%41#?.safetensors"),
    ] {
        let location = Location::parse(url).unwrap();
        assert_eq!((location.to_string().as_str(), location.key()), (shown, path));
    }
    for (url, message) in [
        ("hf://", "names no"),
        ("hf://datasets", "names no repository"),
        ("hf://dataset/o/n", "write hf://datasets/o/n"),
        ("hf://buckets/o", "names no bucket"),
        ("hf://buckets/o/n@main/a", "no revisions"),
        ("hf://o/n@", "not a revision"),
        ("hf://o/n@../x", "not a revision"),
        ("hf://o/n@%2e%2e/x", "not a revision"),
        ("hf://o/n@a%2F..%2Fb/x", "not a revision"),
        ("hf://o/..", "names no repository"),
        ("hf://o/./x", "names no repository"),
        ("hf://o%2f..%2fx/n", "names no repository"),
        ("hf://o/n//x", "is not a path"),
        ("hf://o/n/../x", "is not a path"),
    ] {
        let error = Location::parse(url).unwrap_err().to_string();
        assert!(error.contains(message) && error.starts_with("[invalid-argument] hf://"), "{error}");
    }
}

#[test]
fn listings_end() {
    let mut bounds = Bounds::default();
    assert_eq!(bounds.next("a").unwrap(), "a");
    bounds.next("b").unwrap();
    // Not only the last one.
    let failure = bounds.next("a").unwrap_err();
    assert!(failure.class == FailureClass::Permanent && failure.message.contains("once more"), "{}", failure.message);

    let mut bounds = Bounds::default();
    let failed = (0..).find_map(|number: usize| bounds.next(number.to_string()).err().map(|failure| (number, failure)));
    let (number, failure) = failed.unwrap();
    assert!(number < 1_000_000 && failure.message.contains("more than"), "{}", failure.message);

    let mut bounds = Bounds::default();
    let key = "k".repeat(1 << 20);
    let count = (0..).find(|_| bounds.add(&key).is_err()).unwrap();
    assert!((32..1024).contains(&count));
}

#[test]
fn keys_of_listings_are_taken_as_they_are() {
    let s3 = "<?xml version=\"1.0\"?><ListBucketResult><Prefix>p/</Prefix><Contents><Key>p/a&amp;b #%2F</Key><Size>1</Size>\
              </Contents><CommonPrefixes><Prefix>p//</Prefix></CommonPrefixes><Contents><Key>p//x</Key></Contents><Contents>\
              <Key> p/ </Key><Owner><ID>1</ID></Owner></Contents><NextContinuationToken>t</NextContinuationToken>\
              <Contents><Key>cut";
    let (rest, Keys(keys)) = take_keys(s3);
    assert_eq!(keys, ["p/a&b #%2F", "p//x", " p/ "]);
    assert_eq!(
        rest,
        "<?xml version=\"1.0\"?><ListBucketResult><Prefix>p/</Prefix><NextContinuationToken>t</NextContinuationToken>\
         <Contents><Key>cut"
    );
    let azure = "<EnumerationResults><Blobs><BlobPrefix><Name>p//</Name></BlobPrefix><Blob><Name>p/a</Name></Blob><Blob><Name>d\
                 </Name><Properties><ResourceType>directory</ResourceType></Properties></Blob></Blobs><NextMarker />\
                 </EnumerationResults>";
    let (rest, Keys(keys)) = take_keys(azure);
    assert_eq!(keys, ["p/a"]);
    assert_eq!(rest, "<EnumerationResults><Blobs></Blobs><NextMarker /></EnumerationResults>");
}

#[test]
fn paths_of_any_bytes_are_texts() {
    let path = PathBuf::from(OsStr::from_bytes(b"/a%/\xff #\xc3\xa4.safetensors"));
    let text = Place::Path(path.clone()).to_text();
    assert!(matches!(place_of(Path::new(&text)).unwrap(), Place::Path(found) if found == path));
    assert_eq!(local_path(Path::new("file://localhost/a%FF")).unwrap(), Path::new(OsStr::from_bytes(b"/a\xff")));
    let error = fst::Error::new(fst::error::Kind::Io, "m").at(&path);
    assert_eq!(error.to_string(), "[io] /a%/\\xff #\u{e4}.safetensors: m");
}
