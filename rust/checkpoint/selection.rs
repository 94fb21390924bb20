//! Requested regions of one load: all tensors of a checkpoint, or whole tensors or regions by name, in the caller's
//! order.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::dtype_rules::DtypeRules;
use crate::checkpoint::region::{IndexRange, TensorRegion, torch_shape};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::format::header::Entry;
use crate::num::{to_u64, to_usize};
use crate::profile::{self, Stage};
use std::sync::Arc;

/// Requested regions of one checkpoint.
pub struct Selection {
    checkpoint: Arc<Checkpoint>,
    regions: Arc<[TensorRegion]>,
}

/// Index region for each named tensor: the concatenated values of all dimensions of all tensors.
#[derive(Clone, Copy, Debug)]
pub struct IndexRegions<'a> {
    /// First index.
    pub starts: &'a [i64],
    /// Number of indices.
    pub lengths: &'a [i64],
    /// Distance between consecutive indices.
    pub steps: &'a [i64],
}

/// Slice along one dimension of each named tensor.
#[derive(Clone, Copy, Debug)]
pub struct Slices<'a> {
    /// Dimension of each tensor. A negative one counts from the last.
    pub dims: &'a [i64],
    /// First index.
    pub starts: &'a [i64],
    /// Number of indices.
    pub lengths: &'a [i64],
}

impl Selection {
    /// Selects every tensor, in the order of the files and of the bytes in each.
    pub fn all(checkpoint: &Arc<Checkpoint>) -> Result<Selection> {
        Selection::select(checkpoint, || {
            let whole =
                |(source, entry)| TensorRegion::whole(source, entry).map_err(|error| checkpoint.locate(source, error));
            checkpoint.entries().map(whole).collect()
        })
    }

    /// Selects the tensors with these names.
    pub fn named(checkpoint: &Arc<Checkpoint>, names: &[String]) -> Result<Selection> {
        Selection::select(checkpoint, || names.iter().map(|name| find(checkpoint, name, TensorRegion::whole)).collect())
    }

    /// Selects an index region of each named tensor. Fails with `invalid-argument` if the number of starts, lengths or
    /// steps differs from the number of dimensions of all tensors, or a value is negative, and with the errors of
    /// [`Checkpoint::find`] and [`TensorRegion::indexed`].
    pub fn index_regions(
        checkpoint: &Arc<Checkpoint>,
        names: &[String],
        index_regions: IndexRegions<'_>,
    ) -> Result<Selection> {
        Selection::select(checkpoint, || {
            let IndexRegions { starts, lengths, steps } = index_regions;
            let mut index_ranges = starts.iter().zip(lengths).zip(steps);
            let count = index_ranges.len();
            let indexed = |name: &String| {
                find(checkpoint, name, |source, entry| {
                    // Too few ranges raise the length error of `TensorRegion::indexed`.
                    let own = index_ranges.by_ref().take(entry.shape.len()).map(index_range);
                    let own = own.collect::<Result<Vec<_>>>().map_err(|error| error.tensor(entry.name))?;
                    TensorRegion::indexed(source, entry, &own)
                })
            };
            let regions: Vec<TensorRegion> = names.iter().map(indexed).collect::<Result<_>>()?;
            if index_ranges.len() > 0 || [starts.len(), lengths.len(), steps.len()] != [count; 3] {
                return Err(Error::new(
                    Kind::InvalidArgument,
                    format!(
                        "the {} tensors have {} dimensions in all, but there are {} starts, {} lengths and {} steps; \
                         give one of each for every dimension",
                        names.len(),
                        regions.iter().map(|tensor| tensor.shape.len()).sum::<usize>(),
                        starts.len(),
                        lengths.len(),
                        steps.len()
                    ),
                ));
            }
            Ok(regions)
        })
    }

