//! Repositories of the Hugging Face Hub, and its cache on this machine.
//!
//! A revision is resolved to a commit once, and every file is requested of that commit. The Hub answers a request for a
//! large file with a redirect to a signed link of its storage, which gets no token. What the Hub's own cache on this
//! machine holds is read from there. A bucket of the Hub has no commits: its files are requested as they are now.

use super::host_policy::HostPolicy;
use super::http::{self, answer, range_headers};
use super::http_error;
use super::refusal::Refusal;
use super::store_options;
use super::transport::{self, Transport};
use super::{Answer, Attempt, Failure, FailureClass, Store};
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use crate::options;
use crate::os::local_file::open_regular;
use crate::os::mutex::Mutex;
use crate::remote::find::below::{is_below, url_below};
use crate::remote::find::listing::{self, ANSWER_BYTES_MAX};
use crate::remote::find::location::Location;
use crate::remote::find::name::Name;
use crate::remote::find::repository::Repository;
use crate::remote::find::version::Version;
use ::http::header::{self, HeaderMap, HeaderValue};
use ::http::{Method, StatusCode, Uri};
use async_trait::async_trait;
use object_store::client::{HttpResponse, HttpService};
use reqwest::Url;
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Read;
use std::ops::Range;
use std::path::PathBuf;

const ENDPOINT: &str = "https://huggingface.co";
/// Upper bound for the description of a repository, in bytes.
const DESCRIPTION_BYTES_MAX: u64 = 64 << 20;
/// Header in which the Hub states the entity tag of the file to which it redirects.
const LINKED_ETAG: &str = "x-linked-etag";
/// Number of hexadecimal digits of a commit.
const COMMIT_DIGITS: usize = 40;

/// Returns the directory of the repository in the Hub's cache on this machine.
fn cache(repository: &Repository) -> Option<PathBuf> {
    let home = || options::variable("HOME").map(PathBuf::from);
    let hub = options::variable("HF_HUB_CACHE")
        .or_else(|| options::variable("HUGGINGFACE_HUB_CACHE"))
        .map(PathBuf::from)
        .or_else(|| Some(hub_home(home)?.join("hub")))?;
    Some(hub.join(repository.cache_folder()))
}

/// Returns the directory of the snapshot of a commit in the Hub's cache.
pub fn snapshot(repository: &Repository, commit: &str) -> Option<PathBuf> {
    Some(cache(repository)?.join("snapshots").join(commit))
}

/// Returns the commit that the Hub's cache knows for the revision of a repository.
pub fn cached_commit(repository: &Repository) -> Option<String> {
    if is_commit(repository.revision()) {
        return Some(repository.revision().to_owned());
    }
    // A commit is 40 digits, and a FIFO would block.
    let (file, _) = open_regular(&cache(repository)?.join("refs").join(repository.revision())).ok()?;
    let mut commit = String::new();
    file.take(64).read_to_string(&mut commit).ok()?;
    Some(commit.trim().to_owned()).filter(|commit| is_commit(commit))
}

fn hub_home(home: impl Fn() -> Option<PathBuf>) -> Option<PathBuf> {
    let cache = || options::variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| Some(home()?.join(".cache")));
    options::variable("HF_HOME").map(PathBuf::from).or_else(|| Some(cache()?.join("huggingface")))
}

pub fn is_commit(text: &str) -> bool {
    text.len() == COMMIT_DIGITS && text.chars().all(|c| c.is_ascii_hexdigit())
}

pub fn is_offline() -> bool {
    let value = options::variable("HF_HUB_OFFLINE").unwrap_or_default();
    matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE")
}

pub struct Access {
    pub endpoint: String,
    headers: HeaderMap,
    transport: Transport,
}

