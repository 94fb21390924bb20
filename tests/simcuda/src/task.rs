//! Tasks of a launch, and the memory that they access.

use crate::region::Region;

/// Bytes of a tile on its wider side.
const TILE_BYTES: u64 = 16 << 10;
/// Positions of a tile.
const TILE_POSITIONS: u64 = 4096;
/// Bytes of a position.
const POSITION_BYTES: u64 = 4;

/// Row of the table, as declared in csrc/kernels/scatter.h.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Task {
    pub source: u64,
    pub target: u64,
    pub row_elements: u64,
    pub source_stride_bytes: u64,
    /// With positions, the last one that may be written.
    pub rows: u32,
    pub first_tile: u32,
    pub from: u8,
    pub to: u8,
    pub put_bytes: u8,
    pub padding: [u8; 5],
}

/// Memory that a task accesses.
pub struct Accesses {
    pub source: Region,
    /// `None` for rows.
    pub positions: Option<Region>,
    /// For positions, from the first to the last.
    pub target: Region,
}

/// Returns the memory that each task accesses, or describes the error in the table.
pub fn accesses_of(tasks: &[Task], positions: &[Vec<u8>], tile_count: u32) -> Result<Vec<Accesses>, String> {
    let mut next_tile = 0;
    let mut accesses = Vec::with_capacity(tasks.len());
    for (task, positions) in tasks.iter().zip(positions) {
        let (source_bytes, target_bytes) =
            task.item_bytes().ok_or_else(|| format!("there is no such cast: {task:?}"))?;
        if !task.is_aligned(target_bytes) {
            return Err(format!("the target is not aligned: {task:?}"));
        }
        if u64::from(task.first_tile) != next_tile {
            return Err(format!("{next_tile} tiles come before {task:?}"));
        }
        let rows = if task.put_bytes == 0 { task.rows } else { 1 };
        let elements = task.row_elements.checked_mul(u64::from(rows)).filter(|&elements| elements > 0);
        let accesses_of_task = elements.and_then(|elements| {
            next_tile += if task.put_bytes == 0 {
                elements.div_ceil(TILE_BYTES / source_bytes.max(target_bytes))
            } else {
                elements.div_ceil(TILE_POSITIONS)
            };
            task.accesses(positions)
        });
        accesses.push(accesses_of_task.ok_or_else(|| format!("its sizes or positions are impossible: {task:?}"))?);
    }
    if u64::from(tile_count) != next_tile {
        return Err(format!("the tasks have {next_tile} tiles, and the launch has {tile_count}"));
    }
    // Tasks run in any order, so no task may access a target of another task.
    let mut targets: Vec<Region> = accesses.iter().map(|task| task.target).collect();
    targets.sort_by_key(Region::start);
    if let Some(pair) = targets.windows(2).find(|pair| pair[0].overlaps(&pair[1])) {
        return Err(format!("two tasks write to {} and {}", pair[0], pair[1]));
    }
    for source in accesses.iter().flat_map(|task| [Some(task.source), task.positions]).flatten() {
        let after = targets.partition_point(|target| target.end() <= source.start());
        let near = targets[after..].iter().take_while(|target| target.start() < source.end());
        if let Some(target) = near.into_iter().find(|target| source.overlaps(target)) {
            return Err(format!("one task reads {source}, and another one writes to {target}"));
        }
    }
    Ok(accesses)
}

impl Task {
    pub fn parse(row: &[u8]) -> Task {
        Task {
            source: u64_at(row, 0),
            target: u64_at(row, 8),
            row_elements: u64_at(row, 16),
            source_stride_bytes: u64_at(row, 24),
            rows: u32_at(row, 32),
            first_tile: u32_at(row, 36),
            from: row[40],
            to: row[41],
            put_bytes: row[42],
            padding: [0; 5],
        }
    }

    /// Returns the bytes of an element of the source and of the target, or `None` for an unsupported cast.
    pub fn item_bytes(&self) -> Option<(u64, u64)> {
        let bytes = |dtype: u8| match dtype {
            0 | 1 | 11 | 23..=26 | 44 => Some(1),
            2 | 5 | 15 | 27 => Some(2),
            3 | 6 | 28 => Some(4),
            4 | 7 | 29 => Some(8),
            _ => None,
        };
        match self.to {
            _ if self.put_bytes > 0 => {
                let is_possible = matches!(self.put_bytes, 1 | 2 | 4 | 8 | 16);
                is_possible.then(|| (u64::from(self.put_bytes), u64::from(self.put_bytes)))
            }
            to if to == self.from => Some((1, 1)),
            5..=7 | 15 | 23..=26 | 44 => bytes(self.from).zip(bytes(self.to)),
            _ => None,
        }
    }

    /// Returns whether the addresses are aligned as the kernel expects them.
    pub fn is_aligned(&self, target_bytes: u64) -> bool {
        let is_put_aligned =
            self.source.is_multiple_of(target_bytes) && self.source_stride_bytes.is_multiple_of(POSITION_BYTES);
        self.target.is_multiple_of(target_bytes) && (self.put_bytes == 0 || is_put_aligned)
    }

    /// Returns the region of the positions, or `None` for rows.
    pub fn positions(&self) -> Option<Region> {
        let bytes = self.row_elements.checked_mul(POSITION_BYTES).filter(|_| self.put_bytes > 0)?;
        Region::linear(self.source_stride_bytes, bytes)
    }

    /// Returns the memory that the task accesses, or `None` if its sizes are impossible or its positions do not ascend.
    pub fn accesses(&self, positions: &[u8]) -> Option<Accesses> {
        let (source_bytes, target_bytes) = self.item_bytes()?;
        let row_bytes = self.row_elements.checked_mul(source_bytes)?;
        if self.put_bytes == 0 {
            let stride_bytes = if self.rows == 1 { row_bytes } else { self.source_stride_bytes };
            let source = Region::new(self.source, row_bytes, stride_bytes, u64::from(self.rows))?;
            let elements = self.row_elements.checked_mul(u64::from(self.rows))?;
            let target = Region::linear(self.target, elements.checked_mul(target_bytes)?)?;
            return Some(Accesses { source, positions: None, target });
        }
        let numbers: Vec<u64> = positions.chunks_exact(4).map(|bytes| u64::from(u32_at(bytes, 0))).collect();
        let (first, last) = (*numbers.first()?, (*numbers.last()?).min(u64::from(self.rows)));
        let ascend = numbers.windows(2).all(|pair| pair[0] < pair[1]);
        let begin = self.target.checked_add(first * target_bytes).filter(|_| ascend)?;
        let target = Region::linear(begin, (last - first + 1) * target_bytes)?;
        Some(Accesses { source: Region::linear(self.source, row_bytes)?, positions: Some(self.positions()?), target })
    }
}

pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte))
}
