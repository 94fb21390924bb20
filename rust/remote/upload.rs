//! Uploads of new objects. An object appears with the last request, whole, or not at all.
//!
//! ```text
//! small object:  PUT
//! others:        begin, PUT part 0, PUT part 1, ... in any order and side by side, complete
//! ```
//!
//! A request is repeated like those of a load. An upload that is not completed is aborted, best effort: the service
//! would otherwise keep the parts, without a name, and charge for them.

use super::get::repeat;
use super::lane;
use super::location::{Location, Service};
use super::store::{Failure, FailureClass, Store};
use super::stores;
use super::streams::Host;
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::os::retry::Check;
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::TryFutureExt;
use std::collections::BTreeMap;
use std::future::Future;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// Smallest part, except for the last one, in bytes: that of S3.
pub const PART_BYTES_MIN: usize = 5 << 20;
/// Largest number of parts of an object: that of S3, and the smallest of all services.
pub const PARTS_MAX: usize = 10_000;
/// Number of parts of one size, if the length of the object is not known. Five sizes fit an upload, so that parts of 8
/// MiB at its beginning allow an object of 484 GiB.
const PARTS_PER_SIZE: usize = 2_000;
/// Size of parts is a multiple of this, in bytes.
const PART_ALIGNMENT: u64 = 4 << 10;
/// Interval at which the bytes that were sent are counted.
const COUNT_INTERVAL: Duration = Duration::from_millis(10);
/// Number of bytes that a connection takes before it sends them: the largest buffer that Linux gives it by itself
/// (`net.ipv4.tcp_wmem`).
const BUFFER_BYTES: u64 = 4 << 20;
/// Time for an abort.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for an abort after Ctrl-C.
const INTERRUPTED_ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Service that stores objects.
#[async_trait]
pub trait Uploads: Send + Sync {
    /// Stores an object in one request.
    async fn put(&self, key: &str, bytes: Bytes) -> std::result::Result<(), Failure>;
    /// Begins an upload in parts, of this length if it is known, and returns its id.
    async fn begin(&self, key: &str, length: Option<u64>) -> std::result::Result<String, Failure>;
    /// Sends a part, which begins at `offset`, and returns its id. A part that was sent before is replaced.
    async fn put_part(
        &self,
        key: &str,
        id: &str,
        index: usize,
        offset: u64,
        bytes: Bytes,
    ) -> std::result::Result<String, Failure>;
    /// Moves bytes that were sent towards the end, by at least their number. A service that puts the parts one after the
    /// other, whatever their offsets, does nothing.
    async fn shift(&self, _id: &str, _range: Range<u64>, _distance: u64) -> std::result::Result<(), Failure> {
        Ok(())
    }
    /// Stores the object that these parts make.
    async fn complete(&self, key: &str, id: &str, parts: &[String]) -> std::result::Result<(), Failure>;
    /// Drops the parts of an upload.
    async fn abort(&self, key: &str, id: &str) -> std::result::Result<(), Failure>;
    /// Removes an object. It need not exist.
    async fn remove(&self, key: &str) -> std::result::Result<(), Failure>;
    /// Says what becomes of parts that could not be removed.
    fn remains(&self) -> &'static str {
        "the service may charge for them: abort the multipart uploads of this object, or let a rule of the bucket do so"
    }
}

/// Sizes of the parts of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Size of the first parts, in bytes.
    bytes: usize,
    /// Number of parts after which the size doubles.
    per_size: usize,
}

impl Parts {
    /// Returns the parts of an object of this length. A part has at least `bytes_min` bytes, except for the last one.
    pub fn of_length(length: u64, bytes_min: usize) -> Parts {
        let bytes = length.div_ceil(to_u64(PARTS_MAX)).next_multiple_of(PART_ALIGNMENT);
        Parts { bytes: to_usize(bytes).max(first_part_bytes(bytes_min)), per_size: PARTS_MAX }
    }

    /// Returns the parts of an object of unknown length. The first ones have at least `bytes_min` bytes.
    pub fn growing(bytes_min: usize) -> Parts {
        Parts { bytes: first_part_bytes(bytes_min), per_size: PARTS_PER_SIZE }
    }

