//! Remote objects without a server: addresses, names of copies, answers and errors.

use fst::remote::find::location::Location;
use fst::remote::find::name::Name;
use fst::remote::internals::{
    HostPolicy, Ranges, Refusal, Transport, failure_of, http_answer, split_port, unsigned, with_rules_of_aws,
};
use fst::remote::stores::FailureClass;
use fst::remote::transfer::limits::{PART_BYTES_MIN, PARTS_MAX, Parts};
use http::{HeaderMap, Method, StatusCode};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::signer::Signer;
use proptest::prelude::*;
use rustls::AlertDescription;
use std::io;
use std::time::Duration;

proptest! {
    #[test]
    fn secrets_are_not_shown(
        scheme in "https?|rediss?|ftp",
        user in "(QX[a-z:@]{0,5}@)?",
        host in "(host(:1)?)?",
        path in "[a-z/@.]{0,12}",
        query in "([?]QX[a-z=&/@?]{0,9})?",
    ) {
        // A key of Redis may have any character, and has no query.
        prop_assume!(!scheme.starts_with("redis") || query.is_empty());
        let url = format!("{scheme}://{user}{host}/{path}{query}");
        let shown = match Location::parse(&url) {
            Ok(location) => {
                prop_assert_eq!(location.secret_url(), url);
                format!("{location} {location:?} {:?}", location.sibling(&Name::parse("n").unwrap()))
            }
            Err(error) => error.to_string(),
        };
        prop_assert!(!shown.contains("QX"), "{shown}");
    }

    #[test]
    fn set_has_the_bytes_of_its_ranges(
        ranges in prop::collection::vec((0_u64..60, 1_u64..20).prop_map(|(begin, bytes)| begin..begin + bytes), 0..8)
    ) {
        let encoded: Vec<u8> = ranges.iter().flat_map(Ranges::encode).collect();
        let set = Ranges::decode(&encoded, 80).unwrap();
        let expected = |offset: u64| ranges.iter().any(|range| range.contains(&offset));
        for offset in 0..80 {
            let (is_known, end) = set.run(offset);
            prop_assert_eq!(is_known, expected(offset));
            prop_assert!((offset..end.min(80)).all(|other| expected(other) == is_known));
            prop_assert!(end >= 80 || expected(end) != is_known);
        }
        prop_assert_eq!(set.bytes(), (0..80).filter(|offset| expected(*offset)).count() as u64);
        prop_assert_eq!(set.covers(30), (0..30).all(expected) && !expected(30));
    }

    #[test]
    fn any_bytes_are_ranges_of_the_object_or_none(bytes in prop::collection::vec(any::<u8>(), 0..64), length: u64) {
        prop_assert!(Ranges::decode(&bytes, length).is_none_or(|set| set.bytes() <= length));
    }
}

#[test]
fn signatures_are_no_part_of_a_name() {
    for signature in [
        "X-Amz-Algorithm=A&X-Amz-Credential=B&X-Amz-Date=C&X-Amz-Expires=1&X-Amz-SignedHeaders=host&X-Amz-Signature=D\
         &X-Amz-Security-Token=E",
        "AWSAccessKeyId=A&Expires=1&Signature=B&x-amz-security-token=C",
        "X-Goog-Algorithm=A&X-Goog-Credential=B&X-Goog-Date=C&X-Goog-Expires=1&X-Goog-SignedHeaders=host&X-Goog-Signature=D",
        "GoogleAccessId=A&Expires=1&Signature=B",
        "Expires=1&Signature=B&Key-Pair-Id=C&Hash-Algorithm=SHA256",
        "Policy=A&Signature=B&Key-Pair-Id=C",
        "sv=2024-01-01&sp=r&se=A&sr=b&sig=B",
        "sv=2024-01-01&skoid=A&sktid=B&skt=C&ske=D&sks=b&skv=E&st=F&se=G&sr=b&sp=r&sig=H",
    ] {
        assert_eq!(unsigned(&format!("versionId=1&{signature}&part=2")), "versionId=1&part=2");
    }
    // Parameters like a signature's are part of a name.
    for query in [
        "policy-net=1",
        "expires-model=1",
        "signature-version=1",
        "x-amz-model=1",
        "X-Amz-Date=1",
        "X-Amz-Date=1&X-Amz-Signature=2",
        "Expires=1&Signature=2",
        "Policy=1",
        "sp=1&sig=2",
        "sv=1&sp=2",
        "policy=1&signature=2&key-pair-id=3",
    ] {
        assert_eq!(unsigned(query), query);
    }
    assert_eq!(unsigned("AWSAccessKeyId=A&Expires=1&Signature=B&Policy=C&sp=D"), "Policy=C&sp=D");
}

