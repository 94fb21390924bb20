//! Repositories of the Hugging Face Hub: `hf://owner/name[@revision][/path]`.
//!
//! A revision is resolved to a commit once, and every file is requested of that commit. The Hub answers a request for a
//! large file with a redirect to a signed link of its storage, which gets no token. What the Hub's own cache on this
//! machine holds is read from there.

use super::host_policy::HostPolicy;
use super::http::{self, answer, range_headers};
use super::http_error;
use super::location::Location;
use super::store::{Answer, Attempt, Failure, FailureClass, Store};
use super::store_options;
use super::transport::{self, Transport};
use super::version::Version;
use crate::error::{Error, Kind, Result};
use crate::options;
use crate::os::local_file::open_regular;
use ::http::header::{self, HeaderMap, HeaderValue};
use ::http::{Method, StatusCode, Uri};
use async_trait::async_trait;
use object_store::client::{HttpResponse, HttpService};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Read;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

const ENDPOINT: &str = "https://huggingface.co";
/// Upper bound for the description of a repository, in bytes.
const DESCRIPTION_BYTES_MAX: u64 = 64 << 20;
/// Header in which the Hub states the entity tag of the file to which it redirects.
const LINKED_ETAG: &str = "x-linked-etag";
/// Number of hexadecimal digits of a commit.
const COMMIT_DIGITS: usize = 40;

/// File or directory of a repository, as a URL names it.
pub(super) struct File {
    /// `owner/name`, or `name` alone.
    pub(super) repository: String,
    /// Branch, tag or commit.
    pub(super) revision: String,
    /// Path in the repository. Empty for its root.
    pub(super) path: String,
}

impl File {
    /// Splits a URL of the Hub.
    ///
    /// # Errors
    /// `invalid-argument` if it names no repository.
    pub(super) fn parse(location: &Location) -> Result<File> {
        let invalid = |message: &str| Error::new(Kind::InvalidArgument, message).at(location.to_string());
        let (name, path) = location.key().split_once('/').unwrap_or((location.key(), ""));
        let whole = if name.is_empty() { location.host().to_owned() } else { format!("{}/{name}", location.host()) };
        let (repository, revision) = whole.split_once('@').unwrap_or((&whole, "main"));
        let is_name = |part: &str| {
            !part.is_empty() && part != ".." && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        if !repository.split('/').all(is_name) || revision.is_empty() {
            return Err(invalid("this names no repository; write hf://owner/name, hf://owner/name@revision/path"));
        }
        // A revision such as refs/pr/1 is written with %2F, because a slash ends it.
        let revision = revision.replace("%2F", "/").replace("%2f", "/");
        let is_inside = |text: &str| text.split('/').all(|part| part != "..");
        if !is_inside(&revision) || !is_inside(path) {
            return Err(invalid("a revision or path of the Hub cannot contain \"..\""));
        }
        Ok(File { repository: repository.to_owned(), revision, path: path.trim_end_matches('/').to_owned() })
    }

    pub(super) fn repository_at_commit(&self) -> String {
        format!("{}@{}", self.repository, self.revision)
    }

    /// Returns the directory of the snapshot of a commit in the Hub's cache on this machine.
    pub(super) fn snapshot(&self, commit: &str) -> Option<PathBuf> {
        Some(self.cache()?.join("snapshots").join(commit))
    }

    fn cache(&self) -> Option<PathBuf> {
        let home = || options::variable("HOME").map(PathBuf::from);
        let hub = options::variable("HF_HUB_CACHE")
            .or_else(|| options::variable("HUGGINGFACE_HUB_CACHE"))
            .map(PathBuf::from)
            .or_else(|| Some(hub_home(home)?.join("hub")))?;
        Some(hub.join(format!("models--{}", self.repository.replace('/', "--"))))
    }

    /// Returns the commit that the Hub's cache knows for the revision.
    pub(super) fn cached_commit(&self) -> Option<String> {
        if is_commit(&self.revision) {
            return Some(self.revision.clone());
        }
        // A commit is 40 digits, and a FIFO would block.
        let (file, _) = open_regular(&self.cache()?.join("refs").join(&self.revision)).ok()?;
        let mut commit = String::new();
        file.take(64).read_to_string(&mut commit).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_commit(commit))
    }
}