    /// Returns the size of the first parts, in bytes.
    pub fn first_bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the index and the size of the part that has the byte at `offset`, or `None` if no upload is this long.
    pub fn at(&self, offset: u64) -> Option<(usize, usize)> {
        let (mut begin, mut bytes) = (0_u64, self.bytes);
        for first in (0..PARTS_MAX).step_by(self.per_size) {
            let index = usize::try_from((offset - begin) / to_u64(bytes)).ok()?;
            if index < self.per_size {
                return Some((first + index, bytes));
            }
            begin = begin.checked_add(to_u64(bytes).checked_mul(to_u64(self.per_size))?)?;
            bytes = bytes.checked_mul(2)?;
        }
        None
    }
}

fn first_part_bytes(bytes_min: usize) -> usize {
    bytes_min.max(PART_BYTES_MIN).next_multiple_of(to_usize(PART_ALIGNMENT))
}

/// Object that is being stored. Dropping it before it is finished aborts the upload.
#[derive(Debug)]
pub struct Upload {
    /// URL, without what may be secret.
    path: PathBuf,
    url: String,
    store: Arc<dyn Store>,
    key: String,
    host: Arc<Host>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Id of the upload in parts, once it has begun and until it has ended.
    id: Option<String>,
    /// Ids of the parts that were sent, by their indices.
    parts: BTreeMap<usize, String>,
    /// All bytes of an object that is stored in one request.
    whole: Option<Bytes>,
}

impl Upload {
    /// Prepares an upload. Sends no request.
    ///
    /// # Errors
    /// `invalid-argument` if objects cannot be stored there, or for options or variables that do not fit.
    pub fn open(location: &Location) -> Result<Upload> {
        let url = location.to_string();
        let refused = |message: &str| Err(Error::new(Kind::InvalidArgument, message).at(&url));
        match location.service() {
            Service::Http => {
                return refused(
                    "a file cannot be saved to a web server; save it to s3://, gs://, az:// or a local path, and copy it \
                     to the server",
                );
            }
            Service::Hub => {
                return refused(
                    "a file cannot be saved to the Hub; save it to a local path, and upload it with `hf upload`",
                );
            }
            Service::S3 | Service::Gcs | Service::Azure | Service::Redis => {}
        }
        if location.file_name().is_empty() {
            return refused("the URL names no object; give one that ends in the name of a file");
        }
        let (store, key) = stores::store_of(location)?;
        let host = Host::of_uploads(location.host());
        Ok(Upload { path: PathBuf::from(&url), url, store, key, host, state: Mutex::default() })
    }

    /// Returns the URL without what may be secret, as a path for errors.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Begins an upload in parts, of this length if it is known. Otherwise, the object is stored in one request.
    ///
    /// # Errors
    /// Those of requests, with the URL; that of `check`.
    pub fn begin(&self, length: Option<u64>, check: Check<'_>) -> Result<()> {
        let uploads = self.uploads()?;
        let is_lost = AtomicBool::new(false);
        let begin = || {
            let note =
                |failure: &Failure| is_lost.fetch_or(failure.class == FailureClass::Transient, Ordering::Relaxed);
            uploads.begin(&self.key, length).inspect_err(move |failure| _ = note(failure))
        };
        let id = self.run(None, 0, check, begin);
        if is_lost.into_inner() {
            // Its id is unknown. A service that lists uploads does not say which process began them.
            let remains = uploads.remains();
            tracing::warn!(
                url = self.url,
                remains,
                "the first request was repeated, so another upload of this object may remain"
            );
        }
        self.lock().id = Some(id?);
        Ok(())
    }