    /// Selects a slice of each named tensor along one of its dimensions. Fails with `invalid-argument` if there is not
    /// one slice for each name, or a tensor has no such dimension, and with the errors of [`Checkpoint::find`] and
    /// [`TensorRegion::indexed`].
    pub fn slices(checkpoint: &Arc<Checkpoint>, names: &[String], slices: Slices<'_>) -> Result<Selection> {
        let Slices { dims, starts, lengths } = slices;
        let invalid = |message| Error::new(Kind::InvalidArgument, message);
        let count = names.len();
        if [dims.len(), starts.len(), lengths.len()] != [count; 3] {
            return Err(invalid(format!(
                "{count} names, but {} dims, {} starts and {} lengths; give one of each for every name",
                dims.len(),
                starts.len(),
                lengths.len()
            )));
        }
        let sliced = |(((name, &dim), start), length): (((&String, &i64), &i64), &i64)| {
            find(checkpoint, name, |source, entry| {
                let mut own: Vec<_> = torch_shape(entry)?.into_iter().map(IndexRange::whole).collect();
                let (shape, rank) = (own.iter().map(|range| range.length).collect::<Vec<_>>(), own.len());
                let index = if dim < 0 { to_u64(rank).checked_add_signed(dim) } else { u64::try_from(dim).ok() };
                let range = index.and_then(|index| own.get_mut(to_usize(index))).ok_or_else(|| {
                    let message = format!("dimension {dim} of a tensor with shape {shape:?}; it has {rank} dimensions");
                    invalid(message).tensor(entry.name)
                })?;
                *range = index_range(((start, length), &1)).map_err(|error| error.tensor(entry.name))?;
                TensorRegion::indexed(source, entry, &own)
            })
        };
        Selection::select(checkpoint, || names.iter().zip(dims).zip(starts).zip(lengths).map(sliced).collect())
    }

    /// Selects a tensor, or an index region of it: `ranges` is empty, or has a start, a length and a step for each dimension.
    pub fn region(checkpoint: &Arc<Checkpoint>, name: &str, ranges: &[i64]) -> Result<Selection> {
        let (ranges, rest) = ranges.as_chunks();
        let indexed = |source, entry: Entry<'_>| match ranges {
            [] => TensorRegion::whole(source, entry),
            ranges => {
                let own = ranges.iter().map(|[start, length, step]| index_range(((start, length), step)));
                let own = own.collect::<Result<Vec<_>>>().map_err(|error| error.tensor(entry.name))?;
                TensorRegion::indexed(source, entry, &own)
            }
        };
        if !rest.is_empty() {
            return Err(Error::new(Kind::InvalidArgument, "give a start, a length and a step for each dimension"));
        }
        Selection::select(checkpoint, || Ok(vec![find(checkpoint, name, indexed)?]))
    }

    /// Selects the regions that a group plan assigns to a rank.
    pub fn from_regions(checkpoint: &Arc<Checkpoint>, regions: Arc<[TensorRegion]>) -> Selection {
        Selection { checkpoint: Arc::clone(checkpoint), regions }
    }

    fn select(checkpoint: &Arc<Checkpoint>, choose: impl FnOnce() -> Result<Vec<TensorRegion>>) -> Result<Selection> {
        let _span = profile::span(Stage::Plan);
        Ok(Selection { checkpoint: Arc::clone(checkpoint), regions: choose()?.into() })
    }

    /// Returns the checkpoint.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }

    /// Returns the requested regions.
    pub fn regions(&self) -> &Arc<[TensorRegion]> {
        &self.regions
    }

    /// Returns the dtype of each region in a load with these rules. Only castable dtypes are cast.
    pub fn dtypes(&self, rules: &DtypeRules) -> Result<Vec<Dtype>> {
        let names = self.regions.iter().map(|region| &*region.name);
        let all = || self.checkpoint.all_names();
        let requested = rules.resolve(names, all).map_err(|error| self.checkpoint.locate(0, error))?;
        let dtype = |(region, requested): (&TensorRegion, Option<Dtype>)| {
            requested.filter(|_| region.dtype.is_castable()).unwrap_or(region.dtype)
        };
        Ok(self.regions.iter().zip(requested).map(dtype).collect())
    }

    /// Returns the positions of the regions, sorted by file and by their first byte.
    pub fn in_file_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.regions.len()).collect();
        order.sort_by_key(|&index| self.regions.get(index).map(|region| (region.source, region.range.begin)));
        order
    }
}

fn find(
    checkpoint: &Checkpoint,
    name: &str,
    choose: impl FnOnce(usize, Entry<'_>) -> Result<TensorRegion>,
) -> Result<TensorRegion> {
    let (source, entry) = checkpoint.find(name)?;
    choose(source, entry).map_err(|error| checkpoint.locate(source, error))
}

/// Returns a range of a start, a length and a step.
pub(crate) fn index_range(((start, length), step): ((&i64, &i64), &i64)) -> Result<IndexRange> {
    let negative = |_| {
        Error::new(
            Kind::InvalidArgument,
            format!("{length} indices from {start} with step {step}; values must not be negative"),
        )
    };
    let number = |value: i64| u64::try_from(value).map_err(negative);
    Ok(IndexRange { start: number(*start)?, length: number(*length)?, step: number(*step)? })
}