impl Access {
    pub fn new(settings: &BTreeMap<String, String>, transport: Transport, url: &str) -> Result<Access> {
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

    /// Asks for a description or a list. Returns the answer, and the address of the next part of a list.
    async fn ask(&self, address: &Url) -> Attempt<(HttpResponse, Option<Url>)> {
        let request = transport::get_request(address.as_str(), self.headers.clone())?;
        let response = self.transport.call(request).await.map_err(|error| http_error::failure_of(&error))?;
        check_status(&response)?;
        let link = response.headers().get(header::LINK).and_then(|link| link.to_str().ok()).unwrap_or_default();
        let is_next = |link: &&str| link.contains("rel=\"next\"");
        let next = link.split(',').find(is_next).and_then(|link| link.split(['<', '>']).nth(1));
        let outside = || Failure::new(FailureClass::Permanent, "the Hub's list goes on at another server");
        let next = next.map(|next| {
            address.join(next).ok().filter(|next| is_below(&self.endpoint, next.as_str())).ok_or_else(outside)
        });
        Ok((response, next.transpose()?))
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
pub struct Description {
    pub sha: String,
    #[serde(default)]
    pub siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
pub struct Sibling {
    pub rfilename: String,
}

/// Entry in the list of a folder.
#[derive(Deserialize)]
struct Entry {
    r#type: String,
    path: String,
}

/// Describes a repository at its revision.
pub async fn describe(repository: &Repository, access: &Access) -> Attempt<Description> {
    let parts = repository.api().chain(["revision", repository.revision()]);
    let (response, _) = access.ask(&url_below(&access.endpoint, parts)?).await?;
    parse_description(&http::collect(response, DESCRIPTION_BYTES_MAX).await?)
}

pub fn parse_description(bytes: &[u8]) -> Attempt<Description> {
    let described: Description = parse(bytes)?;
    match is_commit(&described.sha) {
        true => Ok(described),
        false => Err(Failure::new(FailureClass::Permanent, "the Hub's answer names no commit")),
    }
}

fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Attempt<T> {
    let invalid = |error| Failure::new(FailureClass::Permanent, format!("the Hub's answer is not valid: {error}"));
    serde_json::from_slice(bytes).map_err(invalid)
}

fn check_status(response: &HttpResponse) -> Attempt<()> {
    let codes = Refusal::of_response(response).codes();
    let (class, message) = match response.status() {
        StatusCode::NOT_FOUND => (
            FailureClass::NotFound,
            format!(
                "the Hub has no such repository, revision or file ({codes}); check the name, and the token of a private \
                 repository"
            ),
        ),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => (
            FailureClass::Denied,
            format!("the Hub refuses access ({codes}); check HF_TOKEN, and that its terms are accepted"),
        ),
        // The range of an empty file is refused.
        status if status.is_client_error() && status != StatusCode::RANGE_NOT_SATISFIABLE => {
            (FailureClass::Permanent, format!("the Hub refuses the request ({codes})"))
        }
        _ => return Ok(()),
    };
    Err(Failure::new(class, message))
}

/// Files of one repository at one commit, or of one bucket.
pub(super) struct HubStore {
    access: Access,
    repository: Repository,
    /// Signed links of the storage, by path.
    links: Mutex<HashMap<String, Link>>,
}

impl HubStore {
    pub(super) fn open(
        location: &Location,
        settings: &BTreeMap<String, String>,
        transport: Transport,
    ) -> Result<HubStore> {
        let url = location.to_string();
        let unnamed = || Error::new(Kind::Internal, "this names no repository").at(&url);
        let repository = location.repository().ok_or_else(unnamed)?.clone();
        Ok(HubStore { access: Access::new(settings, transport, &url)?, repository, links: Mutex::default() })
    }

    /// Asks the Hub for a file. The answer is the file, or a redirect.
    async fn ask(&self, path: &str, range: &Range<u64>) -> Attempt<Asked> {
        let mut address = url_below(&self.access.endpoint, self.repository.files().chain(path.split('/')))?.to_string();
        for _ in 0..3 {
            let mut headers = self.access.headers.clone();
            headers.extend(range_headers(range, None));
            let request = transport::get_request(&address, headers)?;
            let asked = request.uri().clone();
            let response = self.access.transport.send(request).await.map_err(|error| http_error::failure_of(&error))?;
            check_status(&response)?;
            let etag = response.headers().get(LINKED_ETAG).and_then(|etag| Some(etag.to_str().ok()?.to_owned()));
            let target = transport::redirect_target(&Method::GET, &asked, &response);
            let Some(target) = target.map_err(|error| http_error::failure_of(&error))? else {
                return Ok(Asked::File(response));
            };
            // A repository that was renamed is at the same endpoint, which may get the token.
            address = target.to_string();
            if target.authority() != asked.authority() || !is_below(&self.access.endpoint, &address) {
                return Ok(Asked::Link(Link { target, etag }));
            }
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
impl Store for HubStore {
    async fn get(&self, path: &str, range: Range<u64>, _: Option<&Version>) -> Attempt<Answer> {
        // A commit never changes. The files of a bucket do.
        let id = Some(self.repository.revision()).filter(|_| !self.repository.is_bucket());
        let version = |etag: Option<String>, found: &Version| match id {
            Some(id) => Version { id: Some(id.to_owned()), etag, modified: None },
            None => Version { etag: etag.or_else(|| found.etag.clone()), ..found.clone() },
        };
        let known = self.links.lock().get(path).cloned();
        if let Some(link) = known {
            let response = self.follow(&link, &range).await?;
            // Storages refuse an expired link with 400, 401, 403, 404 or 410. Others of these statuses are not about the link.
            let is_expired = response.status().is_client_error()
                && !matches!(response.status(), StatusCode::PRECONDITION_FAILED | StatusCode::RANGE_NOT_SATISFIABLE);
            if !is_expired {
                return answer(response, &range)
                    .map(|answer| Answer { version: version(link.etag, &answer.version), ..answer });
            }
            self.links.lock().remove(path);
        }
        let (response, etag) = match self.ask(path, &range).await? {
            Asked::File(response) => (response, None),
            Asked::Link(link) => {
                let response = self.follow(&link, &range).await?;
                self.links.lock().insert(path.to_owned(), link.clone());
                (response, link.etag)
            }
        };
        answer(response, &range).map(|answer| Answer { version: version(etag, &answer.version), ..answer })
    }

    async fn list(&self, folder: &str) -> Attempt<Option<Vec<Name>>> {
        if !self.repository.has_lists() {
            return Ok(None);
        }
        let commit = Some(self.repository.revision()).filter(|_| !self.repository.is_bucket());
        let folder_part = Some(folder).filter(|folder| !folder.is_empty());
        let parts = self.repository.api().chain(["tree"]).chain(commit).chain(folder_part);
        let first = &url_below(&self.access.endpoint, parts)?;
        let page = |next: Option<Url>| async move {
            let (response, next) = self.access.ask(next.as_ref().unwrap_or(first)).await?;
            let page = http::collect(response, to_u64(ANSWER_BYTES_MAX)).await?;
            let files = parse::<Vec<Entry>>(&page)?.into_iter().filter(|entry| entry.r#type == "file");
            Ok((files.map(|entry| entry.path).collect(), next))
        };
        listing::names(folder, page).await.map(Some)
    }
}
