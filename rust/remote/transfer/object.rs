//! Open objects.

use super::cache::{self, Cache, Copy, Part};
use super::concurrency::{Host, Permit};
use super::first_bytes::{FirstBytes, Received};
use super::get::Target;
use super::limits::{FIRST_BYTES, GAP_BYTES};
use super::pieces::Pieces;
use super::runtime::{self, Runtime};
use crate::error::{Error, Kind, Result};
use crate::num::{to_u64, to_usize};
use crate::os::local_file::LocalFile;
use crate::os::memory;
use crate::os::retry::Check;
use crate::profile::{self, Count};
use crate::remote::find::location::Location;
use crate::remote::find::version::Version;
use crate::remote::stores::registry;
use crate::remote::stores::{Answer, Store};
use futures_util::{StreamExt, TryStreamExt, stream};
use std::fs::File;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::time::Instant;

/// Number of ranges of one call that are requested at once. Other threads request as much at the same time.
const REQUESTS_PER_PERMIT: usize = 4;

/// Opens an object: requests its first `first_bytes` bytes, and with them its length and version.
pub fn open(location: &Location, first_bytes: u64, check: Check<'_>) -> Result<Object> {
    let cache = Cache::from_env()?;
    Object::open(address(location, cache.as_ref())?, first_bytes, check)
}

/// Opens an object whose length, version and first bytes another process has requested. No request is sent.
pub fn open_known(location: &Location, length: u64, version: Version, first_bytes: Vec<u8>) -> Result<Object> {
    let cache = Cache::from_env()?;
    Ok(Object::known(address(location, cache.as_ref())?, length, version, first_bytes))
}

struct Address<'a> {
    location: &'a Location,
    store: Arc<dyn Store>,
    key: String,
    cache: Option<&'a Cache>,
    /// Name of the object in the cache.
    name: String,
}

fn address<'a>(location: &'a Location, cache: Option<&'a Cache>) -> Result<Address<'a>> {
    let (store, key) = registry::store_of(location)?;
    let name = cache.map(|_| cache::name_of(location, &registry::endpoints(location))).unwrap_or_default();
    Ok(Address { location, store, key, cache, name })
}

/// Object of one version. Every request for its bytes asks for that version.
#[derive(Debug)]
pub struct Object {
    location: Location,
    /// URL, without what may be secret.
    path: PathBuf,
    url: String,
    store: Arc<dyn Store>,
    key: String,
    host: Arc<Host>,
    length: u64,
    version: Version,
    /// The bytes that the first request brings. They are not requested again.
    first_bytes: FirstBytes,
    copy: Option<Copy>,
}

impl Object {
    fn open(address: Address<'_>, first_bytes: u64, check: Check<'_>) -> Result<Object> {
        if let Some(cache) = address.cache.filter(|cache| cache.has_whole(&address.name)) {
            // One byte tells whether the copy has the version of the object.
            let probe = Object::request(&address, 1, check)?;
            if let copy @ Some(Copy::Whole(_)) = probe.open_copy(cache, &address.name) {
                profile::count(Count::CacheHits, 1);
                return Ok(Object { copy, first_bytes: FirstBytes::new(Received::default()), ..probe });
            }
        }
        Ok(Object::request(&address, first_bytes, check)?.with_copy(&address))
    }

    fn request(address: &Address<'_>, bytes_max: u64, check: Check<'_>) -> Result<Object> {
        let unopened = Object::without_first_bytes(address, 0, Version::default());
        let permit = unopened.host.wait(check)?;
        let target = unopened.target(&permit);
        // The next objects of many need the connections of the first ones, and the cache keeps whole requests.
        let is_received_later = bytes_max == FIRST_BYTES && address.cache.is_none();
        let request = async {
            let begin = Instant::now();
            let (Answer { version, range, body, .. }, length) = target.first(bytes_max).await?;
            target.permit.host().opened(begin.elapsed());
            let mut arrived = Received::begin(body, range.end, begin.elapsed());
            arrived.receive(if is_received_later { 0 } else { range.end }, &target).await?;
            Ok((length, version, arrived))
        };
        let (runtime, answered) = Runtime::take()?.run(check, request);
        let (length, version, arrived) = match answered {
            Ok((length, version, arrived)) => (length, version, arrived.with_runtime(runtime)),
            Err(error) => {
                runtime.into_iter().for_each(Runtime::free);
                return Err(error);
            }
        };
        drop(permit);
        if !version.is_exact() {
            let url = &unopened.url;
            tracing::warn!(url, ?version, length, "the server states no exact version; a change may go unnoticed");
        }
        Ok(Object { length, version, first_bytes: FirstBytes::new(arrived), ..unopened })
    }

