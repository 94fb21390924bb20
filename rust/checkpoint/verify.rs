//! Digests with which a load compares the data of a checkpoint: those that the files carry, or those of a manifest.

use super::region::TensorRegion;
use super::tensor_headers::{self, TensorHash};
use super::{Checkpoint, OpenFile};
use crate::digest::groups::Groups;
use crate::digest::manifest::{MANIFEST_BYTES_MAX, Manifest};
use crate::digest::{Algorithm, Digest, InputDigest};
use crate::error::{Error, Kind, Result};
use crate::format::digests::{DIGESTS_KEY, Digests};
use crate::format::encryption;
use crate::format::header::Header;
use crate::format::tensors;
use crate::num::{to_u64, to_usize};
use crate::os::retry::Check;
use crate::os::sigint::Watch;
use crate::remote::location::is_url;
use crate::signature::certificate::Certificate;
use crate::signature::statement::Statement;
use crate::signature::{self, Signed, Trust};
use crate::source::directory::FILE_SUFFIX;
use crate::source::files::{Files, Listing, absolute, parent_of, place_of};
use crate::source::{Place, Protection, Source, UnitSource};
use serde::Deserialize;
use std::collections::HashSet;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zeroize::Zeroizing;

/// Origin of the digests of the Hugging Face Hub, for errors.
const HUB: &str = "the Hugging Face Hub";
/// Directory of the files in the Hub's cache, which have their SHA-256 as names. Snapshots link to them.
const HUB_BLOBS: &str = "blobs";

/// Maximum number of tensors that an error names.
const NAMES_MAX: usize = 20;

/// Request to verify the data of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Digests to compare.
    pub verify: Verify,
    /// Loads of tensors and parts of tensors that the digests do not cover.
    pub partial: Partial,
}

/// Loads of tensors and parts of tensors that no digest covers, although the data is to be verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Partial {
    /// Such a load is an error.
    #[default]
    Raise,
    /// Such a load returns data that was not compared.
    Allow,
}

impl Request {
    /// Reads a request: a text of [`Verify::read`], or one in a JSON object that says what partial loads do:
    /// `{"verify": {"source": "digests", "partial": "allow"}}`.
    ///
    /// # Errors
    /// Those of [`Verify::read`]; `invalid-argument`.
    pub fn read(text: &str) -> Result<Request> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Text {
            verify: Fields,
        }
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Fields {
            source: String,
            partial: Partial,
        }
        if !begins_with_object(text, "verify") {
            return Ok(Request { verify: Verify::read(text)?, partial: Partial::default() });
        }
        let Text { verify: Fields { source, partial } } = parse_request(text)?;
        Ok(Request { verify: Verify::read(&source)?, partial })
    }
}

/// Returns whether a text is a JSON object whose first value is an object with this key. No manifest has such a value.
fn begins_with_object(text: &str, key: &str) -> bool {
    let value = text.strip_prefix('{').and_then(|text| text.trim_start().strip_prefix(&format!("{key:?}")));
    let value = value.and_then(|text| text.trim_start().strip_prefix(':'));
    value.is_some_and(|value| value.trim_start().starts_with('{'))
}

fn parse_request<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T> {
    let invalid = |error| Error::new(Kind::InvalidArgument, format!("the request to verify is not valid: {error}"));
    serde_json::from_str(text).map_err(invalid)
}

/// Digests with which the data of a checkpoint is compared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Data are not verified.
    #[default]
    Nothing,
    /// With the digests that every file carries, or that the Hugging Face Hub states of it.
    Digests,
    /// With the digests of whole files.
    Manifest(Manifest),
}

impl Verify {
    /// Reads a text: nothing, `digests`, a manifest or a [`SignatureRequest`] in JSON, or the path or URL of a manifest.
    ///
    /// # Errors
    /// Those of [`Manifest::parse`] and of opening the manifest; those of [`SignatureRequest`].
    pub fn read(text: &str) -> Result<Verify> {
        Ok(match text {
            "" => Verify::Nothing,
            "digests" => Verify::Digests,
            _ => match SignatureRequest::parse(text)? {
                Some(request) => Verify::Manifest(request.verify()?.manifest),
                None if text.starts_with('{') => Verify::Manifest(Manifest::parse(text.as_bytes())?),
                None => Verify::Manifest(read_manifest(Path::new(text))?),
            },
        })
    }

