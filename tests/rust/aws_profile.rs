//! Profiles of AWS: the files as botocore reads them, and keys from all sources that a profile can name.

use async_trait::async_trait;
use chrono::{TimeDelta, Utc};
use fst::error::{Error, Kind};
use fst::remote::credentials::aws_profile::Profile;
use fst::remote::credentials::ini::{self, split_words};
use fst::remote::credentials::process;
use fst::remote::credentials::refresh::{KeySource, Keys, Refreshed, parse_date};
use fst::remote::transfer::runtime;
use object_store::CredentialProvider;
use object_store::aws::{AwsCredential, AwsCredentialProvider};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::future::Future;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;

/// Home directory with the two files, and environment variables.
struct Machine {
    home: TempDir,
    variables: BTreeMap<String, String>,
}

impl Machine {
    fn new(config: &str, credentials: &str) -> Self {
        let home = TempDir::new().unwrap();
        std::fs::create_dir(home.path().join(".aws")).unwrap();
        std::fs::write(home.path().join(".aws/config"), config).unwrap();
        std::fs::write(home.path().join(".aws/credentials"), credentials).unwrap();
        Machine { home, variables: BTreeMap::new() }
    }

    fn with(mut self, name: &str, value: &str) -> Self {
        self.variables.insert(name.into(), value.into());
        self
    }

    fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.home.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }

    fn load(&self) -> fst::Result<Option<Profile>> {
        Profile::load(self.variables.clone(), Some(self.home.path()))
    }

    fn profile(&self) -> Profile {
        self.load().unwrap().unwrap()
    }

    fn provider(&self) -> AwsCredentialProvider {
        self.profile().credentials().unwrap().unwrap()
    }

    fn keys(&self) -> Arc<AwsCredential> {
        block_on(self.provider().get_credential()).unwrap()
    }

    /// Returns the error of the profile or of its provider.
    fn error(&self) -> Error {
        let provider = self.load().and_then(|profile| profile.unwrap().credentials());
        let error = match provider.map(|provider| block_on(provider.unwrap().get_credential()).unwrap_err()) {
            Ok(object_store::Error::Generic { source, .. }) => source.downcast().unwrap(),
            Ok(error) => panic!("{error}"),
            Err(error) => Box::new(error),
        };
        *error
    }

    /// Checks the kind of the error, and that its text contains all of `expected`.
    #[track_caller]
    fn refused(&self, kind: Kind, expected: &[&str]) -> String {
        let error = self.error();
        let text = error.to_string();
        assert_eq!(error.kind(), kind, "{text}");
        for part in expected {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
        assert!(!text.replace("AWS_SECRET_ACCESS_KEY", "").contains("SECRET"), "{text}");
        text
    }
}

fn block_on<T: Send>(future: impl Future<Output = T> + Send) -> T {
    runtime::block_on(&|| Ok(()), async { Ok(future.await) }).unwrap()
}

fn texts(keys: &AwsCredential) -> (&str, &str, Option<&str>) {
    (&keys.key_id, &keys.secret_key, keys.token.as_deref())
}

#[derive(Clone, Debug)]
struct Request {
    line: String,
    headers: BTreeMap<String, String>,
    /// Fields of the form in the body.
    form: BTreeMap<String, String>,
}

struct Server {
    url: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// Starts a server. `answer` returns the status and body for a request and its number from 0.
    fn new(answer: impl Fn(usize, &Request) -> (u16, String) + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let received = requests.clone();
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let stream = stream.unwrap();
                let mut reader = BufReader::new(&stream);
                let mut line = || {
                    let mut line = String::new();
                    reader.read_line(&mut line).unwrap();
                    line.trim_end().to_owned()
                };
                let first = line();
                let headers: BTreeMap<String, String> = std::iter::from_fn(|| {
                    let line = line();
                    let (name, value) = line.split_once(": ")?;
                    Some((name.to_lowercase(), value.to_owned()))
                })
                .collect();
                let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
                let mut body = vec![0; length];
                reader.read_exact(&mut body).unwrap();
                let url = format!("http://form/?{}", String::from_utf8(body).unwrap());
                let form = reqwest::Url::parse(&url).unwrap().query_pairs().into_owned().collect();
                let request = Request { line: first, headers, form };
                let (status, body) = answer(number, &request);
                received.lock().unwrap().push(request);
                let head =
                    format!("HTTP/1.1 {status} -\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
                (&stream).write_all((head + &body).as_bytes()).unwrap();
            }
        });
        Server { url, requests }
    }

    fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    #[track_caller]
    fn request(&self) -> Request {
        let [request] = self.requests().try_into().unwrap();
        request
    }
}

