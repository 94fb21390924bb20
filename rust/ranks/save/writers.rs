//! Ranks that write the bytes of a tensor.
//!
//! The ranks of a group hold the same long runs of the tensor's bytes, each rank a part of them or all of them. They
//! divide every run evenly, in the order of the ranks:
//!
//! ```text
//! tensor   [      run 0     |      run 1     |      run 2     | ..
//! groups   [    ranks 0, 1  |    ranks 2, 3  |   ranks 0, 1   | ..
//! parts    [ 0   | 1        | 2   | 3        | 0  | 1         | ..
//! ```
//!
//! A dimension whose shards would be shorter runs does not divide the ranks into groups.

use super::regions::{Regions, count};
use crate::format::Metadata;
use crate::format::digests::DIGESTS_KEY;
use crate::num::{to_u64, to_usize};
use std::collections::HashMap;
use std::ops::{ControlFlow, Range};

/// Smallest part of a tensor that one rank writes, in bytes, if the tensor has as many. Shorter runs are exchanged, so that
/// writes are longer.
const RUN_BYTES_MIN: u64 = 64 << 10;
/// Most parts of a model in files with digests, apart from small tensors. The first rank gets 1 to 2 KiB of hashes for each
/// part, so 256 MiB at most.
const HASHED_PARTS_MAX: u64 = 128 << 10;
/// Smallest part in files with digests of the largest models.
const HASHED_RUN_BYTES_MAX: u64 = 4 << 20;

/// Returns the smallest part of a tensor that one rank writes, in bytes, for files with this metadata that have `bytes` of
/// tensors.
pub fn run_bytes_min(files: &[Metadata], bytes: u64) -> u64 {
    let has_digests = files.iter().flatten().any(|metadata| metadata.contains_key(DIGESTS_KEY));
    let hashed = (bytes / HASHED_PARTS_MAX).clamp(RUN_BYTES_MIN, HASHED_RUN_BYTES_MAX);
    if has_digests { hashed } else { RUN_BYTES_MIN }
}

/// Division of a tensor of one shape among its ranks.
#[derive(Debug)]
pub(super) struct Writers {
    regions: Regions,
    /// The run of a group is a range of indices of this dimension. `None` if the whole tensor is one run.
    dim: Option<usize>,
    /// Groups in the order of their first byte, which is that of their first region.
    groups: Vec<RunGroup>,
    /// For each group, the largest end of a hull up to it.
    ends: Vec<u64>,
    /// Group of each region.
    group_of_region: Vec<usize>,
    run_bytes_min: u64,
    /// Length of the longest part in bytes.
    pub(super) part_bytes_max: u64,
    /// Largest number of parts of a rank in one row of runs.
    pub(super) parts_max: u64,
    /// Largest number of bytes of a row that a rank holds.
    pub(super) row_bytes_max: u64,
    /// Whether ranks of a group hold different bytes.
    pub(super) is_mixed: bool,
}

/// Ranks that hold the same runs.
#[derive(Debug)]
struct RunGroup {
    /// Ranks, in the order of their regions.
    holders: Vec<usize>,
    /// Region of the first rank. Its indices, up to the dimension of the runs, are the group's.
    region: usize,
    hull: Range<u64>,
}

/// Run of bytes of a tensor, and the ranks that divide it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run<'a> {
    pub(super) begin: u64,
    pub(super) end: u64,
    /// Number of parts.
    count: usize,
    /// Number by which the first writer is moved.
    rotation: usize,
    holders: &'a [usize],
}

impl Run<'_> {
    /// Returns the first byte of a part, or the end of the run for the part after the last.
    pub(super) fn part_begin(&self, part: usize) -> u64 {
        let bytes = u128::from(self.end - self.begin);
        let offset = bytes * u128::from(to_u64(part)) / u128::from(to_u64(self.count));
        self.begin + u64::try_from(offset).unwrap_or(u64::MAX)
    }

    /// Returns the part that has a byte of the run.
    pub(super) fn part_at(&self, byte: u64) -> usize {
        let (bytes, offset) = (u128::from((self.end - self.begin).max(1)), u128::from(byte - self.begin));
        let part = ((offset + 1) * u128::from(to_u64(self.count)) - 1) / bytes;
        usize::try_from(part).unwrap_or(usize::MAX).min(self.count - 1)
    }

    /// Returns the rank that writes a part.
    pub(super) fn writer(&self, part: usize) -> usize {
        // A part has a writer near its bytes. Of those, tensors take turns.
        let ranks = self.holders.len();
        let index = (part * ranks + self.rotation % ranks.max(1)) / self.count;
        self.holders.get(index).copied().unwrap_or(0)
    }

    /// Returns the part of the rank that is the holder at `index`, if it writes one.
    fn part_of(&self, index: usize) -> Option<usize> {
        let rank = self.holders.get(index).copied()?;
        let near = index * self.count / self.holders.len();
        (near.saturating_sub(1)..self.count.min(near + 2)).find(|&part| self.writer(part) == rank)
    }
}

