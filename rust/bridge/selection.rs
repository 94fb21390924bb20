//! Requested regions of a checkpoint, and transfers and streams that load them.

use super::dtype_rules::{self, scalar_type};
use super::ffi;
use super::guard::guard;
use super::stream::AnyStream;
use super::transfer::{AnyTransfer, OnDevice};
use crate::checkpoint::region::TensorRegion;
use crate::checkpoint::selection;
use crate::device::Device;
use crate::device::cuda::Cuda;
use crate::device::host::Host;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::load::background::BackgroundTransfer;
use crate::load::check;
use crate::load::shared_cache;
use crate::load::small;
use crate::load::stream::{Order, Stream};
use crate::load::transfer::Transfer;
use crate::load::views::{self, Mappings};
use crate::options::Options;
use crate::profile::{self, Count, Span, Stage};
use crate::ranks::load::LoadPlan;
use serde_json::json;
use std::sync::Arc;

/// Requested regions of a checkpoint.
pub(super) struct Selection {
    selection: selection::Selection,
    mappings: Arc<Mappings>,
    reads: Reads,
}

/// Processes that the reads of a selection are for.
#[derive(Clone)]
pub(super) enum Reads {
    /// This process alone.
    Alone,
    /// This process, while others of this machine read the bytes between its own.
    BesideOthers,
    /// A rank of a group, which leaves the bytes between its own to other ranks if these need them.
    OfRank(Arc<LoadPlan>, Shards),
}

/// Shards that a rank reads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shards {
    /// Its own.
    Own,
    /// Its own, through the page cache, also bytes that it does not hold yet: the `ranks` of this machine need the same bytes.
    Cached { ranks: usize },
    /// Parts of the regions of all ranks. Transfers compare groups only, since their destinations are parts of the regions.
    Exchanged,
}

/// Tensors of a selection that are views of a mapped file.
pub(super) struct Views(views::Views);

/// Guard that keeps the bytes of one view mapped.
pub(super) struct ViewGuard {
    _view: views::ViewGuard,
}

/// Span of a load in active profiles, which ends when it is dropped.
pub(super) struct Recording {
    _span: Span,
}

impl Selection {
    pub(super) fn new(selection: selection::Selection, mappings: Arc<Mappings>, reads: Reads) -> Selection {
        Selection { selection, mappings, reads }
    }

    /// Fails if digests were requested that do not cover the regions, or, for a stream, those of whole files, of which it
    /// cannot wait for the last byte. If the request allows regions without digests, logs their names, and keeps these for a
    /// warning of the caller. Before a load writes to memory of the caller, compares the digests of all regions.
    pub(super) fn check(&self, target: ffi::Target) -> Result<()> {
        let (checkpoint, regions) = (self.selection.checkpoint(), self.selection.regions());
        guard(|| {
            if target == ffi::Target::Streamed {
                checkpoint.check_streamable()?;
            }
            checkpoint.check_coverage(regions)?;
            if target == ffi::Target::Existing {
                check::check_regions(checkpoint, regions, &Options::from_env()?)?;
            }
            Ok(())
        })
    }

    /// Returns the path or URL of the file that holds a region.
    pub(super) fn path(&self, index: usize) -> String {
        let source = self.selection.regions().get(index).map(|region| region.source);
        let source = source.and_then(|source| self.selection.checkpoint().sources().nth(source));
        source.map_or_else(String::new, |source| source.path().to_string_lossy().into_owned())
    }

    /// Begins the span of a load to a device: of some bytes of this selection, or of all if the number is negative.
    pub(super) fn record(&self, device: &str, bytes: i64) -> Box<Recording> {
        // A load to the device "meta" transfers no bytes.
        let is_counted = device != "meta";
        let all = || if is_counted { self.selection.regions().iter().map(TensorRegion::bytes).sum() } else { 0 };
        let bytes = u64::try_from(bytes).unwrap_or_else(|_| all());
        profile::count(Count::Tensors, self.selection.regions().len());
        let detail = || {
            let sources = self.selection.checkpoint().sources();
            let paths: Vec<_> = sources.map(|source| source.path().to_string_lossy()).collect();
            json!({ "paths": paths, "device": device, "tensors": self.selection.regions().len() }).into()
        };
        Box::new(Recording { _span: profile::span(Stage::Load).bytes(bytes).detail(detail) })
    }

    pub(super) fn in_file_order(&self) -> Vec<usize> {
        self.selection.in_file_order()
    }

    /// Returns what C++ allocates for a load with these rules.
    pub(super) fn specs(&self, rules: &[ffi::DtypeRule]) -> Result<Vec<ffi::Spec>> {
        let with_target = |(spec, dtype)| Ok(ffi::Spec { target_type: scalar_type(dtype)?, ..spec });
        guard(|| {
            let specs: Vec<ffi::Spec> = self.selection.regions().iter().map(spec).collect::<Result<_>>()?;
            if rules.is_empty() {
                return Ok(specs);
            }
            specs.into_iter().zip(self.selection.dtypes(&dtype_rules::rules(rules))?).map(with_target).collect()
        })
    }

