//! Open checkpoints.

use super::calls::{answer, encode, parse, unknown};
use super::encryption_key::EncryptionKey;
use super::ffi;
use super::guard::{guard, guard_with_log};
use super::recipe::{LastRecipe, RecipeOutputs};
use super::selection::{Reads, Selection, signed, spec};
use crate::checkpoint::lazy::LazyCheckpoint;
use crate::checkpoint::region::{TensorRegion, torch_shape};
use crate::checkpoint::selection::{self, IndexRegions, Slices};
use crate::checkpoint::verify::{Compared, Request};
use crate::checkpoint::{self, OpenOptions};
use crate::device::cuda::Cuda;
use crate::device::host::Host;
use crate::error::{Error, Kind, Result};
use crate::format::encryption;
use crate::format::header::{Entry, Header};
use crate::load::check;
use crate::load::shared_cache;
use crate::load::transfer::Transfer;
use crate::load::views::Mappings;
use crate::num::to_usize;
use crate::options::Options;
use crate::reader::{self, Access, ChosenReader, ReaderKind};
use crate::source::Source;
use crate::source::files::Listing;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Open checkpoint and the mappings of its files.
pub(super) struct Checkpoint {
    files: LazyCheckpoint,
    /// Mappings of all files, and of the files that were opened first.
    mappings: Arc<Mappings>,
    part_mappings: Arc<Mappings>,
    last_recipe: LastRecipe,
    /// Whether other processes of this machine load other parts of the same tensors.
    shares_disk: AtomicBool,
}

/// Request to open a checkpoint, to which C++ adds options.
pub(super) struct OpenRequest(OpenOptions);

/// Creates a request with one to verify the data, which may be empty, and with the headers that another process has
/// exported. No headers are empty.
pub(super) fn open_request(verify: &str, headers: &[u8]) -> Result<Box<OpenRequest>> {
    guard_with_log(|| {
        let headers = (!headers.is_empty()).then(|| headers.to_vec());
        Ok(Box::new(OpenRequest(OpenOptions { verify: Request::read(verify)?, headers, ..OpenOptions::default() })))
    })
}

impl OpenRequest {
    pub(super) fn options(&self) -> &OpenOptions {
        &self.0
    }

    /// Sets the key of encrypted files. `accepts_plain` says whether files that are not encrypted are accepted, too.
    pub(super) fn set_key(&mut self, key: &EncryptionKey, accepts_plain: bool) {
        self.0.key = Some(key.key().clone());
        self.0.accepts_plain = accepts_plain;
    }
}

/// Opens files for loads. Those that loads do not verify are compared with their manifest first, or, if another process
/// has read the headers, by the ranks together.
pub(super) fn open(paths: &[String], request: &OpenRequest) -> Result<Box<Checkpoint>> {
    guard(|| {
        let OpenRequest(options) = request;
        let is_shared = options.headers.is_some();
        let prepare = |files: &checkpoint::Checkpoint| if is_shared { Ok(()) } else { check_due(files) };
        Ok(Box::new(Checkpoint::of(LazyCheckpoint::open(paths, options, prepare)?)))
    })
}

/// Returns a checkpoint without files.
pub(super) fn empty_checkpoint() -> Box<Checkpoint> {
    Box::new(Checkpoint::new(&Arc::new(checkpoint::Checkpoint::joined(&[]))))
}

fn check_due(files: &checkpoint::Checkpoint) -> Result<()> {
    check::check_due(files, &Options::from_env()?)
}

/// Returns the tensors of a file in memory. Their data follow from the beginnings and sizes.
pub(super) fn tensors_of_bytes(file: &[u8]) -> Result<Vec<ffi::StoredTensor>> {
    guard_with_log(|| {
        let at = |error: Error| error.at("data");
        let header = Header::of_bytes(file).map_err(at)?;
        if encryption::is_encrypted(&header) {
            let message = "the bytes are those of an encrypted file; write them to a file, and load that";
            return Err(at(Error::new(Kind::InvalidArgument, message)));
        }
        let stored = |entry: Entry<'_>| {
            Ok(ffi::StoredTensor {
                begin: to_usize(entry.begin),
                spec: spec(&TensorRegion::whole(0, entry).map_err(at)?)?,
            })
        };
        header.entries().map(stored).collect()
    })
}