    /// Resolves paths to files. With a manifest, no index or directory can leave out files that it lists.
    ///
    /// # Errors
    /// Those of [`Files::resolve`]; `integrity` if an index differs from its digest, or files are missing.
    pub fn resolve<P: AsRef<Path>>(&self, paths: &[P], check: Check<'_>) -> Result<Files> {
        match self {
            Verify::Nothing | Verify::Digests => Files::resolve(paths, check),
            Verify::Manifest(manifest) => resolve_listed(paths, manifest, check),
        }
    }

    /// Returns the digests that the data of a file with this header must have.
    pub(super) fn stated(&self, source: &Source, header: &Header, json: &[u8]) -> Result<Stated> {
        match self {
            Verify::Nothing => Ok(Stated::Nothing),
            // It needs a key, not digests.
            Verify::Digests if encryption::is_encrypted(header) => Ok(Stated::Nothing),
            Verify::Digests if json.starts_with(tensors::MAGIC) => {
                Ok(Stated::Hashes(tensor_headers::hashes(source, header).map_err(|error| error.at(source.path()))?))
            }
            Verify::Digests => {
                if let Some(digest) = hub_digest(source, header) {
                    return Ok(Stated::of_file(digest, header, json, HUB));
                }
                let digests = Digests::read(header, json).map_err(|error| error.at(source.path()))?;
                let grouped = |groups: &Arc<Groups>| {
                    let protection = Protection::Hashed(Arc::clone(groups));
                    Source::Units(Arc::new(UnitSource { stored: source.clone(), protection }))
                };
                let grouped = digests.groups().map(grouped);
                Ok(Stated::Tensors(digests, grouped))
            }
            Verify::Manifest(manifest) => {
                Ok(Stated::of_file(digest_of(source, manifest)?, header, json, manifest.origin()))
            }
        }
    }
}

/// Returns the SHA-256 that the Hugging Face Hub states of a file without digests: in the entity tag of an object, or the
/// name that the file has in the Hub's cache.
fn hub_digest(source: &Source, header: &Header) -> Option<InputDigest> {
    if header.metadata().is_some_and(|metadata| metadata.contains_key(DIGESTS_KEY)) {
        return None;
    }
    let digest = |hex: &str| Digest::from_hex(Algorithm::Sha256, hex).map(InputDigest::from);
    match source {
        Source::Object(object) => digest(object.hub_sha256()?),
        Source::File(file) => {
            let blob = fs::canonicalize(&file.path).ok()?;
            let is_cached = blob.parent().and_then(Path::file_name).is_some_and(|directory| directory == HUB_BLOBS);
            digest(blob.file_name()?.to_str().filter(|_| is_cached)?)
        }
        Source::Units(_) => None,
    }
}

/// Returns the digest of a file in a manifest.
///
/// # Errors
/// `integrity` if the manifest has none, or one of a file of another length.
pub(crate) fn digest_of(source: &Source, manifest: &Manifest) -> Result<InputDigest> {
    let missing = || Error::new(Kind::Integrity, manifest.missing()).at(source.path());
    let digest = manifest.find(&absolute_of(source.path())).ok_or_else(missing)?.clone();
    check_length(&digest, source.path(), source.length(), manifest.origin())?;
    Ok(digest)
}

/// Returns a URL, or the absolute path of a local file. The name in a manifest may contain directories that a relative
/// path lacks.
fn absolute_of(path: &Path) -> String {
    if is_url(path) { path.to_string_lossy().into_owned() } else { absolute(path) }
}