impl Writers {
    pub(super) fn new(regions: Regions, run_bytes_min: u64) -> Writers {
        let ndim = regions.shape().len();
        let mut below = ndim;
        let (dim, group_of_region, firsts) = loop {
            let is_sharded = |&dim: &usize| (0..regions.len()).any(|region| !regions.is_whole(region, dim));
            let Some(dim) = (0..below).rev().find(is_sharded) else {
                break (None, vec![0; regions.len()], Vec::from_iter((regions.len() > 0).then_some(0)));
            };
            let (group_of_region, firsts) = group_regions(&regions, dim);
            if is_worthwhile(&regions, dim, &firsts, run_bytes_min) {
                break (Some(dim), group_of_region, firsts);
            }
            below = dim;
        };
        let mut groups: Vec<RunGroup> =
            firsts.iter().map(|&region| RunGroup { holders: Vec::new(), region, hull: regions.hull(region) }).collect();
        let mut is_mixed = false;
        for (region, &group) in group_of_region.iter().enumerate() {
            if let Some(group) = groups.get_mut(group) {
                is_mixed |= !group.holders.is_empty();
                group.holders.extend(regions.holders(region));
                let hull = regions.hull(region);
                group.hull = group.hull.start.min(hull.start)..group.hull.end.max(hull.end);
            }
        }
        let mut end = 0;
        let end_up_to = |group: &RunGroup| {
            end = group.hull.end.max(end);
            end
        };
        let ends = groups.iter().map(end_up_to).collect();
        let mut writers = Writers {
            regions,
            dim,
            groups,
            ends,
            group_of_region,
            run_bytes_min,
            part_bytes_max: 0,
            parts_max: 1,
            row_bytes_max: 0,
            is_mixed,
        };
        writers.measure();
        writers
    }

    fn measure(&mut self) {
        let (mut part_bytes_max, mut parts_max) = (0, 1);
        for group in &self.groups {
            let lengths: Vec<u64> = match self.dim {
                Some(dim) => self.regions.set(group.region, dim).iter().map(|run| run.end - run.start).collect(),
                None => vec![1],
            };
            parts_max = to_u64(lengths.len()).max(parts_max);
            let stride = self.dim.map_or(self.bytes(), |dim| self.regions.stride(dim));
            for bytes in lengths.into_iter().map(|length| length * stride) {
                part_bytes_max =
                    bytes.div_ceil(to_u64(self.part_count(bytes, group.holders.len()))).max(part_bytes_max);
            }
        }
        (self.part_bytes_max, self.parts_max) = (part_bytes_max, parts_max);
        self.row_bytes_max = (0..self.regions.len()).map(|region| self.row_bytes_of(region)).max().unwrap_or(0);
    }

    /// Returns the number of bytes of a region in a row of runs.
    fn row_bytes_of(&self, region: usize) -> u64 {
        let rows: u64 = (0..self.dim.unwrap_or(0)).map(|dim| count(self.regions.set(region, dim))).product();
        self.regions.bytes(region).checked_div(rows).unwrap_or(0)
    }

    fn part_count(&self, bytes: u64, holders: usize) -> usize {
        to_usize(bytes / self.run_bytes_min.max(1)).clamp(1, holders.max(1))
    }

    pub(super) fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Returns the size of the tensor in bytes.
    fn bytes(&self) -> u64 {
        let first = self.regions.shape().first().copied();
        first.map_or(self.regions.stride(0), |size| size * self.regions.stride(0))
    }

    /// Returns the number of bytes from the first byte of a row of runs to the next row. A row has one or more runs of
    /// each group that has indices there.
    pub(super) fn row_bytes(&self) -> u64 {
        match self.dim {
            Some(dim) => self.regions.stride(dim) * self.regions.shape().get(dim).copied().unwrap_or(1),
            None => self.bytes(),
        }
    }

    /// Returns the number of rows of runs.
    pub(super) fn rows(&self) -> u64 {
        self.bytes().checked_div(self.row_bytes()).unwrap_or(0)
    }