impl Checkpoint {
    pub(super) fn new(files: &Arc<checkpoint::Checkpoint>) -> Checkpoint {
        Checkpoint::of(Arc::clone(files).into())
    }

    fn of(files: LazyCheckpoint) -> Checkpoint {
        let (mappings, part_mappings) = (Arc::default(), Arc::default());
        let (last_recipe, shares_disk) = (LastRecipe::default(), AtomicBool::new(false));
        Checkpoint { files, mappings, part_mappings, last_recipe, shares_disk }
    }

    /// Returns the checkpoint with all files, which are opened now if they are not open.
    pub(super) fn files(&self) -> Result<&Arc<checkpoint::Checkpoint>> {
        self.files.all(check_due)
    }

    /// Returns a checkpoint that holds the named tensors, and the mappings of its files.
    fn holding(&self, names: &[String]) -> Result<(&Arc<checkpoint::Checkpoint>, &Arc<Mappings>)> {
        let files = self.files.holding(names, check_due)?;
        let is_all = self.files.opened().is_some_and(|all| Arc::ptr_eq(all, files));
        Ok((files, if is_all { &self.mappings } else { &self.part_mappings }))
    }

    pub(super) fn mappings(&self) -> &Arc<Mappings> {
        &self.mappings
    }

    pub(super) fn export_headers(&self) -> Result<Vec<u8>> {
        guard(|| self.files()?.export_headers())
    }

    /// Calls a method without tensors.
    pub(super) fn call(&self, method: &str, request: &str) -> Result<String> {
        answer(|check| {
            let files = self.files()?;
            let is_encrypted = || files.sources().any(Source::is_encrypted);
            match method {
                // Returns the name of the copy of the files that this process reads, or an empty text if it has none.
                "copy_name" => encode(&shared_cache::copy_name(files)?.unwrap_or_default()),
                // Returns the metadata of the index that the first path leads to, with the path or URL of the file that it names.
                // Empty if it leads to no index.
                "index_metadata" => {
                    encode(&files.listings().first().map(Listing::metadata_with_paths).unwrap_or_default())
                }
                "is_encrypted" => encode(&is_encrypted()),
                // Returns the metadata of the only file. Fails if there are several.
                "metadata" => encode(&files.metadata()?.cloned().unwrap_or_default()),
                // Reads the indices of modules from the headers of tensors of `.tensors` files.
                "module_indices" => {
                    let headers = files.tensor_headers(&parse::<Vec<String>>(request)?)?;
                    encode(&headers.iter().map(|header| header.module).collect::<Vec<_>>())
                }
                // Returns the name of the page cache that serves the files, or an empty text if they would not be mapped.
                "page_cache" => encode(&shared_cache::name(files, &Options::from_env()?)?.unwrap_or_default()),
                // Returns the path and the text of the file with a name beside the checkpoint, or null without one.
                "text_beside" => {
                    let found = files.read_beside(&parse::<String>(request)?, check)?;
                    encode(&found.map(|file| (file.path, String::from_utf8_lossy(&file.bytes).into_owned())))
                }
                // Opens all files, as each of these methods does.
                "open_files" => encode(&()),
                // Returns the readers that loads to a device would use, given the ordinal of a GPU, or a negative number.
                "readers" => encode(&readers(files, parse(request)?)?),
                // Returns the path and the metadata of each file that has metadata.
                "texts" => {
                    let text = |(path, metadata): (&Path, _)| (path.to_string_lossy().into_owned(), metadata);
                    encode(&files.metadata_by_file().map(text).collect::<Vec<(_, &BTreeMap<_, _>)>>())
                }
                // Returns the path of the file that holds a tensor.
                "path" => {
                    let (source, _) = files.find(&parse::<String>(request)?)?;
                    encode(&files.source(source)?.path().to_string_lossy())
                }
                // Returns the distinct shapes, and the index of the shape of each tensor.
                "shapes" => encode(&self.shapes()?),
                // Returns the outputs of rules, and the tensors that no rule reads.
                "recipe" => self.last_recipe.describe(files, &parse(request)?),
                // From now on, loads leave the bytes between them to other processes.
                "share_disk" => encode(&self.shares_disk.store(true, Ordering::Relaxed)),
                "take_unverified" => encode(&self.take_unverified()),
                // Reads one of several equal parts of the data and compares the digests, and with `skips_groups` only
                // digests of files without groups. Later loads of these files compare none, since the caller waits until
                // all parts are verified.
                "verify" => {
                    let (part, parts, skips_groups) = parse(request)?;
                    encode(&self.verify(part, parts, skips_groups)?)
                }
                // Compares all data, if a file is encrypted.
                "verify_encrypted" if is_encrypted() => encode(&self.verify(0, 1, false)?),
                "verify_encrypted" => encode(&()),
                // Compares files that have one digest of all their bytes. Later loads of these files compare none.
                "verify_whole_files" => encode(&check::check_whole_files(files, &Options::from_env()?)?),
                _ => Err(unknown(method)),
            }
        })
    }