/// Resolves paths to files that are to be compared with a manifest, and compares index files that it lists.
///
/// A directory, or an index without a digest, must not leave out files: it stands for all safetensors files that the
/// manifest lists in the directory of the index and in those of its files.
///
/// # Errors
/// Those of [`Files::resolve`]; `integrity`.
pub(crate) fn resolve_listed<P: AsRef<Path>>(paths: &[P], manifest: &Manifest, check: Check<'_>) -> Result<Files> {
    let compare = |index: &Path, bytes: &[u8]| compare_index(manifest, index, bytes);
    let files = Files::resolve_with(paths, Some(&compare), check)?;
    let names: Vec<(String, Option<&str>)> = files.places.iter().map(|place| named(place, manifest)).collect();
    let loaded: HashSet<&str> = names.iter().filter_map(|(_, name)| *name).collect();
    for Listing { path, directory, files, .. } in files.listings.iter().filter(|listing| !listing.is_compared) {
        if files.is_empty() {
            return Err(Error::new(Kind::Integrity, "the index names no file, and has no digest").at(path));
        }
        let own = names.get(files.clone()).unwrap_or_default();
        let directories: HashSet<&str> =
            own.iter().flat_map(|(path, name)| listed_in(path, *name, directory)).collect();
        let mut listed = manifest.entries().map(|(name, _)| name).filter(|name| name.ends_with(FILE_SUFFIX));
        if let Some(name) = listed.find(|name| directories.contains(parent_of(name)) && !loaded.contains(name)) {
            let message = format!(
                "{name:?} is not among its files, but {} lists it; restore the file or the index, or give the paths of the \
                 files to load",
                manifest.origin()
            );
            return Err(Error::new(Kind::Integrity, message).at(path));
        }
    }
    Ok(files)
}

/// Returns the absolute path of a file and its name in a manifest.
fn named<'a>(place: &Place, manifest: &'a Manifest) -> (String, Option<&'a str>) {
    let path = place.absolute();
    let name = manifest.find_entry(&path).map(|(name, _)| name);
    (path, name)
}

/// Returns the directory in a manifest that has the file at a path, and the one that corresponds to `directory`, in which
/// the file is.
fn listed_in<'a>(path: &str, name: Option<&'a str>, directory: &str) -> impl Iterator<Item = &'a str> {
    let inside = path.strip_prefix(directory).and_then(|rest| rest.strip_prefix('/'));
    let directory = name.zip(inside).and_then(|(name, inside)| name.strip_suffix(inside));
    let directory =
        directory.filter(|rest| rest.is_empty() || rest.ends_with('/')).map(|rest| rest.trim_end_matches('/'));
    name.map(parent_of).into_iter().chain(directory)
}

/// Compares the content of an index with its digest in a manifest. Returns whether the manifest has one.
fn compare_index(manifest: &Manifest, index: &Path, bytes: &[u8]) -> Result<bool> {
    let Some((_, digest)) = manifest.find_entry(&absolute_of(index)).filter(|(name, _)| !name.is_empty()) else {
        return Ok(false);
    };
    let (digest, origin, end) = (digest.clone(), manifest.origin(), to_u64(bytes.len()));
    check_length(&digest, index, end, origin)?;
    let path = index.to_path_buf();
    let input = Input { digest, origin, source: 0, path, tensor: None, begin: 0, end, header: Arc::default() };
    for (shard, stated) in input.shards() {
        let content = bytes.get(to_usize(shard.start)..to_usize(shard.end)).unwrap_or_default();
        input.compare((&shard, stated), stated.algorithm.digest(content))?;
    }
    Ok(true)
}

/// Checks the length of a file, if its digests state one.
///
/// # Errors
/// `integrity`.
pub(crate) fn check_length(digest: &InputDigest, path: &Path, found: u64, origin: &str) -> Result<()> {
    match digest.length() {
        Some(length) if length != found => {
            let message = format!("the file has {found} bytes, but {origin} states {length}");
            Err(Error::new(Kind::Integrity, message).at(path))
        }
        _ => Ok(()),
    }
}