    /// Sends the first `length` bytes of `memory`, which are a part and begin at `offset` of the object. Returns the
    /// memory unless the upload keeps it, which is so for an object that is stored in one request.
    ///
    /// # Errors
    /// Those of requests, with the URL and the byte; that of `check`.
    pub fn put<M>(&self, index: usize, offset: u64, memory: M, length: usize, check: Check<'_>) -> Result<Option<M>>
    where
        M: AsRef<[u8]> + Send + 'static,
    {
        let returned = Arc::new(Mutex::new(None));
        let bytes = Bytes::from_owner(Sent { memory: Some(memory), length, returned: Arc::clone(&returned) });
        let id = {
            let mut state = self.lock();
            let Some(id) = state.id.clone() else {
                state.whole = Some(bytes);
                return Ok(None);
            };
            id
        };
        let uploads = self.uploads()?;
        let put = || uploads.put_part(&self.key, &id, index, offset, bytes.clone());
        let sent = self.run(Some(offset), length, check, put)?;
        self.lock().parts.insert(index, sent);
        drop(bytes);
        Ok(returned.lock().unwrap_or_else(PoisonError::into_inner).take())
    }

    /// Moves `length` bytes of parts that were sent, from `begin` on, by `distance` bytes towards the end.
    ///
    /// # Errors
    /// Those of requests, with the URL and the byte; that of `check`.
    pub fn shift(&self, begin: u64, length: u64, distance: u64, check: Check<'_>) -> Result<()> {
        let (uploads, id) = (self.uploads()?, self.lock().id.clone());
        let mut end = begin.saturating_add(length);
        while let Some(id) = id.as_deref().filter(|_| begin < end) {
            // From the end on, and not onto themselves, so that a piece can be moved again.
            let piece = begin.max(end.saturating_sub(distance))..end;
            end = piece.start;
            self.run(Some(piece.start), to_usize(distance), check, || uploads.shift(id, piece.clone(), distance))?;
        }
        Ok(())
    }

    /// Sends the last request, with which the object appears and replaces an older one.
    ///
    /// # Errors
    /// Those of requests, with the URL, after which an older object is unchanged unless the message says otherwise; that
    /// of `check`.
    pub fn finish(&self, check: Check<'_>) -> Result<()> {
        let uploads = self.uploads()?;
        let (id, parts, whole) = {
            let mut state = self.lock();
            (state.id.clone(), state.parts.values().cloned().collect::<Vec<_>>(), state.whole.take())
        };
        let Some(id) = id else {
            let bytes = whole.unwrap_or_default();
            return self.run(Some(0), bytes.len(), check, || uploads.put(&self.key, bytes.clone()));
        };
        self.run(None, 0, check, || uploads.complete(&self.key, &id, &parts)).map_err(|error| {
            let message = "the service no longer knows the upload, so an answer to the last request may have been lost; \
                           the new object may have replaced the old one: compare them, or save again";
            match error.kind() {
                Kind::FileNotFound => Error::new(Kind::Io, message).at(&self.path),
                _ => error,
            }
        })?;
        self.lock().id = None;
        Ok(())
    }

    /// Aborts the upload because of an error, and returns the error, which says so if the abort failed.
    pub fn abandon(&self, error: Error) -> Error {
        let limit = if error.kind() == Kind::Interrupted { INTERRUPTED_ABORT_TIMEOUT } else { ABORT_TIMEOUT };
        match self.abort(limit) {
            Ok(()) => error,
            Err(failure) => {
                let remains = self.uploads().map_or("", |uploads| uploads.remains());
                error.note(&format!("the parts that were sent could not be removed either ({failure}); {remains}"))
            }
        }
    }

    fn abort(&self, limit: Duration) -> Result<()> {
        let Some(id) = ({
            let mut state = self.lock();
            state.whole = None;
            state.id.take()
        }) else {
            return Ok(());
        };
        let end = Instant::now() + limit;
        let check: Check<'_> = &|| match Instant::now() < end {
            true => Ok(()),
            false => Err(Error::new(Kind::Io, format!("no answer in {} s", limit.as_secs()))),
        };
        let uploads = self.uploads()?;
        match self.run(None, 0, check, || uploads.abort(&self.key, &id)) {
            // Another program has aborted it.
            Err(error) if error.kind() == Kind::FileNotFound => Ok(()),
            result => result,
        }
    }