    /// Copies the first region to memory on the host, and returns whether it may be read in this way.
    ///
    /// # Safety
    /// The caller meets the conditions of [`small::read`].
    pub(super) unsafe fn read_small(&self, address: u64) -> Result<bool> {
        guard(|| {
            let Some(region) = self.selection.regions().first() else { return Ok(false) };
            // SAFETY: the caller's promise.
            unsafe { small::read(self.selection.checkpoint(), region, &Options::from_env()?, address) }
        })
    }

    /// Maps the files of tensors that need no copy on the CPU for their target dtypes. Compares the digests of these tensors
    /// with `is_verified`.
    pub(super) fn views(&self, specs: &[ffi::Spec], is_verified: bool) -> Result<ffi::MappedViews> {
        guard(|| {
            let dtypes: Vec<_> = specs.iter().map(|spec| Dtype::from_scalar_type(spec.target_type)).collect();
            let (checkpoint, regions) = (self.selection.checkpoint(), self.selection.regions());
            let options = Options::from_env()?;
            let views = views::Views::open(checkpoint, &self.mappings, regions, &dtypes, &options)?;
            if is_verified {
                views.verify()?;
            }
            let addresses = (0..regions.len()).map(|tensor| views.address(tensor).unwrap_or(0)).collect();
            Ok(ffi::MappedViews { views: Box::new(Views(views)), addresses })
        })
    }

    /// Opens a transfer to the GPU with this ordinal, or to the host if it is negative.
    pub(super) fn transfer(&self, ordinal: i32, stream: u64) -> Result<Box<AnyTransfer>> {
        guard(|| {
            let transfer = match ordinal {
                ..0 => OnDevice::Host(self.transfer_to(Host)?),
                _ => OnDevice::Cuda(self.transfer_to(Cuda::open(ordinal, stream)?)?),
            };
            Ok(Box::new(AnyTransfer::new(transfer)))
        })
    }

    fn transfer_to<D: Device>(&self, device: D) -> Result<BackgroundTransfer<D>> {
        let (checkpoint, regions) = (self.selection.checkpoint(), Arc::clone(self.selection.regions()));
        let (leaves_gaps, shards) = match &self.reads {
            Reads::Alone | Reads::BesideOthers => (false, Shards::Own),
            Reads::OfRank(group, shards) => (group.leaves_gaps(), *shards),
        };
        let shares_disk = matches!(self.reads, Reads::BesideOthers);
        let mut options = Options { leaves_gaps, shares_disk, ..Options::from_env()? };
        if let Shards::Cached { ranks } = shards {
            options = shared_cache::prepare(checkpoint, &regions, ranks, options);
        }
        let open = if shards == Shards::Exchanged { Transfer::open_divided } else { Transfer::open };
        Ok(BackgroundTransfer::new(open(checkpoint, regions, Arc::new(device), options)?, checkpoint))
    }

    /// Opens a stream to the GPU with this ordinal, or to the host if it is negative.
    pub(super) fn stream(&self, ordinal: i32, stream: u64, order: ffi::Order) -> Result<Box<AnyStream>> {
        guard(|| {
            let stream = match ordinal {
                ..0 => OnDevice::Host(self.stream_to(Host, order)?),
                _ => OnDevice::Cuda(self.stream_to(Cuda::open(ordinal, stream)?, order)?),
            };
            Ok(Box::new(AnyStream::new(stream, Arc::clone(self.selection.regions()))))
        })
    }

    fn stream_to<D: Device>(&self, device: D, order: ffi::Order) -> Result<Stream<D>> {
        let order = if order == ffi::Order::Ready { Order::Ready } else { Order::Submitted };
        let (checkpoint, regions) = (self.selection.checkpoint(), Arc::clone(self.selection.regions()));
        Stream::open(checkpoint, regions, Arc::new(device), Options::from_env()?, order)
    }
}

/// Returns what C++ allocates for a region whose dtype stays as it is.
pub(super) fn spec(region: &TensorRegion) -> Result<ffi::Spec> {
    let scalar_type = scalar_type(region.dtype)?;
    Ok(ffi::Spec {
        name: region.name.to_string(),
        scalar_type,
        target_type: scalar_type,
        shape: signed(&region.shape)?,
        bytes: region.bytes(),
        is_small: small::is_small(region),
    })
}

/// Returns sizes as PyTorch has them.
pub(super) fn signed(sizes: &[u64]) -> Result<Vec<i64>> {
    sizes.iter().map(|&size| signed_size(size)).collect()
}

fn signed_size(size: u64) -> Result<i64> {
    i64::try_from(size).map_err(|_| Error::new(Kind::InvalidArgument, format!("{size} exceeds a 64-bit size")))
}

impl Views {
    pub(super) fn guard(&self, tensor: usize) -> Result<Box<ViewGuard>> {
        guard(|| Ok(Box::new(ViewGuard { _view: self.0.guard(tensor)? })))
    }
}
