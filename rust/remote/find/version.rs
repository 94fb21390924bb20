//! Versions of objects.

use serde::{Deserialize, Serialize};

/// Version of an object, which tells one content from another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// Entity tag with its quotes, as the service states it.
    pub etag: Option<String>,
    /// Version id or generation.
    pub id: Option<String>,
    /// Time of the last change, as the service states it.
    pub modified: Option<String>,
}

impl Version {
    /// Returns whether every content has a version of its own. Two changes in one second have the same time.
    pub fn is_exact(&self) -> bool {
        self.id.is_some() || self.has_strong_etag()
    }

    /// Returns whether the entity tag tells every content from another.
    pub fn has_strong_etag(&self) -> bool {
        self.etag.as_ref().is_some_and(|etag| !etag.starts_with("W/"))
    }

    /// Returns whether an object of this version may have the content of `other`. What only one of them states is not
    /// compared.
    pub fn matches(&self, other: &Version) -> bool {
        let agree = |one: &Option<String>, two: &Option<String>| match (one, two) {
            (Some(one), Some(two)) => one == two,
            _ => true,
        };
        let is_same_kind = self.etag.is_some() == other.etag.is_some() && self.id.is_some() == other.id.is_some();
        is_same_kind
            && agree(&self.etag, &other.etag)
            // The same content may be stored again.
            && (self.has_strong_etag() || agree(&self.id, &other.id))
            // A tag says more than a time, which servers behind one name may state differently.
            && (self.etag.is_some() || self.id.is_some() || agree(&self.modified, &other.modified))
    }
}