    /// Runs a request, and repeats it after failures that may pass.
    fn run<T: Send, F>(
        &self,
        offset: Option<u64>,
        bytes: usize,
        check: Check<'_>,
        request: impl Fn() -> F + Send + Sync,
    ) -> Result<T>
    where
        F: Future<Output = std::result::Result<T, Failure>> + Send,
    {
        let turn = self.host.wait(check)?;
        let attempt = || async {
            let mut request = pin!(request());
            // The last bytes that the connection has taken may not have left its buffer.
            let mut buffered = 0;
            loop {
                let ended = timeout(COUNT_INTERVAL, &mut request).await;
                buffered += lane::take_sent();
                let left = if ended.is_ok() { 0 } else { buffered.min(BUFFER_BYTES) };
                if buffered > left {
                    turn.received(buffered - left);
                    buffered = left;
                }
                if let Ok(result) = ended {
                    // The server may have answered before it read the body, which the connection then still holds.
                    return result.inspect_err(|_| lane::discard());
                }
            }
        };
        lane::block_on(check, repeat(&self.url, &self.host, offset, bytes, attempt))
    }

    fn uploads(&self) -> Result<&dyn Uploads> {
        self.store.uploads().ok_or_else(|| Error::new(Kind::Internal, "the store takes no objects").at(&self.path))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let Err(failure) = self.abort(ABORT_TIMEOUT) {
            let remains = self.uploads().map_or("", |uploads| uploads.remains());
            tracing::warn!(url = self.url, %failure, remains, "the parts of an upload could not be removed");
        }
    }
}

/// Memory whose first bytes are being sent. It is returned once no connection needs it any more.
struct Sent<M> {
    memory: Option<M>,
    length: usize,
    returned: Arc<Mutex<Option<M>>>,
}

impl<M: AsRef<[u8]>> AsRef<[u8]> for Sent<M> {
    fn as_ref(&self) -> &[u8] {
        self.memory.as_ref().and_then(|memory| memory.as_ref().get(..self.length)).unwrap_or_default()
    }
}

impl<M> Drop for Sent<M> {
    fn drop(&mut self) {
        *self.returned.lock().unwrap_or_else(PoisonError::into_inner) = self.memory.take();
    }
}

/// Returns the names of the objects beside an object.
///
/// # Errors
/// Those of requests, with the URL; that of `check`.
pub fn names_beside(location: &Location, check: Check<'_>) -> Result<Vec<String>> {
    let upload = Upload::open(location)?;
    let directory = upload.key.rsplit_once('/').map_or("", |(directory, _)| directory);
    let keys = upload.run(None, 0, check, || upload.store.list(directory))?.unwrap_or_default();
    Ok(keys.iter().map(|key| key.rsplit('/').next().unwrap_or_default().to_owned()).collect())
}

/// Removes an object. It need not exist.
///
/// # Errors
/// Those of requests, with the URL; that of `check`.
pub fn remove(location: &Location, check: Check<'_>) -> Result<()> {
    let upload = Upload::open(location)?;
    let uploads = upload.uploads()?;
    upload.run(None, 0, check, || uploads.remove(&upload.key))
}

pub(super) fn not_found() -> Failure {
    let message = "the service has no such bucket, or no longer has the upload (status 404); check the bucket";
    Failure::new(FailureClass::NotFound, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn parts_of_any_length_fit_an_upload() {
        for length in [1, MIB, 100 * MIB, 80_000 * MIB, 80_001 * MIB, 5_000_000 * MIB] {
            let parts = Parts::of_length(length, 8 << 20);
            let (last, bytes) = parts.at(length - 1).unwrap();
            assert!(last < PARTS_MAX && bytes >= 8 << 20, "{length}: {last}, {bytes}");
            assert_eq!(bytes, parts.first_bytes());
        }
        assert_eq!(Parts::of_length(100 * MIB, 1).first_bytes(), PART_BYTES_MIN);
    }

    #[test]
    fn growing_parts_are_contiguous_and_end() {
        let parts = Parts::growing(8 << 20);
        let mut offset = 0;
        for index in 0..PARTS_MAX {
            let (found, bytes) = parts.at(offset).unwrap();
            assert_eq!(found, index);
            assert_eq!(parts.at(offset + to_u64(bytes) - 1), Some((found, bytes)));
            offset += to_u64(bytes);
        }
        assert_eq!((offset, parts.at(offset)), (2_000 * 31 * 8 * MIB, None));
    }
}
