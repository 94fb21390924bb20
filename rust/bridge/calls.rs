//! Calls without tensors: the name of a method, with its request and its answer in JSON. Objects have a function `call`, too.

use super::dtype_rules;
use super::guard::{start_log, watched};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::verify::{Compared, Request, Verify, read_manifest, signature_parts};
use crate::device;
use crate::error::{Error, Kind, Result};
use crate::load::{check, model};
use crate::options::Options;
use crate::os::retry::Check;
use crate::profile;
use crate::ranks::mesh::MeshLayout;
use crate::recipe::layout::Layout;
use crate::recipe::rules::Rule;
use crate::remote;
use crate::remote::stores::store_options;
use crate::save::checkpoint::{stale, write_file};
use crate::save::output::{self, Output};
use crate::source::Place;
use crate::source::directory::is_index;
use crate::source::files::{Files, Listing, check_local};
use crate::staging::pool;
use serde::{Deserialize, Serialize};
use std::fs;
use std::ops::Range;
use std::path::PathBuf;

/// Offset, sizes and strides of a view.
#[derive(Deserialize)]
struct ViewLayout(u64, Vec<u64>, Vec<u64>);

/// Calls a function of the core.
pub(super) fn call(method: &str, request: &str) -> Result<String> {
    answer(|check| match method {
        // Fails unless the files of index files hold all tensors that these list.
        "check_index" => encode(&Checkpoint::open(&parse::<Vec<PathBuf>>(request)?)?.check_index()?),
        // Fails unless each rule of a recipe is valid, as far as this is known without a checkpoint.
        "check_rules" => {
            let rules: Vec<String> = parse(request)?;
            (1..).zip(&rules).try_for_each(|(number, text)| Rule::parse(number, text).map(|_| ()))?;
            encode(&())
        }
        // Fails unless a save can create or replace what is at a path. Sends no request for the URL of an object.
        "check_target" => encode(&output::check_target(&parse::<PathBuf>(request)?)?),
        // Lists the files that paths stand for. Opens only index files.
        "checkpoint_files" => {
            let files = Files::resolve(&parse::<Vec<PathBuf>>(request)?, check)?;
            encode(&files.places.iter().map(Place::to_text).collect::<Vec<_>>())
        }
        // Stores the bytes of a local file at a path or URL.
        "copy_file" => {
            let (source, target): (PathBuf, PathBuf) = parse(request)?;
            let bytes = fs::read(&source).map_err(|error| Error::from_io(error, &source, "cannot read the file"))?;
            encode(&write_file(Output::open(&target, None)?, bytes, check)?)
        }
        // Sets options, by name, of the URLs that begin with a text.
        "configure_storage" => {
            let (url, names, values): (String, Vec<String>, Vec<String>) = parse(request)?;
            if names.len() != values.len() {
                let message =
                    format!("{} names, but {} values; give one value for each name", names.len(), values.len());
                return Err(Error::new(Kind::InvalidArgument, message));
            }
            encode(&store_options::configure(&url, names.into_iter().zip(values).collect())?)
        }
        // Returns the texts in the metadata of a checkpoint's index, or an empty object if there is no index.
        "index_metadata" => {
            let files = Files::resolve(&[parse::<PathBuf>(request)?], check)?;
            encode(&files.listings.first().map(Listing::metadata_with_paths).unwrap_or_default())
        }
        "is_index" => encode(&is_index(&parse::<String>(request)?)),
        // Returns the indices of a tensor that the rank at a coordinate of a mesh has, given a layout as
        // [`MeshLayout::decode`] takes it: for each dimension the first index and the end of each range.
        "mesh_indices" => {
            let (layout, shape, coordinate): (Vec<i64>, Vec<u64>, Vec<usize>) = parse(request)?;
            let pairs = |ranges: Vec<Range<u64>>| ranges.into_iter().map(|range| (range.start, range.end)).collect();
            let indices = MeshLayout::decode(&layout)?.0.indices(&shape, &coordinate).into_iter();
            encode(&indices.map(pairs).collect::<Vec<Vec<_>>>())
        }
        // Hashes all files of a model, and returns the statement about them, for a new signature.
        "model_statement" => {
            let (request, path): (_, PathBuf) = parse(request)?;
            encode(&model::statement(&request, &path, &Options::from_env()?)?)
        }
        // Starts a profile, and returns its number.
        "profile_start" => encode(&profile::start()),
        // Stops a profile, and returns its recording.
        "profile_stop" => profile::stop(parse(request)?),
        // Returns the totals of all loads and saves of the process.
        "profile_totals" => Ok(profile::totals()),
        // Returns the index region of a contiguous tensor that each view covers, or null if a view is none. Views have an
        // offset, sizes and strides, which do not increase.
        "regions" => {
            let (shape, views): (Vec<u64>, Vec<ViewLayout>) = parse(request)?;
            let regions = views.into_iter().map(|ViewLayout(offset, sizes, strides)| {
                let region = Layout { offset, sizes, strides }.region(&shape)?;
                Some(region.iter().map(|range| (range.start, range.length, range.step)).collect::<Vec<_>>())
            });
            encode(&regions.collect::<Vec<_>>())
        }
        // Frees what the process keeps between loads, staging memory, kernels and connections, and returns the bytes of
        // staging memory. Loads in progress keep what they use, and the next load allocates what it needs.
        "release_memory" => {
            device::release();
            remote::release();
            encode(&pool::release(check)?)
        }
        // Removes the files that killed saves have left in a directory. Returns their paths and sizes.
        "remove_stale_files" => {
            let directory = check_local(&parse::<PathBuf>(request)?)?;
            encode(&stale::remove_stale(&directory, None, stale::AGE, check)?)
        }
        // Returns the number of the dtype that rules request for each of all names, or null.
        "requested_dtypes" => {
            let (names, patterns, dtypes): (Vec<String>, Vec<String>, Vec<Option<i8>>) = parse(request)?;
            encode(&dtype_rules::requested(&names, &patterns, dtypes)?)
        }
        // Returns the parts of a signature for a caller who verifies it with a key of this hint, or with certificates.
        "signature_parts" => {
            let (path, hint): (PathBuf, Option<String>) = parse(request)?;
            encode(&signature_parts(&path, hint.as_deref())?)
        }
        // Reads all data of a checkpoint, and compares their digests and authentication codes.
        "verify" => {
            let (paths, verify): (Vec<PathBuf>, String) = parse(request)?;
            encode(&verify_checkpoint(&paths, &verify)?)
        }
        // Compares all files of a manifest, below a directory or a URL, and returns their number.
        "verify_files" => {
            let (manifest, directory): (PathBuf, PathBuf) = parse(request)?;
            let manifest = read_manifest(&manifest)?;
            check::check_manifest(&manifest, &directory, &Options::from_env()?)?;
            encode(&manifest.entries().len())
        }
        // Verifies the signature of a model, compares all files with it, and returns their number.
        "verify_model" => {
            let (signature, rules, path): (_, _, PathBuf) = parse(request)?;
            encode(&model::verify(&signature, &rules, &path, &Options::from_env()?)?)
        }
        // Writes a text file or object.
        "write_text" => {
            let (target, text): (PathBuf, String) = parse(request)?;
            encode(&write_file(Output::open(&target, None)?, text.into_bytes(), check)?)
        }
        _ => Err(unknown(method)),
    })
}