/// Reads a manifest from a file or object.
///
/// # Errors
/// Those of [`Manifest::parse`] and of opening the manifest.
pub fn read_manifest(path: &Path) -> Result<Manifest> {
    read_whole(path, "a manifest", Manifest::parse)
}

/// Reads and parses a small file or object. Errors have its path.
pub(crate) fn read_whole<T>(path: &Path, what: &str, parse: impl FnOnce(&[u8]) -> Result<T>) -> Result<T> {
    let watch = Watch::begin();
    let check = || watch.check();
    let source = Source::open(&place_of(path)?, &check)?;
    if source.length() > MANIFEST_BYTES_MAX {
        let message = format!("{what} has at most {MANIFEST_BYTES_MAX} bytes, not {}", source.length());
        return Err(Error::new(Kind::Malformed, message).at(source.path()));
    }
    // A private key does not stay in memory.
    let mut bytes = Zeroizing::new(vec![0; to_usize(source.length())]);
    source.read(0, &mut bytes, &check)?;
    parse(&bytes).map_err(|error| error.at(source.path()))
}

/// Request to verify a signature, and then data with the manifest in it. Its text is a JSON object:
/// `{"signature": {"path": "model.sig", "public_key": "key.pub"}}`, or `"certificate_chain": ["ca.pem"]` in place of
/// the key.
#[derive(Debug, Deserialize)]
pub struct SignatureRequest {
    /// Path or URL of the bundle, such as `model.sig`.
    pub path: PathBuf,
    public_key: Option<PathBuf>,
    #[serde(default)]
    certificate_chain: Vec<PathBuf>,
    /// Statement of a signature that the caller has verified.
    statement: Option<String>,
}

impl SignatureRequest {
    /// Parses a request, or returns `None` if the text is another one.
    ///
    /// # Errors
    /// `invalid-argument`.
    pub fn parse(text: &str) -> Result<Option<SignatureRequest>> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Text {
            signature: SignatureRequest,
        }
        if !begins_with_object(text, "signature") {
            return Ok(None);
        }
        parse_request(text).map(|Text { signature }| Some(signature))
    }

    /// Verifies the signature.
    ///
    /// # Errors
    /// `invalid-argument` unless there is either a key or certificates; those of [`Trust`], of [`signature::verify`] and
    /// of opening the files.
    pub fn verify(&self) -> Result<Signed> {
        let trust = match (&self.public_key, self.certificate_chain.as_slice(), &self.statement) {
            (None, [], Some(statement)) => {
                return Statement::parse(statement.as_bytes()).map_err(|error| error.at(&self.path));
            }
            (Some(key), [], None) => read_whole(key, "a key", Trust::from_public_key)?,
            (None, [_, ..], None) => {
                let read = |path: &PathBuf| read_whole(path, "a certificate", Certificate::parse_pem);
                let certificates: Vec<_> = self.certificate_chain.iter().map(read).collect::<Result<_>>()?;
                Trust::from_certificates(certificates.concat())?
            }
            _ => {
                let message = "a signature is verified with either a public key or a certificate chain";
                return Err(Error::new(Kind::InvalidArgument, message).at(&self.path));
            }
        };
        read_whole(&self.path, "a signature", |bytes| signature::verify(bytes, &trust))
    }
}

/// Digests that the data of one file must have.
#[derive(Debug)]
pub(super) enum Stated {
    /// The file is not verified.
    Nothing,
    /// Digest of each tensor, and the file as loads of parts of tensors read it, if the digests cover parts.
    Tensors(Digests, Option<Source>),
    /// Hash of each tensor of a `.tensors` file.
    Hashes(Vec<TensorHash>),
    /// Digest of the whole file, the bytes before its data, and what states the digest. It is compared before the first
    /// load if a load does not see all bytes of the file.
    File { digest: InputDigest, header: Arc<[u8]>, origin: &'static str, is_first: bool },
}

impl Stated {
    /// Returns the digest of a whole file, of which `json` is the header.
    fn of_file(digest: InputDigest, header: &Header, json: &[u8], origin: &'static str) -> Stated {
        // Loads see the decrypted bytes of an encrypted file, and no headers between the tensors of a `.tensors` file.
        let is_tensors = json.starts_with(tensors::MAGIC);
        let is_first = is_tensors || encryption::is_encrypted(header);
        let length = to_u64(json.len()).to_le_bytes();
        let before = if is_tensors { &[] } else { length.as_slice() };
        Stated::File { digest, header: [before, json].concat().into(), origin, is_first }
    }

