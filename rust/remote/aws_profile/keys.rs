//! Access keys, and when they are renewed.

use super::files::Place;
use crate::error::Result;
use chrono::{DateTime, TimeDelta, Utc};
use object_store::HeaderValue;
use object_store::aws::AwsCredential;
use std::sync::Arc;

/// Remaining validity at which keys are renewed. The longest request that they sign is shorter.
const RENEWED_BEFORE: TimeDelta = TimeDelta::minutes(5);

pub(super) struct Keys {
    pub(super) credential: Arc<AwsCredential>,
    pub(super) expires: Option<DateTime<Utc>>,
}

impl Keys {
    pub(super) fn are_valid(&self, now: DateTime<Utc>) -> bool {
        self.expires.is_none_or(|expires| expires > now)
    }

    /// Returns when keys that are obtained or kept at `now` are to be renewed: five minutes before they expire, or after
    /// half of a remaining validity that is shorter than ten minutes. So a source that returns short-lived keys, or
    /// fails, is not asked for each request.
    pub(super) fn renewal(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let expires = self.expires?;
        let margin = RENEWED_BEFORE.min((expires - now) / 2);
        expires.checked_sub_signed(margin)
    }
}

/// Checks the id, the secret key and the session token that come from `key` at `place`.
///
/// # Errors
/// `invalid-argument` if a header of a request cannot hold them.
pub(super) fn checked(
    place: &Place,
    key: &str,
    (key_id, secret_key, token): (String, String, Option<String>),
) -> Result<AwsCredential> {
    let texts = [Some(&key_id), Some(&secret_key), token.as_ref()];
    if texts.into_iter().flatten().any(|text| text.is_empty() || HeaderValue::from_str(text).is_err()) {
        let message = "an access key or session token is empty, or has line breaks or other characters that are not \
                       printable ASCII; expected the text as AWS issued it";
        return Err(place.invalid(key, message));
    }
    Ok(AwsCredential { key_id, secret_key, token })
}

/// Parses a date as AWS programs write it: RFC 3339, with `UTC` for the `Z` in old caches of the CLI.
pub(super) fn parse_date(text: &str) -> Option<DateTime<Utc>> {
    let text = text.strip_suffix("UTC").map_or_else(|| text.to_owned(), |date| format!("{date}Z"));
    DateTime::parse_from_rfc3339(&text).ok().map(|date| date.to_utc())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(expires: Option<DateTime<Utc>>) -> Keys {
        let credential = AwsCredential { key_id: "a".into(), secret_key: "b".into(), token: None };
        Keys { credential: Arc::new(credential), expires }
    }

    #[test]
    fn keys_are_renewed_five_minutes_before_they_expire() {
        let now = parse_date("2026-01-01T00:00:00Z").unwrap();
        let after = |minutes| now + TimeDelta::minutes(minutes);
        assert_eq!(keys(None).renewal(now), None);
        assert_eq!(keys(Some(after(60))).renewal(now), Some(after(55)));
        assert_eq!(keys(Some(after(4))).renewal(now), Some(after(2)));
        assert!(keys(Some(after(4))).are_valid(after(3)));
        assert!(!keys(Some(after(4))).are_valid(after(4)));
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
}