    fn verify(&self, part: usize, parts: usize, skips_groups: bool) -> Result<()> {
        let compared = if skips_groups { Compared::WithoutGroups } else { Compared::All };
        let files = self.files()?;
        if !files.is_verified(compared) {
            check::check_part(files, compared, part, parts, &Options::from_env()?)?;
            files.set_verified(compared);
        }
        Ok(())
    }

    /// Lists the names of all tensors: in the order of their bytes, or, while the files of an index in a store are not
    /// all open, in the order of the index.
    pub(super) fn tensor_names(&self) -> Vec<String> {
        self.files.names()
    }

    /// Returns the distinct shapes of the tensors, and for each tensor, in the order of the names, the index of its shape.
    fn shapes(&self) -> Result<(Vec<Vec<u64>>, Vec<usize>)> {
        let mut known: HashMap<Vec<u64>, usize> = HashMap::new();
        let (mut shapes, mut indices) = (Vec::new(), Vec::new());
        let files = self.files()?;
        for (source, entry) in files.entries() {
            let shape = torch_shape(entry).map_err(|error| files.locate(source, error))?;
            indices.push(*known.entry(shape).or_insert_with_key(|shape| {
                shapes.push(shape.clone());
                shapes.len() - 1
            }));
        }
        Ok((shapes, indices))
    }

    /// Returns the metadata of the only file. Fails if there are several.
    pub(super) fn metadata(&self) -> Result<Vec<ffi::MetadataEntry>> {
        let entry = |(key, value): (&String, &String)| ffi::MetadataEntry { key: key.clone(), value: value.clone() };
        guard(|| Ok(self.files()?.metadata()?.into_iter().flatten().map(entry).collect()))
    }

    pub(super) fn tensor_info(&self, name: &str) -> Result<ffi::TensorInfo> {
        guard(|| {
            let (files, _) = self.holding(&[name.to_owned()])?;
            let (_, entry) = files.find(name)?;
            let bytes = entry.end.saturating_sub(entry.begin);
            Ok(ffi::TensorInfo {
                dtype: entry.dtype.name().to_owned(),
                shape: signed(entry.shape)?,
                bytes,
                begin: entry.begin,
                kind: entry.tensors.and_then(|entry| i8::try_from(entry.kind.number()).ok()).unwrap_or(-1),
            })
        })
    }

    /// Returns the text of a warning about what loads have not verified, although digests were requested. Returns it once.
    pub(super) fn take_unverified(&self) -> String {
        self.files.opened().map(|files| files.take_unverified()).unwrap_or_default()
    }