    /// Appends the ranks that write the tensor at `position` to a list, unless they may be more than `most`. Returns whether
    /// the list is complete.
    pub(super) fn list_writers(&self, position: usize, most: usize, list: &mut Vec<usize>) -> bool {
        if self.dim.is_none() {
            let Some(run) = self.run(0, 0, self.bytes(), position).filter(|run| run.count <= most) else {
                return false;
            };
            list.extend((0..run.count).map(|part| run.writer(part)));
            return true;
        }
        // A group has at least one rank.
        if self.groups.len() > most {
            return false;
        }
        list.extend(self.groups.iter().flat_map(|group| &group.holders));
        list.len() <= most
    }

    /// Returns, for slices of `length` bytes of the parts, the largest number of bytes that a rank holds in the slices of all
    /// writers of a row.
    pub(super) fn held_bytes_max(&self, length: u64) -> u64 {
        let held = |(region, &group): (usize, &usize)| {
            let count = self.groups.get(group).map_or(1, |group| group.holders.len());
            let slices = to_u64(count).saturating_mul(self.parts_max);
            self.regions.bytes_within(region, length).saturating_mul(slices).min(self.row_bytes_of(region))
        };
        self.group_of_region.iter().enumerate().map(held).max().unwrap_or(0)
    }

    fn run(&self, group: usize, begin: u64, end: u64, position: usize) -> Option<Run<'_>> {
        let holders = self.groups.get(group)?.holders.as_slice();
        let row = begin.checked_div(self.row_bytes()).unwrap_or(0);
        let count = self.part_count(end - begin, holders.len());
        Some(Run { begin, end, count, rotation: position.wrapping_add(to_usize(row)), holders })
    }

    /// Returns the run that has a byte of the tensor at `position` of the plan.
    pub(super) fn run_at(&self, byte: u64, position: usize) -> Option<Run<'_>> {
        let Some(dim) = self.dim else { return self.run(0, 0, self.bytes(), position) };
        let end = self.groups.partition_point(|group| group.hull.start <= byte);
        let first = self.ends.partition_point(|&end| end <= byte);
        (first..end).rev().find_map(|group| {
            let region = self.groups.get(group)?.region;
            let range = byte..byte + 1;
            let mut is_here = false;
            let _ = self.regions.for_each_range(region, Some(dim), &range, &mut |_| {
                is_here = true;
                ControlFlow::Break(())
            });
            if !is_here {
                return None;
            }
            let stride = self.regions.stride(dim);
            let row = byte - byte % self.row_bytes();
            let index = (byte - row) / stride;
            let run = self.regions.set(region, dim).iter().find(|run| run.contains(&index))?;
            self.run(group, row + run.start * stride, row + run.end * stride, position)
        })
    }

    /// Calls `visit` with each run of the group of a rank, and the part that the rank writes.
    pub(super) fn for_each_run(&self, rank: usize, position: usize, mut visit: impl FnMut(&Run<'_>, Option<usize>)) {
        let Some((region, _)) = self.regions.of_rank(rank) else { return };
        let Some(&group) = self.group_of_region.get(region) else { return };
        let Some(own) = self.groups.get(group) else { return };
        let Some(index) = own.holders.iter().position(|&holder| holder == rank) else { return };
        let _ = self.regions.for_each_range(own.region, self.dim, &(0..self.bytes()), &mut |range| {
            if let Some(run) = self.run(group, range.start, range.end, position) {
                visit(&run, run.part_of(index));
            }
            ControlFlow::Continue(())
        });
    }
}

/// Divides regions into groups that have the same indices up to dimension `dim`. Returns the group of each region and the
/// first region of each group.
fn group_regions(regions: &Regions, dim: usize) -> (Vec<usize>, Vec<usize>) {
    let mut known: HashMap<Vec<usize>, usize> = HashMap::with_capacity(regions.len());
    let mut firsts = Vec::new();
    let group = |region: usize| {
        let key: Vec<usize> = (0..=dim).map(|dim| regions.set_index(region, dim)).collect();
        *known.entry(key).or_insert_with(|| {
            firsts.push(region);
            firsts.len() - 1
        })
    };
    let groups = (0..regions.len()).map(group).collect();
    (groups, firsts)
}

/// Returns whether groups of the same indices up to a dimension have long runs, and no index in common.
fn is_worthwhile(regions: &Regions, dim: usize, firsts: &[usize], run_bytes_min: u64) -> bool {
    let (mut indices, mut runs) = (0, 0);
    for &region in firsts {
        let outer: u64 = (0..dim).map(|dim| count(regions.set(region, dim))).product();
        indices += outer * count(regions.set(region, dim));
        runs += outer * to_u64(regions.set(region, dim).len());
    }
    let all: u64 = regions.shape().iter().take(dim + 1).product();
    indices == all && all * regions.stride(dim) >= runs * run_bytes_min
}
