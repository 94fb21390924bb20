//! Digests that cover the regions of a load.

use super::{Partial, Stated};
use crate::checkpoint::region::TensorRegion;
use crate::checkpoint::{Checkpoint, OpenFile};
use crate::digest::{Digest, InputDigest};
use crate::error::{Error, Kind, Result};
use crate::num::to_u64;
use crate::source::Source;
use std::collections::HashSet;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Maximum number of tensors that an error names.
const NAMES_MAX: usize = 20;

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
    /// First bytes, which were read when the file was opened. Bytes of a tensor header have zeros in place of its hashes.
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

    /// Compares the digest that was found of a shard. Fails with `integrity`, with the path, the tensor and both
    /// digests.
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
    pub fn check_due(&self) -> Result<()> {
        let message = "encrypted files and .tensors files must be compared with their manifest before they are loaded";
        if self.is_due() { Err(Error::new(Kind::Internal, message)) } else { Ok(()) }
    }

    /// Returns whether files have digests that are still to be compared, by loads or before the first one.
    pub fn has_unverified(&self) -> bool {
        self.files.iter().any(|file| !file.is_verified() && !matches!(file.stated, Stated::Nothing))
    }

    /// Fails if a file is compared as a whole, so that no tensor is verified before all of them are.
    pub fn check_streamable(&self) -> Result<()> {
        let is_whole = |file: &&Arc<OpenFile>| file.is_compared() && Compared::WholeFiles.contains(file);
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
    /// A tensor's digest covers a region of the whole tensor, and one without bytes. The chaining values of groups
    /// cover all regions of a file, and are taken if a region is a part of a tensor. A file's digest covers regions
    /// that are all tensors of the file, each once. Fails with `integrity` if no digest covers a region, unless
    /// [`Partial::Allow`] is set.
    pub fn coverage(&self, regions: &[TensorRegion]) -> Result<Option<Coverage>> {
        if !self.files.iter().any(|file| file.is_compared()) {
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
                    // The digests of a header cover a region without bytes, and decrypted bytes are authentic.
                    let is_empty = |&index: &usize| regions.get(index).is_some_and(|region| region.bytes() == 0);
                    indices.retain(|index| !file.source.is_encrypted() && !is_empty(index));
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
    pub fn without_digests<'a>(&self, regions: &'a [TensorRegion]) -> Result<Vec<&'a str>> {
        let names = |coverage: Coverage| names_of(regions, &coverage.uncovered);
        Ok(self.coverage(regions)?.map(names).unwrap_or_default())
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
    /// Returns the error of a load that no digest covers. `names` are the names of all such regions of the file.
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