fn verify_checkpoint(paths: &[PathBuf], verify: &str) -> Result<()> {
    let options = Options::from_env()?;
    match Request::read(verify)?.verify {
        Verify::Manifest(manifest) => check::check_files(paths, &manifest, &options),
        verify => {
            let checkpoint = Checkpoint::open_with(paths, &verify.into())?;
            checkpoint.check_index()?;
            check::check_part(&checkpoint, Compared::All, 0, 1, &options)
        }
    }
}

/// Answers a call. Panics become errors, and Ctrl-C makes the check fail.
pub(super) fn answer(work: impl FnOnce(Check<'_>) -> Result<String>) -> Result<String> {
    watched(|check| start_log().and_then(|()| work(check)))
}

pub(super) fn unknown(method: &str) -> Error {
    Error::new(Kind::Internal, format!("the core has no method {method:?}"))
}

pub(super) fn parse<'a, T: Deserialize<'a>>(request: &'a str) -> Result<T> {
    let invalid = |error| Error::new(Kind::InvalidArgument, format!("the request is not valid: {error}"));
    serde_json::from_str(request).map_err(invalid)
}

pub(super) fn encode(answer: &impl Serialize) -> Result<String> {
    serde_json::to_string(answer).map_err(|error| Error::new(Kind::Internal, error.to_string()))
}
