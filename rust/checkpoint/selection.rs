//! What one load wants of a checkpoint: all tensors, those that are named, or
//! parts of them, in the order in which the caller has named them.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::region::{IndexRange, TensorRegion};
use crate::error::{Error, Kind, Result};
use crate::format::header::Entry;
use crate::profile::{self, Stage};
use std::sync::Arc;

/// Tensors and parts of tensors of one checkpoint.
pub struct Selection {
    checkpoint: Arc<Checkpoint>,
    regions: Arc<[TensorRegion]>,
}

/// One dimension of each tensor that is named.
#[derive(Clone, Copy, Debug)]
pub struct Slices<'a> {
    /// Which dimension; a negative one counts from the last.
    pub dims: &'a [i64],
    /// The first index.
    pub starts: &'a [i64],
    /// The number of indices.
    pub lengths: &'a [i64],
}

/// All dimensions of each tensor that is named, those of the second behind those of the first, and so on.
#[derive(Clone, Copy, Debug)]
pub struct IndexRegions<'a> {
    /// The first index.
    pub starts: &'a [i64],
    /// The number of indices.
    pub lengths: &'a [i64],
    /// From one index to the next.
    pub steps: &'a [i64],
}

impl Selection {
    /// Every tensor, in the order of the files and of the bytes in each.
    ///
    /// # Errors
    /// Those of [`TensorRegion::whole`].
    pub fn all(checkpoint: &Arc<Checkpoint>) -> Result<Selection> {
        Selection::of(checkpoint, || {
            let whole = |(source, entry)| locate(checkpoint, source, TensorRegion::whole(source, entry));
            checkpoint.entries().map(whole).collect()
        })
    }

    /// The tensors with these names.
    ///
    /// # Errors
    /// Those of [`Checkpoint::find`] and [`TensorRegion::whole`].
    pub fn named(checkpoint: &Arc<Checkpoint>, names: &[String]) -> Result<Selection> {
        Selection::of(checkpoint, || names.iter().map(|name| find(checkpoint, name, TensorRegion::whole)).collect())
    }

    /// A slice of each tensor that is named.
    ///
    /// # Errors
    /// `invalid-argument` where there is not one slice for each name, and those of [`Checkpoint::find`] and
    /// [`TensorRegion::slice`].
    pub fn slices(checkpoint: &Arc<Checkpoint>, names: &[String], slices: Slices<'_>) -> Result<Selection> {
        Selection::of(checkpoint, || {
            let Slices { dims, starts, lengths } = slices;
            let count = names.len();
            if [dims.len(), starts.len(), lengths.len()] != [count; 3] {
                return Err(Error::new(
                    Kind::InvalidArgument,
                    format!(
                        "{count} names, but {} dims, {} starts and {} lengths; give one of each for every name",
                        dims.len(),
                        starts.len(),
                        lengths.len()
                    ),
                ));
            }
            let slices = names.iter().zip(dims).zip(starts).zip(lengths);
            let slice = |(((name, &dim), &start), &length): (((&String, &i64), &i64), &i64)| {
                find(checkpoint, name, |source, entry| TensorRegion::slice(source, entry, dim, start, length))
            };
            slices.map(slice).collect()
        })
    }

    /// A box of each tensor that is named.
    ///
    /// # Errors
    /// `invalid-argument` where there are not as many starts, lengths and steps as the tensors have dimensions, or
    /// where one is negative, and those of [`Checkpoint::find`] and [`TensorRegion::indexed`].
    pub fn index_regions(
        checkpoint: &Arc<Checkpoint>,
        names: &[String],
        index_regions: IndexRegions<'_>,
    ) -> Result<Selection> {
        Selection::of(checkpoint, || {
            let IndexRegions { starts, lengths, steps } = index_regions;
            let index_ranges: Vec<IndexRange> =
                starts.iter().zip(lengths).zip(steps).map(index_range).collect::<Result<_>>()?;
            let mut left = index_ranges.as_slice();
            let indexed = |name: &String| {
                find(checkpoint, name, |source, entry| {
                    // Whoever gives too few gets the error for their number.
                    let (own, others) = left.split_at_checked(entry.shape.len()).unwrap_or((left, &[]));
                    left = others;
                    TensorRegion::indexed(source, entry, own)
                })
            };
            let regions: Vec<TensorRegion> = names.iter().map(indexed).collect::<Result<_>>()?;
            if !left.is_empty() || [starts.len(), lengths.len(), steps.len()] != [index_ranges.len(); 3] {
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

    /// What a plan for a group has chosen.
    pub fn from_regions(checkpoint: &Arc<Checkpoint>, regions: Arc<[TensorRegion]>) -> Selection {
        Selection { checkpoint: Arc::clone(checkpoint), regions }
    }

    fn of(checkpoint: &Arc<Checkpoint>, choose: impl FnOnce() -> Result<Vec<TensorRegion>>) -> Result<Selection> {
        let _span = profile::span(Stage::Plan);
        Ok(Selection { checkpoint: Arc::clone(checkpoint), regions: choose()?.into() })
    }

    /// The checkpoint it is of.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }

    /// What is wanted.
    pub fn regions(&self) -> &Arc<[TensorRegion]> {
        &self.regions
    }

    /// The tensors by where their bytes begin: file after file, and in each from its start on.
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
    locate(checkpoint, source, choose(source, entry))
}

/// Adds the file's name to an error of what is wanted, which knows no files.
fn locate(checkpoint: &Checkpoint, source: usize, region: Result<TensorRegion>) -> Result<TensorRegion> {
    region.map_err(|error| match checkpoint.source(source) {
        Ok(source) => error.at(&source.path),
        Err(_) => error,
    })
}

fn index_range(((start, length), step): ((&i64, &i64), &i64)) -> Result<IndexRange> {
    let negative = |_| {
        Error::new(
            Kind::InvalidArgument,
            format!("{length} indices from {start} with step {step}; negative numbers have no meaning here"),
        )
    };
    let number = |value: i64| u64::try_from(value).map_err(negative);
    Ok(IndexRange { start: number(*start)?, length: number(*length)?, step: number(*step)? })
}