    fn known(address: Address<'_>, length: u64, version: Version, first_bytes: Vec<u8>) -> Object {
        let first_bytes = FirstBytes::new(Received::all(first_bytes));
        Object { first_bytes, ..Object::without_first_bytes(&address, length, version) }.with_copy(&address)
    }

    /// Opens the copy on a local disk, and adds the first bytes to it.
    fn with_copy(self, address: &Address<'_>) -> Object {
        let copy = address.cache.and_then(|cache| self.open_copy(cache, &address.name));
        if let Some((Copy::Part(part), arrived)) = copy.as_ref().zip(self.first_bytes.try_lock()) {
            cache::add(part, 0..to_u64(arrived.bytes().len()), std::iter::once(arrived.bytes()));
        }
        Object { copy, ..self }
    }

    fn without_first_bytes(address: &Address<'_>, length: u64, version: Version) -> Object {
        let Address { location, store, key, .. } = address;
        let url = location.to_string();
        Object {
            location: Location::clone(location),
            path: PathBuf::from(&url),
            url,
            store: Arc::clone(store),
            key: key.clone(),
            host: Host::of(location.host()),
            length,
            version,
            first_bytes: FirstBytes::new(Received::default()),
            copy: None,
        }
    }

    fn open_copy(&self, cache: &Cache, name: &str) -> Option<Copy> {
        cache.open(&self.location, name, self.length, &self.version)
    }