    fn is_first(&self) -> bool {
        matches!(self, Stated::File { is_first: true, .. })
    }

    /// Returns the file as loads of parts of its tensors read it, if the digests cover parts.
    fn groups(&self) -> Option<&Source> {
        match self {
            Stated::Tensors(_, groups) => groups.as_ref(),
            Stated::Nothing | Stated::Hashes(_) | Stated::File { .. } => None,
        }
    }
}

/// Bytes of a file that have one digest: a tensor, or the whole file.
#[derive(Clone, Debug)]
pub struct Input {
    /// Digest that the bytes must have, or digests of shards.
    pub digest: InputDigest,
    /// Origin of the digest, for errors.
    pub origin: &'static str,
    /// Index of the file.
    pub source: usize,
    /// Path of the file.
    pub path: PathBuf,
    /// Name of the tensor, or `None` for a file.
    pub tensor: Option<Box<str>>,
    /// Offset of the first byte, from the start of the file.
    pub begin: u64,
    /// Offset after the last byte, from the start of the file.
    pub end: u64,
    /// First bytes, which were read when the file was opened. Those of a tensor have zeros in place of its hashes.
    pub header: Arc<[u8]>,
}

impl Input {
    /// Returns the input of a whole file, none of which was read.
    pub fn of_file(index: usize, source: &Source, digest: InputDigest, origin: &'static str) -> Input {
        let (path, end) = (source.path().to_path_buf(), source.length());
        Input { digest, origin, source: index, path, tensor: None, begin: 0, end, header: Arc::default() }
    }

    /// Iterates over the shards, relative to the first byte.
    pub fn shards(&self) -> impl Iterator<Item = (Range<u64>, Digest)> {
        self.digest.shards(self.end.saturating_sub(self.begin))
    }

    /// Compares the digest that was found of a shard.
    ///
    /// # Errors
    /// `integrity`, with the path, the tensor and both digests.
    pub fn compare(&self, (shard, stated): (&Range<u64>, Digest), found: Digest) -> Result<()> {
        if found == stated {
            return Ok(());
        }
        let what = match self.tensor {
            Some(_) => "the data".to_owned(),
            None if self.digest.length().is_some() => format!("{} bytes", shard.end - shard.start),
            None => "the file".to_owned(),
        };
        let message = format!(
            "the digest of {what} is {found}, but {} states {stated}; {what} changed after the digest was made",
            self.origin
        );
        let error = Error::new(Kind::Integrity, message).at(&self.path).offset(self.begin.saturating_add(shard.start));
        Err(match &self.tensor {
            Some(name) => error.tensor(&**name),
            None => error,
        })
    }
}

/// Digests that cover a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cover {
    /// No digest is compared.
    Nothing,
    /// The input with this index contains the region.
    Input(usize),
    /// The file in [`Coverage::sources`] compares the groups that the region touches when it reads the region.
    Groups,
}

impl Cover {
    /// Returns the index of the input.
    pub fn input(self) -> Option<usize> {
        match self {
            Cover::Input(input) => Some(input),
            Cover::Nothing | Cover::Groups => None,
        }
    }
}

/// Files of a checkpoint whose digests are compared at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    /// All files.
    All,
    /// Those without groups, since loads cannot compare parts of their tensors.
    WithoutGroups,
    /// Those with one digest of all their bytes.
    WholeFiles,
}