fn hub_home(home: impl Fn() -> Option<PathBuf>) -> Option<PathBuf> {
    let cache = || options::variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| Some(home()?.join(".cache")));
    options::variable("HF_HOME").map(PathBuf::from).or_else(|| Some(cache()?.join("huggingface")))
}

pub(super) fn is_commit(text: &str) -> bool {
    text.len() == COMMIT_DIGITS && text.chars().all(|c| c.is_ascii_hexdigit())
}

pub(super) fn is_offline() -> bool {
    let value = options::variable("HF_HUB_OFFLINE").unwrap_or_default();
    matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE")
}

pub(super) struct Access {
    pub(super) endpoint: String,
    headers: HeaderMap,
    transport: Transport,
}

impl Access {
    pub(super) fn new(settings: &BTreeMap<String, String>, transport: Transport, url: &str) -> Result<Access> {
        let mut endpoint = options::variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        let mut token = stored_token();
        for (name, value) in settings {
            match name.as_str() {
                "endpoint" => endpoint.clone_from(value),
                "token" => token = Some(value.clone()),
                _ => return Err(store_options::unknown(url, name, "the options are endpoint and token")),
            }
        }
        let mut headers = HeaderMap::new();
        if let Some(token) = token {
            let invalid = |_| Error::new(Kind::InvalidArgument, "the token of the Hub is no valid header").at(url);
            let mut value = HeaderValue::from_str(&format!("Bearer {}", token.trim())).map_err(invalid)?;
            value.set_sensitive(true);
            headers.insert(header::AUTHORIZATION, value);
        }
        Ok(Access { endpoint: endpoint.trim_end_matches('/').to_owned(), headers, transport })
    }
}

/// Returns the token of the environment, or the one that the Hub's own program has stored.
fn stored_token() -> Option<String> {
    let set = options::variable("HF_TOKEN").or_else(|| options::variable("HUGGING_FACE_HUB_TOKEN"));
    set.or_else(|| {
        let home = || options::variable("HOME").map(PathBuf::from);
        let path = options::variable("HF_TOKEN_PATH").map(PathBuf::from);
        fs::read_to_string(path.or_else(|| Some(hub_home(home)?.join("token")))?).ok()
    })
    .map(|token| token.trim().to_owned())
    .filter(|token| !token.is_empty())
}

/// Description of a repository at a commit.
#[derive(Deserialize)]
pub(super) struct Description {
    pub(super) sha: String,
    #[serde(default)]
    pub(super) siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
pub(super) struct Sibling {
    pub(super) rfilename: String,
}

pub(super) async fn describe(address: &str, access: &Access) -> Attempt<Description> {
    let request = transport::get_request(address, access.headers.clone())?;
    let response = access.transport.call(request).await.map_err(|error| http_error::failure_of(&error))?;
    check_status(response.status())?;
    parse_description(&http::collect(response, DESCRIPTION_BYTES_MAX).await?)
}

pub(super) fn parse_description(bytes: &[u8]) -> Attempt<Description> {
    let invalid = |error| Failure::new(FailureClass::Permanent, format!("the Hub's answer is not valid: {error}"));
    let described: Description = serde_json::from_slice(bytes).map_err(invalid)?;
    match is_commit(&described.sha) {
        true => Ok(described),
        false => Err(Failure::new(FailureClass::Permanent, "the Hub's answer names no commit")),
    }
}

fn check_status(status: StatusCode) -> Attempt<()> {
    match status {
        StatusCode::NOT_FOUND => Err(Failure::new(
            FailureClass::NotFound,
            "the Hub has no such repository, revision or file; check the name, and the token of a private repository",
        )),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(Failure::new(
            FailureClass::Denied,
            format!(
                "the Hub refuses access (status {}); check HF_TOKEN, and that its terms are accepted",
                status.as_u16()
            ),
        )),
        _ => Ok(()),
    }
}

pub(super) struct Repository {
    access: Access,
    repository: String,
    commit: String,
    /// Signed links of the storage, by path.
    links: Mutex<HashMap<String, Link>>,
}

impl Repository {
    pub(super) fn open(
        location: &Location,
        settings: &BTreeMap<String, String>,
        transport: Transport,
    ) -> Result<Repository> {
        let File { repository, revision, .. } = File::parse(location)?;
        let access = Access::new(settings, transport, &location.to_string())?;
        Ok(Repository { access, repository, commit: revision, links: Mutex::default() })
    }