#[test]
fn addresses_of_instance_metadata_are_refused() {
    let metadata = [
        "169.254.169.254",
        "169.254.170.2",
        "169.254.170.23",
        "168.63.129.16",
        "100.100.100.200",
        "192.0.0.192",
        "[fd00:ec2::254]",
        "[fd00:ec2::23]",
        "[fd20:ce::254]",
        "[::ffff:100.100.100.200]",
        "[::ffff:169.254.169.254]",
        "metadata.google.internal.",
    ];
    let link_local = ["169.254.1.2", "[fe80::1]", "[::ffff:169.254.0.1]"];
    let others = ["127.0.0.1", "[::1]", "192.0.0.191", "[fd00:ec2::25]", "host"];
    let is_allowed = |policy: HostPolicy| move |host: &&str| policy.check(host).is_ok();
    let all = [metadata.as_slice(), &link_local, &others].concat();
    assert!(all.iter().all(is_allowed(HostPolicy::Configured)));
    for policy in [HostPolicy::Named, HostPolicy::Redirected] {
        assert!(!metadata.iter().any(is_allowed(policy)));
        assert!(others.iter().all(is_allowed(policy)));
    }
    assert!(link_local.iter().all(is_allowed(HostPolicy::Named)));
    assert!(!link_local.iter().any(is_allowed(HostPolicy::Redirected)));
}

#[test]
fn rules_of_aws_depend_on_the_name_of_the_bucket() {
    let address_and_checksum = |bucket: &str, endpoint: Option<&str>| {
        let builder = AmazonS3Builder::new().with_region("us-west-2").with_access_key_id("key");
        let builder = builder.with_secret_access_key("secret").with_bucket_name(bucket);
        let builder = endpoint.into_iter().fold(builder, AmazonS3Builder::with_endpoint);
        let builder = with_rules_of_aws(builder, bucket);
        let checksum = builder.get_config_value(&AmazonS3ConfigKey::Checksum);
        let store = builder.with_http_connector(Transport::default()).build().unwrap();
        let (key, second) = ("x".into(), Duration::from_secs(1));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let url = runtime.block_on(store.signed_url(Method::GET, &key, second)).unwrap();
        (format!("{}{}", url.host_str().unwrap(), url.path()), checksum)
    };
    let sha256 = Some("sha256");
    for (bucket, endpoint, address, checksum) in [
        ("weights", None, "s3.us-west-2.amazonaws.com/weights/x", sha256),
        ("a-s3alias", None, "a-s3alias.s3.us-west-2.amazonaws.com/x", sha256),
        ("a--usw2-az1--x-s3", None, "a--usw2-az1--x-s3.s3express-usw2-az1.us-west-2.amazonaws.com/x", sha256),
        ("a-s3alias", Some("http://host:9000"), "host/a-s3alias/x", None),
        (
            "a-s3alias",
            Some("https://s3.us-west-2.vpce.amazonaws.com"),
            "s3.us-west-2.vpce.amazonaws.com/a-s3alias/x",
            sha256,
        ),
    ] {
        let expected = (address.to_owned(), checksum.map(str::to_owned));
        assert_eq!(address_and_checksum(bucket, endpoint), expected);
    }
}

#[test]
fn parts_of_any_length_fit_an_upload() {
    const MIB: u64 = 1 << 20;
    for length in [1, MIB, 100 * MIB, 80_000 * MIB, 80_001 * MIB, 5_000_000 * MIB] {
        let parts = Parts::of_length(length, 8 << 20);
        let (last, bytes) = parts.at(length - 1).unwrap();
        assert!(last < PARTS_MAX && bytes >= 8 << 20, "{length}: {last}, {bytes}");
        assert_eq!(bytes, parts.first_bytes());
    }
    assert_eq!(Parts::of_length(100 * MIB, 1).first_bytes(), PART_BYTES_MIN);
    // Growing parts are contiguous and end.
    let parts = Parts::growing(8 << 20);
    let mut offset = 0;
    for index in 0..PARTS_MAX {
        let (found, bytes) = parts.at(offset).unwrap();
        assert_eq!(found, index);
        assert_eq!(parts.at(offset + bytes as u64 - 1), Some((found, bytes)));
        offset += bytes as u64;
    }
    assert_eq!((offset, parts.at(offset)), (2_000 * 31 * 8 * MIB, None));
}