impl Compared {
    fn contains(self, file: &OpenFile) -> bool {
        match self {
            Compared::All => true,
            Compared::WithoutGroups => file.stated.groups().is_none(),
            Compared::WholeFiles => matches!(file.stated, Stated::File { .. }),
        }
    }
}

/// Digests of the regions of a load.
#[derive(Debug)]
pub struct Coverage {
    /// Inputs with one digest.
    pub inputs: Vec<Input>,
    /// Digests that cover each region.
    pub covers: Vec<Cover>,
    /// Indices of regions that should be verified, but that no digest covers.
    pub uncovered: Vec<usize>,
    /// The files, as a transfer of these regions reads them.
    pub sources: Vec<Source>,
}

impl Checkpoint {
    /// Returns everything in the files that has a digest which was not compared yet, in the order of the files and of the
    /// bytes in each.
    pub fn inputs(&self, compared: Compared) -> Vec<Input> {
        let mut inputs = Vec::new();
        let due = |file: &OpenFile| compared.contains(file) && !file.is_verified();
        for (source, file) in self.files.iter().enumerate().filter(|(_, file)| due(file)) {
            match &file.stated {
                Stated::Nothing => {}
                Stated::Tensors(..) | Stated::Hashes(_) => {
                    let positions = 0..file.header.entries().len();
                    inputs.extend(positions.filter_map(|position| file.tensor_input(source, position)));
                }
                Stated::File { digest, header, origin, .. } => inputs.push(file.input(source, digest, header, origin)),
            }
        }
        inputs
    }

    /// Returns whether encrypted files or `.tensors` files have digests of a manifest, which must be compared before the
    /// first load: loads do not see all bytes of the files.
    pub fn is_due(&self) -> bool {
        self.files.iter().any(|file| !file.is_verified() && file.stated.is_first())
    }

    /// Fails if a load begins before it may.
    ///
    /// # Errors
    /// `internal`.
    pub fn check_due(&self) -> Result<()> {
        let message = "encrypted files and .tensors files must be compared with their manifest before they are loaded";
        if self.is_due() { Err(Error::new(Kind::Internal, message)) } else { Ok(()) }
    }

    /// Fails if a file is compared as a whole, so that no tensor is verified before all of them are.
    ///
    /// # Errors
    /// `invalid-argument`.
    pub fn check_streamable(&self) -> Result<()> {
        let is_whole = |file: &&OpenFile| file.is_compared() && Compared::WholeFiles.contains(file);
        match self.files.iter().find(is_whole) {
            None => Ok(()),
            Some(file) => {
                let message = "a stream, and a load with a progress bar, has tensors before their whole file is read, so \
                               that it cannot verify them with a manifest or another digest of the file; load them at \
                               once, or save the files with digests of tensors";
                Err(Error::new(Kind::InvalidArgument, message).at(file.source.path()))
            }
        }
    }

    /// Returns whether all digests of these files were compared.
    pub fn is_verified(&self, compared: Compared) -> bool {
        self.files.iter().all(|file| !compared.contains(file) || file.is_verified())
    }

    /// Makes later loads compare no digests of these files, after all of them were compared.
    pub fn set_verified(&self, compared: Compared) {
        let files = self.files.iter().filter(|file| compared.contains(file));
        files.for_each(|file| file.is_verified.store(true, Ordering::Relaxed));
    }

    /// Returns the file with this index as loads of parts of its tensors read it: in groups, if their hashes are still to
    /// be compared.
    pub fn source_in_groups(&self, index: usize) -> Option<&Source> {
        let file = self.files.get(index)?;
        Some(file.stated.groups().filter(|_| !file.is_verified()).unwrap_or(&file.source))
    }

    /// Returns the files for a load that compares only groups.
    ///
    /// # Errors
    /// `internal` if files without groups are still to be compared.
    pub fn sources_in_groups(&self) -> Result<Vec<Source>> {
        let is_due = |file: &OpenFile| file.is_compared() && file.stated.groups().is_none();
        if let Some(file) = self.files.iter().find(|file| is_due(file)) {
            let message = "a file without digests of groups must be verified before parts of its tensors are loaded";
            return Err(Error::new(Kind::Internal, message).at(file.source.path()));
        }
        Ok((0..self.files.len()).filter_map(|index| self.source_in_groups(index).cloned()).collect())
    }

