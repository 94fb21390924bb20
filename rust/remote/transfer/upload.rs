//! Uploads of new objects. An object appears with the last request, whole, or not at all.
//!
//! ```text
//! small object:  PUT
//! others:        begin, PUT part 0, PUT part 1, ... in any order and side by side, complete
//! ```
//!
//! A request is repeated like requests of a load. An upload that is not completed is aborted, best effort: the service
//! would otherwise keep the parts, without a name, and charge for them.

use super::concurrency::Host;
use super::retry::repeat;
use super::runtime;
use crate::error::{Error, Kind, Result};
use crate::num::to_usize;
use crate::os::mutex::Mutex;
use crate::os::retry::Check;
use crate::remote::find::location::{Location, Service};
use crate::remote::stores::registry;
use crate::remote::stores::{Attempt, Failure, FailureClass, Store, Uploads};
use bytes::Bytes;
use futures_util::TryFutureExt;
use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// Interval at which the bytes that were sent are counted.
const COUNT_INTERVAL: Duration = Duration::from_millis(10);
/// Number of bytes that a connection takes before it sends them: the largest buffer that Linux gives it by itself
/// (`net.ipv4.tcp_wmem`).
const BUFFER_BYTES: u64 = 4 << 20;
/// Time for an abort.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for an abort after Ctrl-C.
const INTERRUPTED_ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Object that is being stored. Dropping it before it is finished aborts the upload, unless another process began it.
#[derive(Debug)]
pub struct Upload {
    /// URL, without what may be secret.
    path: PathBuf,
    url: String,
    store: Arc<dyn Store>,
    key: String,
    host: Arc<Host>,
    /// Whether another process ends the upload.
    is_shared: bool,
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
    /// Prepares an upload. Sends no request. Fails with `invalid-argument` if objects cannot be stored there, or for
    /// options or variables that do not fit.
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
        let (store, key) = registry::store_of(location)?;
        let host = Host::of_uploads(location.host());
        Ok(Upload { path: PathBuf::from(&url), url, store, key, host, is_shared: false, state: Mutex::default() })
    }

    /// Begins an upload in parts that several processes send, and returns its id. One of them ends the upload.
    pub fn begin_shared(location: &Location, length: u64, check: Check<'_>) -> Result<String> {
        let upload = Upload::open(location)?;
        upload.begin(Some(length), check)?;
        Ok(upload.state.lock().id.take().unwrap_or_default())
    }

    /// Joins an upload that [`begin_shared`](Upload::begin_shared) began, in this process or another.
    pub fn join(location: &Location, id: String) -> Result<Upload> {
        let mut upload = Upload::open(location)?;
        upload.is_shared = true;
        upload.state.lock().id = Some(id);
        Ok(upload)
    }

    /// Returns the indices and the ids of the parts that this process has sent.
    pub fn sent_parts(&self) -> Vec<(usize, String)> {
        self.state.lock().parts.iter().map(|(&index, id)| (index, id.clone())).collect()
    }

    /// Ends a shared upload with the parts of all processes, so that the object appears and replaces an older one.
    pub fn finish_shared(location: &Location, id: String, parts: Vec<(usize, String)>, check: Check<'_>) -> Result<()> {
        let upload = Upload::join(location, id)?;
        upload.state.lock().parts = parts.into_iter().collect();
        upload.finish(check)
    }

    /// Aborts a shared upload. The service may no longer know it.
    pub fn abort_shared(location: &Location, id: String) -> Result<()> {
        let upload = Upload::open(location)?;
        upload.state.lock().id = Some(id);
        upload.abort(ABORT_TIMEOUT)
    }

    /// Returns the URL without what may be secret, as a path for errors.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Begins an upload in parts, of this length if it is known. Otherwise, the object is stored in one request.
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
        self.state.lock().id = Some(id?);
        Ok(())
    }

    /// Sends the first `length` bytes of `memory`, which are a part and begin at `offset` of the object. Returns the
    /// memory unless the upload keeps it, which is so for an object that is stored in one request.
    pub fn put<M>(&self, index: usize, offset: u64, memory: M, length: usize, check: Check<'_>) -> Result<Option<M>>
    where
        M: AsRef<[u8]> + Send + 'static,
    {
        let returned = Arc::new(Mutex::new(None));
        let bytes = Bytes::from_owner(Sent { memory: Some(memory), length, returned: Arc::clone(&returned) });
        let id = {
            let mut state = self.state.lock();
            let Some(id) = state.id.clone() else {
                state.whole = Some(bytes);
                return Ok(None);
            };
            id
        };
        let uploads = self.uploads()?;
        let put = || uploads.put_part(&self.key, &id, index, offset, bytes.clone());
        let sent = self.run(Some(offset), length, check, put)?;
        self.state.lock().parts.insert(index, sent);
        drop(bytes);
        Ok(returned.lock().take())
    }

    /// Moves `length` bytes of parts that were sent, from `begin` on, by `distance` bytes towards the end.
    pub fn shift(&self, begin: u64, length: u64, distance: u64, check: Check<'_>) -> Result<()> {
        let (uploads, id) = (self.uploads()?, self.state.lock().id.clone());
        let mut end = begin.saturating_add(length);
        while let Some(id) = id.as_deref().filter(|_| begin < end) {
            // From the end on, and not onto themselves, so that a piece can be moved again.
            let piece = begin.max(end.saturating_sub(distance))..end;
            end = piece.start;
            self.run(Some(piece.start), to_usize(distance), check, || uploads.shift(id, piece.clone(), distance))?;
        }
        Ok(())
    }

    /// Sends the last request, with which the object appears and replaces an older one. Fails with the errors of
    /// requests, with the URL, after which an older object is unchanged unless the message says otherwise; the error of
    /// `check`.
    pub fn finish(&self, check: Check<'_>) -> Result<()> {
        let uploads = self.uploads()?;
        let (id, parts, whole) = {
            let mut state = self.state.lock();
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
        self.state.lock().id = None;
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
        if self.is_shared {
            return Ok(());
        }
        let Some(id) = ({
            let mut state = self.state.lock();
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
        F: Future<Output = Attempt<T>> + Send,
    {
        let permit = self.host.wait(check)?;
        let attempt = || async {
            let mut request = pin!(request());
            // The last bytes that the connection has taken may not have left its buffer.
            let mut buffered = 0;
            loop {
                let ended = timeout(COUNT_INTERVAL, &mut request).await;
                buffered += runtime::take_sent();
                let left = if ended.is_ok() { 0 } else { buffered.min(BUFFER_BYTES) };
                if buffered > left {
                    permit.received(buffered - left);
                    buffered = left;
                }
                if let Ok(result) = ended {
                    // The server may have answered before it read the body, which the connection then still holds.
                    return result.inspect_err(|_| runtime::discard());
                }
            }
        };
        runtime::block_on(check, repeat(&self.url, &self.host, offset, bytes, attempt))
    }

    fn uploads(&self) -> Result<&dyn Uploads> {
        self.store.uploads().ok_or_else(|| Error::new(Kind::Internal, "the store takes no objects").at(&self.path))
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
        *self.returned.lock() = self.memory.take();
    }
}

/// Returns the names of the objects beside an object.
pub fn names_beside(location: &Location, check: Check<'_>) -> Result<Vec<String>> {
    let upload = Upload::open(location)?;
    let directory = upload.key.rfind('/').and_then(|slash| upload.key.get(..=slash)).unwrap_or_default();
    let names = upload.run(None, 0, check, || upload.store.list(directory))?.unwrap_or_default();
    Ok(names.iter().map(|name| name.as_str().to_owned()).collect())
}

/// Removes an object. It need not exist.
pub fn remove(location: &Location, check: Check<'_>) -> Result<()> {
    let upload = Upload::open(location)?;
    let uploads = upload.uploads()?;
    upload.run(None, 0, check, || uploads.remove(&upload.key))
}