    fn target<'a>(&'a self, permit: &'a Permit<'a>) -> Target<'a> {
        Target { store: &*self.store, key: &self.key, url: &self.url, permit }
    }

    /// Returns the location.
    pub fn location(&self) -> &Location {
        &self.location
    }

    /// Returns the URL without what may be secret, as a path for errors.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Returns how many requests the host gets at once at the beginning.
    pub fn requests_at_start(&self) -> usize {
        self.host.start()
    }

    /// Returns the SHA-256 of the object in hexadecimal numbers, if the Hugging Face Hub states it: the entity tag of its
    /// large files in repositories.
    pub fn hub_sha256(&self) -> Option<&str> {
        let etag = self.version.etag.as_deref().filter(|_| self.location.is_at_revision())?;
        Some(etag.trim_matches('"'))
    }

    /// Returns the version.
    pub fn version(&self) -> &Version {
        &self.version
    }

    /// Returns the bytes that the first request brings, once they have arrived.
    pub fn first_bytes(&self, check: Check<'_>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; to_usize(self.first_bytes.length())];
        self.read([(0, bytes.as_mut_slice())], check)?;
        Ok(bytes)
    }

    /// Returns the copy on a local disk, if it has all bytes.
    pub fn copy(&self) -> Option<&Arc<LocalFile>> {
        match &self.copy {
            Some(Copy::Whole(file)) => Some(file),
            Some(Copy::Part(_)) | None => None,
        }
    }

    /// Returns the file of the copy on a local disk, even if the copy lacks some bytes.
    pub fn copy_file(&self) -> Option<&File> {
        match self.copy.as_ref()? {
            Copy::Whole(file) => Some(&file.file),
            Copy::Part(part) => Some(part.file()),
        }
    }

    /// Fills each buffer with the bytes from its offset. The buffers are in the order of the object; those with short
    /// gaps between them share a request, and several requests are sent at the same time. Fails with `source-changed`
    /// if the object has another version now; `io`, `file-not-found` or `permission-denied`, with the URL and the byte.
    pub fn read<'a>(&self, reads: impl IntoIterator<Item = (u64, &'a mut [u8])>, check: Check<'_>) -> Result<()> {
        self.read_joined(reads, GAP_BYTES, check)
    }

    /// Does what [`read`](Object::read) does. Buffers with at most `gap_bytes` bytes between them share a request.
    pub fn read_joined<'a>(
        &self,
        reads: impl IntoIterator<Item = (u64, &'a mut [u8])>,
        gap_bytes: u64,
        check: Check<'_>,
    ) -> Result<()> {
        let (mut from_first_bytes, mut missing) = (Vec::new(), Vec::new());
        for (offset, into) in reads {
            let end = offset.saturating_add(to_u64(into.len()));
            if end > self.length {
                let message = format!("the object has {} bytes, but the load needs {end}", self.length);
                return Err(Error::new(Kind::Io, message).at(&self.path).offset(self.length));
            }
            if self.copy.is_some() {
                memory::populate(into);
            }
            if let Some(file) = self.copy() {
                file.read(offset, into, check)?;
                continue;
            }
            let first = to_usize(self.first_bytes.length().saturating_sub(offset)).min(into.len());
            let (first, rest) = into.split_at_mut(first);
            let begin = offset.saturating_add(to_u64(first.len()));
            if !first.is_empty() {
                from_first_bytes.push((offset, first));
            }
            match self.part() {
                Some(part) => missing.extend(part.read(begin, rest)),
                None => missing.push((begin, rest)),
            }
        }
        if from_first_bytes.is_empty() {
            return self.request_all(missing, gap_bytes, check);
        }
        self.read_first_bytes(from_first_bytes, missing, gap_bytes, check)
    }

    /// Fills buffers with bytes of the first request, and requests the other bytes.
    fn read_first_bytes<'a>(
        &self,
        from_first_bytes: Vec<(u64, &'a mut [u8])>,
        mut others: Vec<(u64, &'a mut [u8])>,
        gap_bytes: u64,
        check: Check<'_>,
    ) -> Result<()> {
        let Some(mut arrived) = self.first_bytes.try_lock() else {
            self.request_all(others, gap_bytes, check)?;
            runtime::block_on(check, async {
                self.first_bytes.wait().await;
                Ok(())
            })?;
            return self.read_first_bytes(from_first_bytes, Vec::new(), gap_bytes, check);
        };
        let mut missing = arrived.copy(from_first_bytes);
        if let Some((last, into)) = missing.last().filter(|_| arrived.has_rest()) {
            let end = last.saturating_add(to_u64(into.len()));
            let permit = self.host.wait(check)?;
            let requests = self.send(std::mem::take(&mut others), gap_bytes, &permit);
            arrived.receive_before(end, &self.target(&permit), check, requests)?;
            missing = arrived.copy(missing);
        }
        drop(arrived);
        // The answer has failed, or it belongs to the parent process.
        missing.append(&mut others);
        self.request_all(missing, gap_bytes, check)
    }

    /// Requests the bytes of buffers in ascending order.
    fn request_all(&self, buffers: Vec<(u64, &mut [u8])>, gap_bytes: u64, check: Check<'_>) -> Result<()> {
        if buffers.iter().all(|(_, into)| into.is_empty()) {
            return Ok(());
        }
        let permit = self.host.wait(check)?;
        runtime::block_on(check, self.send(buffers, gap_bytes, &permit))
    }

    fn send<'a>(
        &'a self,
        buffers: Vec<(u64, &'a mut [u8])>,
        gap_bytes: u64,
        permit: &'a Permit<'a>,
    ) -> impl Future<Output = Result<()>> + Send + 'a {
        let requests = Pieces::join(buffers.into_iter(), gap_bytes);
        let all = stream::iter(requests).map(|pieces| self.request_pieces(permit, pieces));
        all.buffer_unordered(REQUESTS_PER_PERMIT).try_collect::<()>()
    }

    async fn request_pieces(&self, permit: &Permit<'_>, pieces: Pieces<'_>) -> Result<()> {
        let mut pieces = if self.part().is_some() { pieces.with_gaps() } else { pieces };
        self.target(permit).fill(&mut pieces, self.length, &self.version).await?;
        if let Some(part) = self.part() {
            cache::add(part, pieces.range(), pieces.parts());
        }
        Ok(())
    }

    /// Returns the copy on a local disk that lacks some bytes.
    fn part(&self) -> Option<&Arc<Part>> {
        match &self.copy {
            Some(Copy::Part(part)) => Some(part),
            Some(Copy::Whole(_)) | None => None,
        }
    }
}