    fn links(&self) -> MutexGuard<'_, HashMap<String, Link>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the Hub for a file. The answer is the file, or a redirect.
    async fn ask(&self, path: &str, range: &Range<u64>) -> Attempt<Asked> {
        let mut address = format!("{}/{}/resolve/{}/{path}", self.access.endpoint, self.repository, self.commit);
        for _ in 0..3 {
            let mut headers = self.access.headers.clone();
            headers.extend(range_headers(range, None));
            let request = transport::get_request(&address, headers)?;
            let asked = request.uri().clone();
            let response = self.access.transport.send(request).await.map_err(|error| http_error::failure_of(&error))?;
            check_status(response.status())?;
            let etag = response.headers().get(LINKED_ETAG).and_then(|etag| Some(etag.to_str().ok()?.to_owned()));
            let target = transport::redirect_target(&Method::GET, &asked, &response);
            let Some(target) = target.map_err(|error| http_error::failure_of(&error))? else {
                return Ok(Asked::File(response));
            };
            // A repository that was renamed is at the same host, which may get the token.
            if target.authority() != asked.authority() {
                return Ok(Asked::Link(Link { target, etag }));
            }
            address = target.to_string();
        }
        Err(Failure::new(FailureClass::Permanent, "the Hub redirected too often"))
    }

    async fn follow(&self, link: &Link, range: &Range<u64>) -> Attempt<HttpResponse> {
        let request = transport::get_request(&link.target.to_string(), range_headers(range, None))?;
        let transport = self.access.transport.clone().within(HostPolicy::Redirected);
        transport.call(request).await.map_err(|error| http_error::failure_of(&error))
    }
}

enum Asked {
    File(HttpResponse),
    Link(Link),
}

#[derive(Clone)]
struct Link {
    target: Uri,
    /// Entity tag that the Hub states: the SHA-256 of the file.
    etag: Option<String>,
}

#[async_trait]
impl Store for Repository {
    async fn get(&self, path: &str, range: Range<u64>, _: Option<&Version>) -> Attempt<Answer> {
        // A commit never changes.
        let version = |etag: Option<String>| Version { id: Some(self.commit.clone()), etag, modified: None };
        let known = self.links().get(path).cloned();
        if let Some(link) = known {
            let response = self.follow(&link, &range).await?;
            let is_expired = matches!(
                response.status(),
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::NOT_FOUND | StatusCode::GONE
            );
            if !is_expired {
                return answer(response, &range).map(|answer| Answer { version: version(link.etag), ..answer });
            }
            self.links().remove(path);
        }
        let (response, etag) = match self.ask(path, &range).await? {
            Asked::File(response) => (response, None),
            Asked::Link(link) => {
                let response = self.follow(&link, &range).await?;
                self.links().insert(path.to_owned(), link.clone());
                (response, link.etag)
            }
        };
        answer(response, &range).map(|answer| Answer { version: version(etag), ..answer })
    }

    async fn list(&self, _: &str) -> Attempt<Option<Vec<String>>> {
        Ok(None)
    }
}
