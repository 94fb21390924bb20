//! Repositories of the Hugging Face Hub, as `HfFileSystem` of huggingface_hub names them:
//! `hf://[models/|datasets/|spaces/|kernels/|buckets/]ID[@REVISION][/PATH]`.

use super::name::Name;
use percent_encoding::percent_decode_str;
use std::fmt;

/// Revision of a URL that states none.
const DEFAULT_REVISION: &str = "main";

/// Types of repositories, as URLs and the Hub's API name them. Files of a bucket have no revisions.
const TYPES: [&str; 5] = [MODELS, "datasets", "spaces", KERNELS, BUCKETS];
const MODELS: &str = "models";
const KERNELS: &str = "kernels";
const BUCKETS: &str = "buckets";

/// Repository at a revision.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Repository {
    kind: &'static str,
    /// `owner/name`, or `name` alone.
    id: Name,
    /// Branch, tag or commit, if the URL states one.
    revision: Option<Name>,
}

impl Repository {
    /// Splits what follows `hf://` in a URL into the repository and the path of a file or folder in it. The error is
    /// the fault of the text, and the form to write instead.
    pub(super) fn parse(text: &str) -> Result<(Repository, String), String> {
        let (first, rest) = text.split_once('/').unwrap_or((text, ""));
        let (kind, rest) = match TYPES.iter().find(|plural| plural.starts_with(first) && plural.len() - first.len() < 2)
        {
            Some(plural) if *plural != first => return Err(format!("write hf://{plural}/{rest}")),
            Some(kind) => (*kind, rest),
            None => (MODELS, text),
        };
        let rest = rest.trim_end_matches('/');
        // An @ further on belongs to the name of a file.
        let stated = rest.split_once('@').filter(|(id, _)| id.matches('/').count() < 2);
        let (id, revision, path) = match stated {
            Some(_) if kind == BUCKETS => {
                return Err("a bucket of the Hub has no revisions; remove the part from the @ on".into());
            }
            Some((id, rest)) => {
                let (revision, path) = split_revision(rest);
                (id, Some(revision), path)
            }
            None => {
                let (id, path) = split_after(rest, 2);
                (id, None, path)
            }
        };
        let unnamed = || "this names no repository; write hf://owner/name, or hf://owner/name@revision/path".to_owned();
        let is_part = |part: &str| part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        let id = Name::parse(id).ok().filter(|id| id.parts().all(is_part)).ok_or_else(unnamed)?;
        if kind == BUCKETS && id.parts().count() != 2 {
            return Err("this names no bucket of the Hub; write hf://buckets/owner/name".into());
        }
        let decode = |revision: &str| Name::parse(&percent_decode_str(revision).decode_utf8().ok()?).ok();
        let invalid =
            |revision| format!("{revision:?} is not a revision; write a branch, a tag or a commit after the @");
        let revision = revision.map(|text| decode(text).ok_or_else(|| invalid(text))).transpose()?;
        if !path.is_empty() {
            Name::parse(path).map_err(|why| format!("{path:?} is not a path in a repository: {why}"))?;
        }
        Ok((Repository { kind, id, revision }, path.to_owned()))
    }

    pub fn is_bucket(&self) -> bool {
        self.kind == BUCKETS
    }

    /// Returns whether the Hub lists the files of a folder, and not all files in the description of the repository.
    pub fn has_lists(&self) -> bool {
        self.is_bucket() || self.kind == KERNELS
    }

    pub fn revision(&self) -> &str {
        self.revision.as_ref().map_or(DEFAULT_REVISION, Name::as_str)
    }

    /// Returns the repository at a commit.
    pub(super) fn at(&self, commit: &str) -> Repository {
        Repository { revision: Name::parse(commit).ok(), ..self.clone() }
    }

    /// Returns whether a path after the URL of this repository would be read as a part of its id.
    pub(super) fn needs_revision(&self) -> bool {
        self.revision.is_none() && self.id.parts().count() == 1
    }

    /// Returns the repository without an owner, and the path in it, for which the same URL may stand: `hf://name/path`.
    pub(super) fn without_owner(&self, path: &str) -> Option<(Repository, String)> {
        let (name, file) = self.id.as_str().split_once('/').filter(|_| !self.is_bucket() && self.revision.is_none())?;
        let path = if path.is_empty() { file.to_owned() } else { format!("{file}/{path}") };
        Some((Repository { id: Name::parse(name).ok()?, ..self.clone() }, path))
    }

    /// Returns the parts of the paths of the repository in the Hub's API.
    pub fn api(&self) -> impl Iterator<Item = &str> {
        ["api", self.kind].into_iter().chain(self.id.parts())
    }

    /// Returns the parts of the paths of the repository's files.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        let commit = Some(self.revision()).filter(|_| !self.is_bucket());
        let kind = Some(self.kind).filter(|kind| *kind != MODELS);
        kind.into_iter().chain(self.id.parts()).chain(["resolve"]).chain(commit)
    }

    /// Returns the name of the repository's folder in the Hub's cache on this machine.
    pub fn cache_folder(&self) -> String {
        [self.kind].into_iter().chain(self.id.parts()).collect::<Vec<_>>().join("--")
    }
}

/// Writes the repository as its URL does.
impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind != MODELS {
            write!(f, "{}/", self.kind)?;
        }
        f.write_str(self.id.as_str())?;
        // A slash would end the revision.
        self.revision
            .as_ref()
            .map_or(Ok(()), |revision| write!(f, "@{}", revision.as_str().replace('%', "%25").replace('/', "%2F")))
    }
}

/// Splits a text after `count` parts between slashes.
fn split_after(text: &str, count: usize) -> (&str, &str) {
    let slash = text.match_indices('/').nth(count.saturating_sub(1));
    slash.and_then(|(at, _)| Some((text.get(..at)?, text.get(at + 1..)?))).unwrap_or((text, ""))
}

/// Splits what follows the @ into the revision, in which a slash is written as %2F, and the path. `refs/pr/1` and
/// `refs/convert/parquet` may have slashes.
fn split_revision(text: &str) -> (&str, &str) {
    let (reference, path) = split_after(text, 3);
    let is_reference = match reference.split('/').collect::<Vec<_>>().as_slice() {
        ["refs", "pr", number] => !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()),
        ["refs", "convert", name] => !name.is_empty(),
        _ => false,
    };
    if is_reference { (reference, path) } else { split_after(text, 1) }
}