#[test]
fn content_range_has_the_bytes_and_the_length() {
    let parse = |text: &str| http_answer(206, format!("Content-Range: {text}\nETag: \"1\"").as_bytes(), &(0..10));
    assert_eq!(parse("bytes 0-9/100"), Some((0..10, Some(100))));
    assert_eq!(parse("bytes 0-9/*"), Some((0..10, None)));
    for wrong in ["bytes 9-0/100", "bytes 0-100/100", "bytes */100", "items 0-9/100", "bytes 9-0/*", "bytes 0-9"] {
        assert_eq!(parse(wrong), None, "{wrong}");
    }
}

#[test]
fn host_of_redis_may_be_an_address_in_brackets() {
    assert_eq!(split_port("[::1]:7"), Some(("::1".into(), 7)));
    assert_eq!(split_port("[::1]"), Some(("::1".into(), 6379)));
    for wrong in ["host:", "host:x", "host:70000", ":1"] {
        assert_eq!(split_port(wrong), None, "{wrong}");
    }
}

#[test]
fn end_of_a_tls_connection_is_transient_and_a_refusal_is_not() {
    let ended = io::Error::new(io::ErrorKind::UnexpectedEof, "peer closed connection without sending TLS close_notify");
    assert_eq!(failure_of(&ended).class, FailureClass::Transient);
    let alert = |alert| failure_of(&io::Error::other(rustls::Error::AlertReceived(alert)));
    assert_eq!(alert(AlertDescription::InternalError).class, FailureClass::Transient);
    let failure = alert(AlertDescription::CertificateRequired);
    assert!(failure.class == FailureClass::Permanent && !failure.message.contains("SSL_CERT_FILE"));
}

#[test]
fn refusals_show_the_code_and_nothing_else() {
    let answer = |status, code: &str, rest: &str| {
        let headers = HeaderMap::from_iter([("x-amz-bucket-region".parse().unwrap(), "eu-west-1".parse().unwrap())]);
        let text = format!("<Error><Code>{code}</Code>{rest}<Token>secret</Token></Error>");
        Refusal::of_answer(StatusCode::from_u16(status).unwrap(), &headers, &text)
    };
    let of = |text: &str| Refusal::of(&object_store::Error::Generic { store: "S3", source: text.into() });
    let passed = answer(400, "InvalidPart", "<Message>secret</Message>");
    assert_eq!(passed.to_string(), "<Code>InvalidPart</Code>");
    let failure = of(&format!("Server returned non-2xx status code: 400 Bad Request: {passed}")).unwrap().failure();
    assert_eq!(failure.message, "the service refuses the request (status 400, code InvalidPart)");
    assert_eq!(failure.class, FailureClass::Permanent);
    for (text, class) in [
        ("Server returned error response: <Error><Code>SlowDown</Code></Error>", FailureClass::RateLimited(None)),
        ("status code: 400 Bad Request: <Code>RequestTimeout</Code>", FailureClass::Transient),
    ] {
        assert_eq!(of(text).unwrap().failure().class, class);
    }
    assert_eq!(of("connection reset"), None);
    let token = r#"{"error": "invalid_grant", "error_description": "secret"}"#;
    let passed = Refusal::of_answer(StatusCode::BAD_REQUEST, &HeaderMap::new(), token);
    assert_eq!(passed.to_string(), "<Code>invalid_grant</Code>");
    // Services state codes in headers and in JSON of several forms, too.
    let stated = HeaderMap::from_iter([("x-ms-error-code".parse().unwrap(), "BlobNotFound".parse().unwrap())]);
    for (headers, text, code) in [
        (stated, "", "BlobNotFound"),
        (HeaderMap::new(), r#"{"error": {"code": 403, "status": "PERMISSION_DENIED"}}"#, "PERMISSION_DENIED"),
        (HeaderMap::new(), "<Code>InvalidAccessKeyId.NotFound</Code>", "InvalidAccessKeyId.NotFound"),
    ] {
        let passed = Refusal::of_answer(StatusCode::FORBIDDEN, &headers, text);
        assert_eq!(passed.to_string(), format!("<Code>{code}</Code>"));
    }
    for wrong in ["a b", "<Code>", "", &"a".repeat(65)] {
        assert_eq!(answer(400, wrong, "").to_string(), "");
    }
    // The region is part of the name of a host. Refusals that do not concern it have none.
    for (status, code, rest, region) in [
        (301, "PermanentRedirect", "", Some("eu-west-1")),
        (400, "AuthorizationHeaderMalformed", "<Region>eu-1</Region>", Some("eu-1")),
        (400, "AuthorizationHeaderMalformed", "<Region>evil.test/</Region>", Some("eu-west-1")),
        (403, "AccessDenied", "", None),
    ] {
        assert_eq!(answer(status, code, rest).region.as_deref(), region);
    }
}