    /// Returns the inputs whose digests a load of these regions can compare, or `None` if the checkpoint is not to be
    /// verified.
    ///
    /// A tensor's digest covers a region of the whole tensor, and one without bytes. The chaining values of groups cover all
    /// regions of a file, and are taken if a region is a part of a tensor. A file's digest covers regions that are all
    /// tensors of the file, each once.
    ///
    /// # Errors
    /// `integrity` if no digest covers a region, unless [`Partial::Allow`] is set.
    pub fn coverage(&self, regions: &[TensorRegion]) -> Result<Option<Coverage>> {
        if !self.files.iter().any(OpenFile::is_compared) {
            return Ok(None);
        }
        let mut coverage = Coverage {
            inputs: Vec::new(),
            covers: vec![Cover::Nothing; regions.len()],
            uncovered: Vec::new(),
            sources: self.sources().cloned().collect(),
        };
        let mut by_file: Vec<Vec<usize>> = self.files.iter().map(|_| Vec::new()).collect();
        for (index, region) in regions.iter().enumerate() {
            if let Some(regions) = by_file.get_mut(region.source) {
                regions.push(index);
            }
        }
        let files = self.files.iter().zip(by_file).enumerate();
        for (source, (file, mut indices)) in files.filter(|(_, (file, _))| file.is_compared()) {
            match &file.stated {
                Stated::Nothing => {}
                Stated::Tensors(..) | Stated::Hashes(_) => {
                    let input = |&index: &usize| file.tensor_input(source, self.whole(source, regions.get(index)?)?);
                    let inputs: Vec<_> = indices.iter().map(input).collect();
                    match &file.stated {
                        Stated::Tensors(_, Some(grouped)) if inputs.iter().any(Option::is_none) => {
                            coverage.add_groups(&indices, source, grouped);
                        }
                        _ => indices.iter().zip(inputs).for_each(|(&index, input)| coverage.add(&[index], input)),
                    }
                    // The digests of a header cover a region without bytes.
                    let needs_none = |&index: &usize| regions.get(index).is_some_and(|region| region.bytes() == 0);
                    indices.retain(|index| !needs_none(index));
                }
                Stated::File { digest, header, origin, .. } => {
                    let mut found: Vec<_> =
                        indices.iter().filter_map(|&index| self.whole(source, regions.get(index)?)).collect();
                    found.sort_unstable();
                    let positions = 0..file.header.entries().len();
                    let is_whole = found.len() == indices.len() && found.iter().copied().eq(positions);
                    coverage.add(&indices, is_whole.then(|| file.input(source, digest, header, origin)));
                }
            }
            let covers = &coverage.covers;
            let is_uncovered = |index: &usize| covers.get(*index) == Some(&Cover::Nothing);
            let uncovered: Vec<_> = indices.into_iter().filter(is_uncovered).collect();
            if let (Partial::Raise, Some(first)) =
                (self.partial, uncovered.first().and_then(|&index| regions.get(index)))
            {
                return Err(file.uncovered_error(first, &names_of(regions, &uncovered)));
            }
            coverage.uncovered.extend(uncovered);
        }
        Ok(Some(coverage))
    }

    /// Returns the names of regions that a load returns although no digest covers them.
    ///
    /// # Errors
    /// Those of [`Checkpoint::coverage`].
    pub fn without_digests<'a>(&self, regions: &'a [TensorRegion]) -> Result<Vec<&'a str>> {
        let names = |coverage: Coverage| names_of(regions, &coverage.uncovered);
        Ok(self.coverage(regions)?.map(names).unwrap_or_default())
    }

    /// Sets what loads do without a digest that covers them.
    #[must_use]
    pub fn with_partial(self, partial: Partial) -> Checkpoint {
        Checkpoint { partial, ..self }
    }

    /// Returns the position of a tensor of a file, if a region is the whole tensor.
    fn whole(&self, source: usize, region: &TensorRegion) -> Option<usize> {
        let header = &self.files.get(source)?.header;
        let position = header.position(&region.name)?;
        let entry = header.get(position)?;
        let range = entry.begin..entry.end;
        (range.is_empty() || region.contiguous() == Some(range)).then_some(position)
    }
}