/// Returns the date in so many seconds as AWS writes dates.
fn date_in(seconds: i64) -> String {
    let date = chrono::Utc::now() + chrono::TimeDelta::seconds(seconds);
    date.format("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}

fn sts_answer(action: &str, id: &str, expiration: &str) -> (u16, String) {
    let body = format!(
        "<{action}Response xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\">\n  <{action}Result>\n\
         <AssumedRoleUser><Arn>arn:aws:sts::1:assumed-role/r/s</Arn></AssumedRoleUser><Credentials>\n\
         <AccessKeyId>{id}</AccessKeyId><SecretAccessKey>SECRET+/{id}=</SecretAccessKey>\n\
         <SessionToken>TOKEN{id}==</SessionToken><Expiration>{expiration}</Expiration></Credentials>\n\
         </{action}Result><ResponseMetadata><RequestId>1</RequestId></ResponseMetadata></{action}Response>"
    );
    (200, body)
}

/// Starts an STS whose keys have the number of the request in their id.
fn sts(valid_seconds: i64) -> Server {
    Server::new(move |number, request| {
        sts_answer(&request.form["Action"], &format!("ASIA{number}"), &date_in(valid_seconds))
    })
}

const STATIC: &str = "aws_access_key_id = AKIA\naws_secret_access_key = SECRET/key+=\n";

#[test]
fn files_are_parsed_as_by_botocore() {
    let text = "\u{feff}# comment\r\n\
        [default] ; comment\r\n\
        ; comment\r\n\
        Region=eu-west-1\r\n\
        output : json\r\n\
        aws_secret_access_key = a=b # c ; d\r\n\
        \r\n\
        [profile \"two words\"]\n  region = a\n  output = b\n\
        credential_process = program\n    argument\n# comment\n\n    'other argument'\n\
        s3 =\n    addressing_style = path\n    # comment\n    max_bandwidth=1MB/s\nempty =\nREGION = c\n\
        [default]\nregion = us-east-1\n";
    let sections = ini::parse(text).unwrap();
    assert_eq!(sections.keys().collect::<Vec<_>>(), ["default", "profile \"two words\""]);
    let value = |section: &str, key: &str| sections[section][key].text().unwrap().to_owned();
    assert_eq!(value("default", "region"), "us-east-1");
    assert_eq!(value("default", "output"), "json");
    assert_eq!(value("default", "aws_secret_access_key"), "a=b # c ; d");
    let other = "profile \"two words\"";
    assert_eq!((value(other, "region"), value(other, "output")), ("c".into(), "b".into()));
    assert_eq!(value(other, "credential_process"), "program\nargument\n'other argument'");
    assert_eq!(value(other, "empty"), "");
    let nested = &sections[other]["s3"];
    assert_eq!(nested.nested("addressing_style"), Some("path"));
    assert_eq!(nested.nested("max_bandwidth"), Some("1MB/s"));
    assert_eq!(nested.nested("empty"), None);
    assert!(ini::parse("").unwrap().is_empty());
}

#[test]
fn parse_errors_have_the_line_but_not_its_text() {
    for (text, line, expected) in [
        ("region = x", 1, "a section"),
        ("\n[default\n", 2, "']'"),
        ("[default]\nSECRET\n", 2, "key = value"),
        ("[default]\n= SECRET\n", 2, "a key before"),
        ("[default]\ns3 =\n  a = b\n  SECRET\n", 4, "nested"),
    ] {
        let machine = Machine::new("", text);
        machine.refused(Kind::InvalidArgument, &[".aws/credentials: line ", &format!("line {line} "), expected]);
    }
    let machine = Machine::new("", "");
    std::fs::write(machine.home.path().join(".aws/config"), b"[default]\nregion = \xff\n").unwrap();
    machine.refused(Kind::InvalidArgument, &[".aws/config", "UTF-8"]);
}

proptest! {
    #[test]
    fn arbitrary_files_do_not_panic(
        config in "(\\[(profile |sso-session |services )?[a\"]{0,2}\\]?|[ \t]*(role_arn|source_profile|sso_role_name|sso_account_id|region|credential_process|[a-c]{0,2}) ?[=:]? ?[ab'\"]{0,2}|\\PC{0,5}|\r?\n){0,20}",
        credentials in any::<String>(),
    ) {
        let _ = ini::parse(&credentials);
        let _ = split_words(&credentials);
        let machine = Machine::new(&config, &credentials).with("AWS_PROFILE", "a");
        if let Ok(Some(profile)) = machine.load() {
            let _ = (profile.region(), profile.endpoint(), profile.is_path_style(), profile.credentials().is_ok());
        }
    }
}

#[test]
fn the_environment_selects_files_and_profile() {
    let none = TempDir::new().unwrap();
    assert!(Profile::load(BTreeMap::new(), Some(none.path())).unwrap().is_none());
    assert!(Profile::load(BTreeMap::new(), None).unwrap().is_none());
    assert!(Machine::new("[profile a]\nregion = x\n[a]\n", "").load().unwrap().is_none());

    let config =
        "[default]\nregion = one\n[profile default]\nregion = two\n[profile 'a b']\nregion = three\n[b]\nregion=x\n";
    let machine = || {
        let machine = Machine::new(config, "[c]\nregion = four\n");
        machine.file("five", "[default]\nregion = five\n");
        machine.file("six", "[default]\nregion = six\n");
        machine
    };
    let six = machine();
    let path = six.home.path().join("six");
    // The credentials file takes precedence.
    let six = six.with("AWS_SHARED_CREDENTIALS_FILE", path.to_str().unwrap());
    for (machine, name, region) in [
        (machine(), "default", "two"),
        (machine().with("AWS_PROFILE", "a b").with("AWS_DEFAULT_PROFILE", "d"), "a b", "three"),
        (machine().with("AWS_PROFILE", "c"), "c", "four"),
        (machine().with("AWS_CONFIG_FILE", "~/five"), "default", "five"),
        (six, "default", "six"),
    ] {
        assert_eq!((machine.profile().name(), machine.profile().region()), (name, Some(region)));
    }
    // A section of the config file without `profile` is not a profile.
    let missing = machine().with("AWS_DEFAULT_PROFILE", "b");
    missing.refused(Kind::InvalidArgument, &["AWS_DEFAULT_PROFILE is \"b\"", "a b, c, default", "~/.aws/config"]);
    Machine::new("[default]\nregion = a/b@c\n", "").refused(Kind::InvalidArgument, &[".aws/config: [default] region"]);
}

#[test]
fn endpoint_and_addressing_style_are_read() {
    let config = "[default]\nendpoint_url = http://all\nservices = mine\ns3 =\n  addressing_style = path\n\
        [services mine]\ns3 =\n  endpoint_url = http://s3\nsts =\n  endpoint_url = http://sts\n";
    let without_service = "[default]\nendpoint_url = http://all\ns3 =\n  addressing_style = virtual\n";
    let ignoring = config.replace("services =", "ignore_configured_endpoint_urls = True\nservices =");
    for (config, ignored, endpoint, is_path_style) in [
        (config, "false", Some("http://s3"), true),
        (without_service, "", Some("http://all"), false),
        (config, "true", None, true),
        (&ignoring, "", None, true),
    ] {
        let profile = Machine::new(config, "").with("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", ignored).profile();
        assert_eq!((profile.endpoint(), profile.is_path_style()), (endpoint, is_path_style), "{config}");
    }
}

#[test]
fn keys_in_files_are_returned() {
    let machine = Machine::new("", &format!("[default]\n{STATIC}aws_session_token = TOKEN\n"));
    assert_eq!(texts(&machine.keys()), ("AKIA", "SECRET/key+=", Some("TOKEN")));
    let shown = format!("{:?} {:?}", machine.profile(), machine.provider());
    assert!(shown.contains("default") && !shown.contains("SECRET") && !shown.contains("TOKEN"), "{shown}");
    assert!(Machine::new("[default]\nregion = a\n", "").profile().credentials().unwrap().is_none());
    let refused = |config: &str, credentials: &str, expected: &[&str]| {
        Machine::new(config, credentials).refused(Kind::InvalidArgument, expected);
    };
    let no_id = ".aws/credentials: [default] aws_access_key_id";
    refused("", "[default]\naws_secret_access_key = SECRET\n", &[no_id, "missing"]);
    let no_secret = ".aws/config: [default] aws_secret_access_key";
    refused("[default]\naws_access_key_id = AKIA\n", "", &[no_secret, "missing"]);
    // The signature code of object_store panics for such keys.
    refused("", &format!("[default]\n{STATIC}  SECRET of two lines\n"), &["aws_access_key_id", "line breaks"]);
}

#[test]
fn words_are_split_as_by_shlex() {
    for (text, expected) in [
        ("", vec![]),
        ("  a\tb \n c ", vec!["a", "b", "c"]),
        (r#"'a b'c "" "d\"\e\\" \' # f"#, vec!["a bc", "", r#"d"\e\"#, "'", "#", "f"]),
    ] {
        assert_eq!(split_words(text).unwrap(), expected, "{text}");
    }
    for text in ["'", "\"a", "a\\", "\"\\"] {
        assert_eq!(split_words(text), None, "{text}");
    }
}

/// Returns a machine whose process is a shell script.
fn with_process(script: &str) -> Machine {
    let machine = Machine::new("", "");
    let script = machine.file("folder of scripts/process", script);
    let config = format!("[default]\n{STATIC}credential_process = sh \"{}\" 'an argument'\n", script.display());
    machine.file(".aws/config", &config);
    machine
}

#[test]
fn a_process_returns_keys() {
    let script = r#"echo called >> "$(dirname "$0")/calls"
        echo "{\"Version\": 1, \"AccessKeyId\": \"$1\", \"SecretAccessKey\": \"SECRET\", \"Other\": 1}""#;
    let machine = with_process(script);
    let provider = machine.provider();
    for _ in 0..3 {
        assert_eq!(texts(&block_on(provider.get_credential()).unwrap()), ("an argument", "SECRET", None));
    }
    // Keys without an expiration are kept.
    let calls = std::fs::read_to_string(machine.home.path().join("folder of scripts/calls")).unwrap();
    assert_eq!(calls, "called\n");
    // Keys in the credentials file precede the process.
    machine.file(".aws/credentials", "[default]\naws_access_key_id = OTHER\n");
    assert_eq!(machine.keys().key_id, "OTHER");
}

#[test]
fn failures_of_a_process_are_errors_without_its_output() {
    let refused = |script: &str, expected: &str| {
        let machine = with_process(script);
        machine.refused(Kind::PermissionDenied, &[".aws/config: [default] credential_process: ", expected])
    };
    let text = refused("echo SECRET; echo not logged in >&2; exit 3", "exit status: 3: not logged in");
    assert!(!text.contains("an argument"), "{text}");
    refused("exit 3", "without a message: exit status: 3");
    refused("kill -9 $$", "signal: 9");
    refused("echo SECRET", "no JSON");
    refused(r#"echo '{"Version": "SECRET"}'"#, "no JSON");
    refused(r#"echo '{"Version": 1, "AccessKeyId": "a"}'"#, "\"SecretAccessKey\"");
    let keys = r#""AccessKeyId": "a", "SecretAccessKey": "SECRET""#;
    refused(&format!("echo '{{\"Version\": 2, {keys}}}'"), "version 2");
    refused(&format!("echo '{{\"Version\": 1, {keys}, \"Expiration\": \"SECRET\"}}'"), "Expiration");
    let expired = with_process(&format!("echo '{{\"Version\": 1, {keys}, \"Expiration\": \"2020-01-01T00:00:00Z\"}}'"));
    expired.refused(Kind::PermissionDenied, &["expired already", "clock"]);
    for (command, expected) in [("/no/such/program SECRET", "No such file"), ("a 'SECRET", "quote"), ("''", "\"\"")] {
        let machine = Machine::new(&format!("[default]\ncredential_process = {command}\n"), "");
        machine.refused(Kind::PermissionDenied, &["credential_process", expected]);
    }
}

#[test]
fn a_process_that_does_not_end_is_killed() {
    let folder = TempDir::new().unwrap();
    let pid_file = folder.path().join("pid");
    let command = format!("sh -c 'echo $$ > {}; exec sleep 600'", pid_file.display());
    let error = block_on(process::run(&command, Duration::from_millis(500))).unwrap_err();
    assert!(error.contains("did not end within 0.5 s"), "{error}");
    let pid = std::fs::read_to_string(&pid_file).unwrap();
    assert!(!std::path::Path::new("/proc").join(pid.trim()).exists());
}

const ROLE: &str = "[default]\nregion = eu-west-1\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = source\n\
    external_id = an id & more\nrole_session_name = me\nduration_seconds = 900\n";

/// Returns a machine with a role that is assumed with the keys of another profile.
fn with_role(server: &Server) -> Machine {
    Machine::new(ROLE, &format!("[source]\n{STATIC}")).with("AWS_ENDPOINT_URL_STS", &server.url)
}

#[test]
fn a_role_is_assumed_once_with_the_keys_of_another_profile() {
    let server = sts(3600);
    let provider = with_role(&server).provider();
    let at_once = block_on(futures_util::future::join_all((0..8).map(|_| provider.get_credential())));
    for keys in at_once.into_iter().chain([block_on(provider.get_credential())]) {
        assert_eq!(texts(&keys.unwrap()), ("ASIA0", "SECRET+/ASIA0=", Some("TOKENASIA0==")));
    }
    let request = server.request();
    assert_eq!(request.line, "POST / HTTP/1.1");
    let expected = [
        ("Action", "AssumeRole"),
        ("Version", "2011-06-15"),
        ("RoleArn", "arn:aws:iam::1:role/r"),
        ("RoleSessionName", "me"),
        ("ExternalId", "an id & more"),
        ("DurationSeconds", "900"),
    ];
    assert_eq!(request.form, expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
    let authorization = &request.headers["authorization"];
    assert!(authorization.starts_with("AWS4-HMAC-SHA256 Credential=AKIA/"), "{authorization}");
    assert!(authorization.contains("/eu-west-1/sts/aws4_request"), "{authorization}");
    assert!(!request.headers.contains_key("x-amz-security-token"));
}

#[test]
fn roles_are_chained() {
    let server = sts(3600);
    let config = format!(
        "{ROLE}[profile source]\nrole_arn = arn:aws:iam::1:role/middle\nsource_profile = base\n\
         [profile base]\nrole_arn = arn:ignored\nsource_profile = base\n{STATIC}"
    );
    let machine = Machine::new(&config, "").with("AWS_ENDPOINT_URL", &server.url).with("AWS_REGION", "us-west-2");
    assert_eq!(machine.keys().key_id, "ASIA1");
    let [first, second] = &server.requests()[..] else { panic!("two roles are assumed") };
    assert_eq!(first.form["RoleArn"], "arn:aws:iam::1:role/middle");
    assert!(first.form["RoleSessionName"].starts_with("fst-"));
    assert_eq!(second.form["RoleArn"], "arn:aws:iam::1:role/r");
    assert_eq!(second.headers["x-amz-security-token"], "TOKENASIA0==");
    assert!(second.headers["authorization"].contains("Credential=ASIA0/"));
    assert!(second.headers["authorization"].contains("/us-west-2/sts/"));
    // A profile may be its own source.
    let machine = Machine::new(&ROLE.replace("= source", "= default"), &format!("[default]\n{STATIC}"))
        .with("AWS_ENDPOINT_URL", &server.url);
    assert_eq!(machine.keys().key_id, "ASIA2");
    assert!(server.requests()[2].headers["authorization"].contains("Credential=AKIA/"));
}

#[test]
fn invalid_roles_are_refused() {
    for (rest, expected) in [
        ("", ".aws/config: [default] role_arn"),
        ("", "source_profile, credential_source"),
        (
            "source_profile = a\n[profile a]\nrole_arn = r\nsource_profile = b\n[profile b]\nrole_arn = r\n\
             source_profile = a\n",
            "[profile b] source_profile: the profiles default -> a -> b -> a form a cycle",
        ),
        ("source_profile = default\n", "default -> default form a cycle"),
        ("source_profile = x\n", "[default] source_profile: the profile \"x\" does not exist"),
        ("source_profile = a\n[profile a]\nregion = b\n", "[default] source_profile: the profile \"a\" has no keys"),
        ("source_profile = keys\ncredential_source = Environment\n", "not both"),
        ("credential_source = Environment\n", "AWS_SECRET_ACCESS_KEY must be set"),
        ("credential_source = EcsContainer\n", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
        ("credential_source = else\n", "\"else\" must be"),
        ("source_profile = keys\nmfa_serial = m\n", "export-credentials"),
        ("source_profile = keys\nduration_seconds = 1h\n", "duration_seconds: it must be a whole number"),
        ("source_profile = keys\nendpoint_url = nonsense\n", "role_arn: the endpoint of the service"),
    ] {
        let config = format!("[default]\nrole_arn = arn:aws:iam::1:role/r\n{rest}");
        Machine::new(&config, &format!("[keys]\n{STATIC}")).refused(Kind::InvalidArgument, &[expected]);
    }
    let without_role = Machine::new("[default]\nweb_identity_token_file = /token\n", "");
    without_role.refused(Kind::InvalidArgument, &["role_arn: the key is missing"]);
}

/// Returns a machine with a role that is assumed with the keys of this source.
fn with_source(source: &str, server: &Server) -> Machine {
    let config = format!("[default]\nrole_arn = arn:r\ncredential_source = {source}\n");
    Machine::new(&config, "").with("AWS_ENDPOINT_URL_STS", &server.url)
}

/// Returns a machine with a role that is assumed with keys of the environment.
fn with_environment(server: &Server) -> Machine {
    with_source("Environment", server)
        .with("AWS_ACCESS_KEY_ID", "AKIAENV")
        .with("AWS_SECRET_ACCESS_KEY", "SECRET")
        .with("AWS_SESSION_TOKEN", "TOKENENV")
}

#[test]
fn a_role_is_assumed_with_keys_of_the_environment() {
    let server = sts(3600);
    let machine = with_environment(&server).with("AWS_ROLE_SESSION_NAME", "session");
    assert_eq!(machine.keys().key_id, "ASIA0");
    let request = server.request();
    assert!(request.headers["authorization"].contains("Credential=AKIAENV/"));
    assert!(request.headers["authorization"].contains("/us-east-1/sts/"));
    assert_eq!(request.headers["x-amz-security-token"], "TOKENENV");
    assert_eq!(request.form["RoleSessionName"], "session");
}

#[test]
fn a_role_is_assumed_with_keys_of_the_machine() {
    let keys = format!(
        r#"{{"AccessKeyId": "ASIAEC2", "SecretAccessKey": "SECRET", "Token": "TOKENEC2", "Expiration": "{}"}}"#,
        date_in(3600)
    );
    let metadata = Server::new(move |_, request| match request.line.split(' ').nth(1).unwrap() {
        "/latest/api/token" => (200, "session".into()),
        "/latest/meta-data/iam/security-credentials/" => (200, "name".into()),
        "/latest/meta-data/iam/security-credentials/name" | "/container" => (200, keys.clone()),
        _ => (404, String::new()),
    });
    let server = sts(3600);
    let instance = with_source("Ec2InstanceMetadata", &server);
    let instance = instance.with("AWS_EC2_METADATA_SERVICE_ENDPOINT", &format!("{}/", metadata.url));
    assert_eq!(instance.keys().key_id, "ASIA0");
    let container = with_source("EcsContainer", &server);
    let token = container.file("token", "SECRET");
    let container = container
        .with("AWS_CONTAINER_CREDENTIALS_FULL_URI", &format!("{}/container", metadata.url))
        .with("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", token.to_str().unwrap());
    assert_eq!(container.keys().key_id, "ASIA1");
    for request in server.requests() {
        assert!(request.headers["authorization"].contains("Credential=ASIAEC2/"));
    }
}

#[test]
fn a_web_identity_assumes_a_role() {
    let server = sts(3600);
    let machine = Machine::new("", "");
    let token = machine.file("token", "SECRET&token\n");
    let config = format!("[default]\nrole_arn = arn:r\nweb_identity_token_file = {}\n{STATIC}", token.display());
    machine.file(".aws/config", &config);
    let machine = machine.with("AWS_ENDPOINT_URL_STS", &server.url);
    assert_eq!(machine.keys().key_id, "ASIA0");
    let request = server.request();
    assert_eq!(request.form["Action"], "AssumeRoleWithWebIdentity");
    assert_eq!(request.form["WebIdentityToken"], "SECRET&token");
    assert!(!request.headers.contains_key("authorization"));
    std::fs::remove_file(token).unwrap();
    machine.refused(Kind::FileNotFound, &["token: cannot read", "web_identity_token_file"]);
}

#[test]
fn refusals_of_sts_are_errors_without_secrets() {
    let answers = [
        (403, "<Code>AccessDenied</Code><Message>not authorized to perform: sts:AssumeRole\nSECRET</Message>"),
        (400, "<Code>InvalidClientTokenId</Code><Message>The token TOKENENV is invalid</Message>"),
    ];
    for ((status, answer), expected) in answers.into_iter().zip(["AccessDenied: not authorized", "The token *** is"]) {
        let server = Server::new(move |_, _| {
            (status, format!("<ErrorResponse xmlns=\"a\"><Error><Type>Sender</Type>{answer}</Error></ErrorResponse>"))
        });
        let machine = with_environment(&server);
        let place = ".aws/config: [default] role_arn: cannot assume the role arn:r: 127.0.0.1 answered ";
        machine.refused(Kind::PermissionDenied, &[place, expected, "trust policy"]);
        assert_eq!(server.requests().len(), 1);
    }
    let server = Server::new(|_, _| (200, "<html>SECRET".into()));
    with_role(&server).refused(Kind::PermissionDenied, &["status 200 is not one of STS"]);
    let server = Server::new(|_, request| sts_answer(&request.form["Action"], "ASIA", "SECRET"));
    with_role(&server).refused(Kind::Io, &["role_arn", "Expiration"]);
    // Nothing listens on this port any more.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    with_role(&server)
        .with("AWS_ENDPOINT_URL_STS", &format!("http://{address}"))
        .refused(Kind::Io, &["role_arn", &address.to_string(), "refused"]);
}

#[test]
fn failures_that_may_pass_are_repeated() {
    let server = Server::new(|number, request| match number {
        0 => (503, String::new()),
        1 => (429, String::new()),
        _ => sts_answer(&request.form["Action"], "ASIA", &date_in(3600)),
    });
    assert_eq!(with_role(&server).keys().key_id, "ASIA");
    assert_eq!(server.requests().len(), 3);
}

const SESSION: &str = "[default]\nsso_session = corp\nsso_account_id = 123\nsso_role_name = A role\n\
    [sso-session corp]\nsso_start_url = https://corp.awsapps.com/start\nsso_region = eu-north-1\n";
const LEGACY: &str = "[default]\nsso_start_url = https://corp.awsapps.com/start\nsso_region = eu-north-1\n\
    sso_account_id = 123\nsso_role_name = A role\n";
/// SHA-1 of `corp` and of the start URL, by `sha1sum`.
const SESSION_CACHE: &str = "ee0bfd2552fbd840c02cc48b6e823320543c450f";
const LEGACY_CACHE: &str = "a51746d4aa793ae07b25e90c3a5db96fc7832bd7";

fn with_token(config: &str, cache: &str, expires: &str) -> Machine {
    let machine = Machine::new(config, "");
    let token = format!(r#"{{"startUrl": "x", "accessToken": "SECRETtoken", "expiresAt": "{expires}"}}"#);
    machine.file(&format!(".aws/sso/cache/{cache}.json"), &token);
    machine
}

#[test]
fn keys_come_with_the_token_of_a_login() {
    let server = Server::new(|_, _| {
        let expires = (chrono::Utc::now() + chrono::TimeDelta::hours(1)).timestamp_millis();
        let keys = format!(
            r#"{{"accessKeyId": "ASIA", "secretAccessKey": "SECRET", "sessionToken": "TOKEN", "expiration": {expires}}}"#
        );
        (200, format!(r#"{{"roleCredentials": {keys}}}"#))
    });
    for (config, cache) in [(SESSION, SESSION_CACHE), (LEGACY, LEGACY_CACHE)] {
        let machine = with_token(config, cache, &date_in(60)).with("AWS_ENDPOINT_URL_SSO", &server.url);
        let provider = machine.provider();
        for _ in 0..2 {
            let keys = block_on(provider.get_credential()).unwrap();
            assert_eq!(texts(&keys), ("ASIA", "SECRET", Some("TOKEN")));
        }
    }
    let requests = server.requests();
    assert_eq!(requests.len(), 2);
    for request in requests {
        assert_eq!(request.line, "GET /federation/credentials?role_name=A+role&account_id=123 HTTP/1.1");
        assert_eq!(request.headers["x-amz-sso_bearer_token"], "SECRETtoken");
    }
}

#[test]
fn a_login_that_has_expired_is_an_error_with_the_command() {
    let login = "run aws sso login --profile default";
    let expired = with_token(SESSION, SESSION_CACHE, "2020-06-17T10:02:08UTC");
    expired.refused(Kind::PermissionDenied, &[".aws/config: [default] sso_role_name", "has expired", login]);
    Machine::new(SESSION, "").refused(Kind::PermissionDenied, &["no token is cached", SESSION_CACHE, login]);
    for (status, expected) in [(401, ["does not accept the token", login]), (403, ["status 403", "sso_account_id"])] {
        let server = Server::new(move |_, _| (status, "SECRET".into()));
        let machine = with_token(SESSION, SESSION_CACHE, &date_in(60)).with("AWS_ENDPOINT_URL_SSO", &server.url);
        machine.refused(Kind::PermissionDenied, &expected);
    }
    let damaged = Machine::new(SESSION, "");
    damaged.file(&format!(".aws/sso/cache/{SESSION_CACHE}.json"), r#"{"accessToken": "SECRET"}"#);
    damaged.refused(Kind::PermissionDenied, &["no accessToken and expiresAt", login]);
    for (config, expected) in [
        ("[default]\nsso_session = corp\nsso_account_id = 1\nsso_role_name = a\n", "[sso-session corp] does not exist"),
        ("[default]\nsso_account_id = 1\nsso_role_name = a\n", "sso_start_url: the key is missing"),
        ("[default]\nsso_role_name = a\nsso_start_url = u\n", "sso_account_id: the key is missing"),
        ("[default]\nsso_account_id = 1\nsso_role_name = a\nsso_start_url = u\n", "sso_region: the key is missing"),
    ] {
        Machine::new(config, "").refused(Kind::InvalidArgument, &[expected]);
    }
}

fn keys(number: usize, valid: TimeDelta) -> Keys {
    let credential = AwsCredential { key_id: number.to_string(), secret_key: "SECRET".into(), token: None };
    Keys { credential: Arc::new(credential), expires: Some(Utc::now() + valid) }
}

/// Source of numbered keys, the first of which are valid for two seconds. The second time it fails, and the third time its
/// keys have expired.
#[derive(Default)]
struct Numbered(AtomicUsize);

#[async_trait]
impl KeySource for &Numbered {
    async fn fetch(&self) -> fst::Result<Keys> {
        match self.0.fetch_add(1, Ordering::Relaxed) {
            1 => Err(Error::new(Kind::Io, "no answer")),
            number => Ok(keys(number, TimeDelta::seconds(if number == 0 { 2 } else { -60 }))),
        }
    }
}

#[test]
fn keys_are_used_until_they_expire_if_a_renewal_fails() {
    let source = Numbered::default();
    let provider = Refreshed::new(&source);
    for (pause_ms, requests) in [(0, 1), (0, 1), (1050, 2), (0, 2)] {
        std::thread::sleep(Duration::from_millis(pause_ms));
        assert_eq!(block_on(provider.get_credential()).unwrap().key_id, "0");
        assert_eq!(source.0.load(Ordering::Relaxed), requests);
    }
    std::thread::sleep(Duration::from_millis(1000));
    let error = block_on(provider.get_credential()).unwrap_err();
    assert!(error.to_string().contains("expired already"), "{error}");
}

#[test]
fn keys_are_renewed_five_minutes_before_they_expire() {
    let keys = keys(0, TimeDelta::minutes(60));
    let expires = keys.expires.unwrap();
    let before = |minutes| expires - TimeDelta::minutes(minutes);
    for (now, renewal) in [(60, 5), (4, 2)] {
        assert_eq!(keys.renewal(before(now)), Some(before(renewal)));
    }
    assert!(keys.are_valid(before(1)) && !keys.are_valid(expires));
    assert_eq!(Keys { expires: None, ..keys }.renewal(expires), None);
}

#[test]
fn dates_of_all_aws_programs_are_parsed() {
    let date = parse_date("2019-11-14T04:05:45Z");
    assert!(date.is_some());
    for text in ["2019-11-14T04:05:45UTC", "2019-11-14T04:05:45.000Z", "2019-11-14T05:05:45+01:00"] {
        assert_eq!(parse_date(text), date, "{text}");
    }
    assert_eq!(parse_date("soon"), None);
}