    /// Selects tensors, or parts of named ones.
    pub(super) fn select(
        &self,
        parts: ffi::Parts,
        names: &[String],
        starts: &[i64],
        lengths: &[i64],
        steps_or_dims: &[i64],
    ) -> Result<Box<Selection>> {
        self.selected(Some(names).filter(|_| parts != ffi::Parts::All), |files| match parts {
            ffi::Parts::All => selection::Selection::all(files),
            ffi::Parts::Region => selection::Selection::region(files, names.first().map_or("", String::as_str), starts),
            ffi::Parts::Regions => {
                let regions = IndexRegions { starts, lengths, steps: steps_or_dims };
                selection::Selection::index_regions(files, names, regions)
            }
            ffi::Parts::Slices => {
                selection::Selection::slices(files, names, Slices { dims: steps_or_dims, starts, lengths })
            }
            _ => selection::Selection::named(files, names),
        })
    }

    /// Finds outputs of rules, or index regions of them: without starts, lengths and steps, whole outputs.
    pub(super) fn recipe_outputs(
        &self,
        rules: &[String],
        names: &[String],
        starts: &[i64],
        lengths: &[i64],
        steps: &[i64],
    ) -> Result<Box<RecipeOutputs>> {
        let has_regions = [starts, lengths, steps].iter().any(|numbers| !numbers.is_empty());
        let regions = has_regions.then_some(IndexRegions { starts, lengths, steps });
        guard(|| {
            let files = self.files()?;
            let recipe = self.last_recipe.or_parse(files, rules)?;
            Ok(Box::new(RecipeOutputs::new(files, &self.mappings, self.reads(), recipe, names, regions)?))
        })
    }

    pub(super) fn recorded_outputs(&self, views: &str, held: usize) -> Result<Box<RecipeOutputs>> {
        guard(|| Ok(Box::new(RecipeOutputs::recorded(self.files()?, &self.mappings, self.reads(), views, held)?)))
    }

    /// Returns a checkpoint with the files of this one and of another. Only positions name its tensors.
    pub(super) fn join(&self, other: &Checkpoint) -> Box<Checkpoint> {
        // The positions of tensors are known only once all files are open. No position exists otherwise.
        let files = self.files.opened().zip(other.files.opened()).map(|(own, other)| [&**own, &**other]);
        let files = checkpoint::Checkpoint::joined(files.as_ref().map_or(&[], |files| files));
        let shares_disk = [self, other].iter().any(|each| each.shares_disk.load(Ordering::Relaxed));
        Box::new(Checkpoint { shares_disk: AtomicBool::new(shares_disk), ..Checkpoint::new(&Arc::new(files)) })
    }

    /// Returns which processes read the bytes that a selection leaves out.
    fn reads(&self) -> Reads {
        if self.shares_disk.load(Ordering::Relaxed) { Reads::BesideOthers } else { Reads::Alone }
    }

    /// Selects tensors of the files that hold the named ones, or of all files.
    fn selected(
        &self,
        names: Option<&[String]>,
        choose: impl FnOnce(&Arc<checkpoint::Checkpoint>) -> Result<selection::Selection>,
    ) -> Result<Box<Selection>> {
        let reads = self.reads();
        guard(|| {
            let (files, mappings) = match names {
                Some(names) => self.holding(names)?,
                None => (self.files()?, &self.mappings),
            };
            Ok(Box::new(Selection::new(choose(files)?, Arc::clone(mappings), reads)))
        })
    }
}

/// Returns the names of the readers, joined by `+`, for the GPU with this ordinal, or for new tensors on the CPU if it is
/// negative.
fn readers(files: &Arc<checkpoint::Checkpoint>, ordinal: i32) -> Result<String> {
    let options = Options::from_env()?;
    let mut names = Vec::new();
    let mut add = |chosen: ChosenReader| {
        let name = chosen.kind.to_string();
        if !names.contains(&name) {
            names.push(name);
        }
    };
    // Opening a transfer probes which readers are available.
    if ordinal < 0 {
        let transfer = Transfer::open(files, Arc::default(), Arc::new(Host), options.clone())?;
        for (source, moved) in files.sources().zip(transfer.readers()) {
            let chosen = reader::choose(&options, source, Access::View)?;
            add(if chosen.kind == ReaderKind::Mmap { chosen } else { moved });
        }
    } else {
        let device = Arc::new(Cuda::open(ordinal, 0)?);
        Transfer::open(files, Arc::default(), device, options)?.readers().into_iter().for_each(add);
    }
    Ok(names.join("+"))
}