/// Returns the names of the regions with these indices, each once.
fn names_of<'a>(regions: &'a [TensorRegion], indices: &[usize]) -> Vec<&'a str> {
    let mut seen = HashSet::new();
    let names = indices.iter().filter_map(|&index| regions.get(index).map(|region| &*region.name));
    names.filter(|&name| seen.insert(name)).collect()
}

impl OpenFile {
    /// Returns the error of a load that no digest covers. `names` are those of all such regions of the file.
    fn uncovered_error(&self, first: &TensorRegion, names: &[&str]) -> Error {
        let shown: Vec<_> = names.iter().take(NAMES_MAX).map(|name| format!("{name:?}")).collect();
        let more = names.len().saturating_sub(NAMES_MAX);
        let mut shown = shown.join(", ");
        if more > 0 {
            shown += &format!(" and {more} more");
        }
        let (digest, whole) = match &self.stated {
            Stated::File { origin, .. } => (
                format!("{origin} has a digest of the whole file, which covers loads of all its tensors, each once"),
                "all tensors of the file",
            ),
            _ => ("the digests of the file cover whole tensors".to_owned(), "whole tensors"),
        };
        let message = format!(
            "what is requested of {shown} cannot be verified: {digest}; load {whole}, or compare the file first with \
             fst.verify and load without `verify`, or allow loads without verification with partial=\"allow\""
        );
        Error::new(Kind::Integrity, message).at(self.source.path()).tensor(&*first.name)
    }

    fn is_verified(&self) -> bool {
        self.is_verified.load(Ordering::Relaxed)
    }

    /// Returns whether loads compare the digests of the file.
    fn is_compared(&self) -> bool {
        !self.is_verified() && !self.stated.is_first() && !matches!(self.stated, Stated::Nothing)
    }

    /// Returns the input of the whole file.
    fn input(&self, source: usize, digest: &InputDigest, header: &Arc<[u8]>, origin: &'static str) -> Input {
        Input { header: Arc::clone(header), ..Input::of_file(source, &self.source, digest.clone(), origin) }
    }

    /// Returns the input of the tensor at a position of the header, or `None` if it has no digest of its own.
    fn tensor_input(&self, source: usize, position: usize) -> Option<Input> {
        let (digest, header) = match &self.stated {
            Stated::Tensors(digests, _) => (digests.tensor(position)?, Arc::default()),
            Stated::Hashes(hashes) => hashes.get(position).map(|hash| (hash.digest, Arc::clone(&hash.hashed)))?,
            Stated::Nothing | Stated::File { .. } => return None,
        };
        let (path, entry) = (self.source.path().to_path_buf(), self.header.get(position)?);
        let begin = entry.begin.checked_sub(to_u64(header.len()))?;
        let (tensor, digest) = (Some(entry.name.into()), digest.into());
        Some(Input { digest, origin: "the file", source, path, tensor, begin, end: entry.end, header })
    }
}

impl Coverage {
    fn add(&mut self, regions: &[usize], input: Option<Input>) {
        let Some(input) = input else { return };
        self.cover(regions, Cover::Input(self.inputs.len()));
        self.inputs.push(input);
    }

    fn add_groups(&mut self, regions: &[usize], source: usize, grouped: &Source) {
        self.cover(regions, Cover::Groups);
        if let Some(source) = self.sources.get_mut(source) {
            *source = grouped.clone();
        }
    }

    fn cover(&mut self, regions: &[usize], by: Cover) {
        for &region in regions {
            if let Some(cover) = self.covers.get_mut(region) {
                *cover = by;
            }
        }
    }
}
