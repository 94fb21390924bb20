//! Launches of the kernels of fst.
//!
//! The table of tasks lists all memory that a launch reads and writes. Copies
//! that were queued earlier write a table in device memory, so the content of the
//! table is known when the launch is queued (see
//! [`DeviceMemory::read_expected`](crate::memory::DeviceMemory::read_expected)).
//! The checks take place then, in the order of the calls. When the launch runs, it
//! compares the table with the expected content.

use crate::abi::{Kind, POISON, Status};
use crate::driver::{Driver, SharedDriver};
use crate::fault::Outcome;
use crate::host::read_host;
use crate::module::Kernel;
use crate::region::Region;
use crate::stream::Work;

/// Bytes of a task in a table.
const TASK_BYTES: u64 = 48;
/// Tasks that fit into the parameters of a launch.
const BATCH_TASKS: u64 = 85;
/// Bytes of a tile on its wider side.
const TILE_BYTES: u64 = 16 << 10;
/// Largest number of threads per block for which the kernels are compiled.
const BLOCK_THREADS_MAX: u32 = 256;
/// Alignment of a table, in bytes.
const TABLE_ALIGNMENT: u64 = 8;
/// Guard bytes before and after a buffer, which detect writes out of bounds. A
/// multiple of 16, to preserve alignments.
const GUARD_BYTES: usize = 64;

/// Sizes of a launch, as passed to the driver.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    /// Blocks in three dimensions.
    pub blocks: [u32; 3],
    /// Threads of a block in three dimensions.
    pub threads: [u32; 3],
    /// Shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Whether the call passes packed parameters in `extra`.
    pub has_extra: bool,
}

/// Queued launch.
#[derive(Debug)]
pub struct Launch {
    tasks: Vec<Task>,
    tile_count: u32,
    blocks: u32,
    threads: u32,
    /// Region and expected bytes of a table in device memory, or `None` for a table in the parameters.
    table: Option<(Region, Vec<u8>)>,
}

/// Row of the table, as declared in csrc/kernels/scatter.h.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Task {
    source: u64,
    target: u64,
    row_elements: u64,
    source_stride_bytes: u64,
    rows: u32,
    first_tile: u32,
    from: u8,
    to: u8,
    padding: [u8; 6],
}

unsafe extern "C" {
    /// Runs the kernel on tasks with host addresses.
    fn fst_sim_scatter(tasks: *const Task, task_count: u32, tile_count: u32, blocks: u32, threads: u32);
}

/// Runs the kernel on host memory of the calling test, unchecked.
///
/// # Safety
/// `tasks` points to `task_count` tasks, whose addresses are valid for the lengths that the tasks declare.
pub unsafe fn run_on_host(tasks: *const u8, task_count: u32, tile_count: u32, blocks: u32, threads: u32) {
    // SAFETY: guaranteed by the caller.
    unsafe { fst_sim_scatter(tasks.cast(), task_count, tile_count, blocks, threads) };
}

impl Driver {
    /// `cuLaunchKernel`. `parameters` is the host address of the array of parameter
    /// addresses. The call reads all parameters, and never again.
    pub fn launch(&mut self, function: usize, grid: Grid, stream: usize, parameters: u64) -> Result<(), Status> {
        let kernel = self.kernel(function)?;
        let stream = self.stream_for_work("launch", stream)?;
        let bad = |driver: &mut Driver, text: String| {
            driver.report(Kind::BadLaunch, text);
            Status::InvalidValue
        };
        let ([blocks, 1, 1], [threads, 1, 1], 0, false) =
            (grid.blocks, grid.threads, grid.shared_bytes, grid.has_extra)
        else {
            return Err(bad(self, format!("the kernels do not support {grid:?}")));
        };
        if blocks == 0 || blocks > i32::MAX as u32 || threads == 0 || threads > BLOCK_THREADS_MAX {
            return Err(bad(self, format!("a launch of {blocks} blocks of {threads} threads")));
        }
        match self.faults.launch() {
            Outcome::Rejected => Err(Status::LaunchOutOfResources),
            outcome => {
                let (table, bytes, tile_count) = self.table_of(kernel, parameters)?;
                let tasks: Vec<Task> = bytes.chunks_exact(TASK_BYTES as usize).map(Task::parse).collect();
                let regions = regions_of(&tasks, tile_count).map_err(|text| bad(self, text))?;
                let reads = table.iter().copied().chain(regions.iter().map(|&(source, _)| source));
                let writes = regions.iter().map(|&(_, target)| target);
                let accesses: Vec<(Region, bool)> =
                    reads.map(|region| (region, false)).chain(writes.map(|region| (region, true))).collect();
                // Check all regions first: a rejected launch accesses no memory.
                accesses.iter().try_for_each(|(region, _)| self.check_live(region, "scatter"))?;
                accesses
                    .iter()
                    .try_for_each(|&(region, writes)| self.access_on_stream(stream, region, writes, "scatter"))?;
                self.counters.launches += 1;
                let table = table.map(|region| (region, bytes));
                self.push(stream, outcome.of(Work::Launch(Launch { tasks, tile_count, blocks, threads, table })));
                Ok(())
            }
        }
    }

    /// Returns the region of a table in device memory, the bytes of the table, and its number of tiles.
    fn table_of(&mut self, kernel: Kernel, parameters: u64) -> Result<(Option<Region>, Vec<u8>, u32), Status> {
        match kernel {
            Kernel::Scatter => {
                let address = u64_at(&parameter(parameters, 0, 8)?, 0);
                let task_count = u32_at(&parameter(parameters, 1, 4)?, 0);
                let tile_count = u32_at(&parameter(parameters, 2, 4)?, 0);
                let Some(region) = Region::linear(address, TASK_BYTES * u64::from(task_count)) else {
                    self.report(Kind::BadLaunch, format!("a table of {task_count} tasks at {address:#x}"));
                    return Err(Status::InvalidValue);
                };
                if !address.is_multiple_of(TABLE_ALIGNMENT) {
                    self.report(Kind::BadLaunch, format!("the table at {address:#x} is not aligned"));
                    return Err(Status::InvalidValue);
                }
                self.check_live(&region, "table of a scatter")?;
                let bytes = self.memory.read_expected(&region).ok_or(Status::InvalidValue)?;
                Ok((Some(region), bytes, tile_count))
            }
            Kernel::ScatterInline => {
                let mut batch = parameter(parameters, 0, 8 + BATCH_TASKS * TASK_BYTES)?;
                let (task_count, tile_count) = (u32_at(&batch, 0), u32_at(&batch, 4));
                if task_count == 0 || u64::from(task_count) > BATCH_TASKS {
                    self.report(Kind::BadLaunch, format!("{task_count} tasks in the parameters"));
                    return Err(Status::InvalidValue);
                }
                batch.truncate(8 + task_count as usize * TASK_BYTES as usize);
                Ok((None, batch.split_off(8), tile_count))
            }
        }
    }
}

/// Returns the bytes of one parameter of a launch.
fn parameter(parameters: u64, index: u64, bytes: u64) -> Result<Vec<u8>, Status> {
    let read = |address: u64, bytes: u64| Region::linear(address, bytes).and_then(|region| read_host(&region));
    let pointer = parameters.checked_add(8 * index).filter(|_| parameters != 0);
    let address = pointer.and_then(|pointer| read(pointer, 8)).ok_or(Status::InvalidValue)?;
    read(u64_at(&address, 0), bytes).ok_or(Status::InvalidValue)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte))
}

/// Returns the source and the target of each task, or describes the error in the table.
fn regions_of(tasks: &[Task], tile_count: u32) -> Result<Vec<(Region, Region)>, String> {
    let mut next_tile = 0;
    let mut regions = Vec::with_capacity(tasks.len());
    for task in tasks {
        let (source_bytes, target_bytes) =
            task.item_bytes().ok_or_else(|| format!("there is no such cast: {task:?}"))?;
        if !task.target.is_multiple_of(target_bytes) {
            return Err(format!("the target is not aligned: {task:?}"));
        }
        if u64::from(task.first_tile) != next_tile {
            return Err(format!("{next_tile} tiles come before {task:?}"));
        }
        let elements = task.row_elements.checked_mul(u64::from(task.rows)).filter(|&elements| elements > 0);
        let regions_of_task = elements.and_then(|elements| {
            next_tile += elements.div_ceil(TILE_BYTES / source_bytes.max(target_bytes));
            let row_bytes = task.row_elements.checked_mul(source_bytes)?;
            let stride_bytes = if task.rows == 1 { row_bytes } else { task.source_stride_bytes };
            let source = Region::new(task.source, row_bytes, stride_bytes, u64::from(task.rows))?;
            Some((source, Region::linear(task.target, elements.checked_mul(target_bytes)?)?))
        });
        regions.push(regions_of_task.ok_or_else(|| format!("its sizes are impossible: {task:?}"))?);
    }
    if u64::from(tile_count) != next_tile {
        return Err(format!("the tasks have {next_tile} tiles, and the launch has {tile_count}"));
    }
    // Tasks run in any order, so no task may access a target of another task.
    let mut targets: Vec<Region> = regions.iter().map(|&(_, target)| target).collect();
    targets.sort_by_key(Region::start);
    if let Some(pair) = targets.windows(2).find(|pair| pair[0].overlaps(&pair[1])) {
        return Err(format!("two tasks write to {} and {}", pair[0], pair[1]));
    }
    for (source, _) in &regions {
        let after = targets.partition_point(|target| target.end() <= source.start());
        let near = targets[after..].iter().take_while(|target| target.start() < source.end());
        if let Some(target) = near.into_iter().find(|target| source.overlaps(target)) {
            return Err(format!("one task reads {source}, and another one writes to {target}"));
        }
    }
    Ok(regions)
}

impl Task {
    fn parse(row: &[u8]) -> Task {
        Task {
            source: u64_at(row, 0),
            target: u64_at(row, 8),
            row_elements: u64_at(row, 16),
            source_stride_bytes: u64_at(row, 24),
            rows: u32_at(row, 32),
            first_tile: u32_at(row, 36),
            from: row[40],
            to: row[41],
            padding: [0; 6],
        }
    }

    /// Returns the bytes of an element of the source and of the target, or `None` for an unsupported cast.
    fn item_bytes(&self) -> Option<(u64, u64)> {
        let bytes = |dtype: u8| match dtype {
            0 | 1 | 11 | 23..=26 | 44 => Some(1),
            2 | 5 | 15 | 27 => Some(2),
            3 | 6 | 28 => Some(4),
            4 | 7 | 29 => Some(8),
            _ => None,
        };
        match self.to {
            to if to == self.from => Some((1, 1)),
            5..=7 | 15 | 23..=26 | 44 => bytes(self.from).zip(bytes(self.to)),
            _ => None,
        }
    }

    /// Returns the source, including the gaps between rows, and the target.
    fn spans(&self) -> Option<(Region, Region)> {
        let (source_bytes, target_bytes) = self.item_bytes()?;
        let gaps = (u64::from(self.rows) - 1) * self.source_stride_bytes;
        let source = Region::linear(self.source, gaps + self.row_elements * source_bytes)?;
        Some((source, Region::linear(self.target, u64::from(self.rows) * self.row_elements * target_bytes)?))
    }
}

impl Launch {
    /// Runs every thread of every block.
    pub fn run(self, shared: &SharedDriver, epoch: u64) {
        let mut driver = shared.lock();
        if driver.epoch != epoch {
            return;
        }
        if let Some((region, expected)) = &self.table
            && driver.memory.read(region).as_ref() != Some(expected)
        {
            return driver.report(Kind::BadLaunch, format!("the table at {region} changed before its launch ran"));
        }
        // Freed memory was reported when it was freed.
        let spans: Option<Vec<(Region, Region)>> = self.tasks.iter().map(Task::spans).collect();
        let Some(mut buffers) = spans.and_then(|spans| {
            let buffer = |region: &Region| Some(GuardedBuffer::new(*region, &driver.memory.read(region)?));
            spans.iter().map(|(source, target)| Some((buffer(source)?, buffer(target)?))).collect::<Option<Vec<_>>>()
        }) else {
            return;
        };
        drop(driver);
        let tasks: Vec<Task> = std::iter::zip(&self.tasks, &mut buffers)
            .map(|(task, (source, target))| Task { source: source.address(), target: target.address(), ..*task })
            .collect();
        // SAFETY: the tasks were checked, and buffers of the same lengths replace
        // device memory.
        unsafe { fst_sim_scatter(tasks.as_ptr(), tasks.len() as u32, self.tile_count, self.blocks, self.threads) };
        let mut driver = shared.lock();
        if driver.epoch != epoch {
            return;
        }
        for (source, target) in &buffers {
            if !source.is_guard_intact() || !target.is_guard_intact() {
                let text = format!("scatter from {} to {} writes outside of its target", source.region, target.region);
                driver.report(Kind::OutOfBounds, text);
            }
            driver.memory.write(&target.region, target.bytes());
        }
    }
}

/// Host memory that replaces device memory, with the same alignment and guard bytes.
struct GuardedBuffer {
    region: Region,
    begin: usize,
    memory: Vec<u8>,
}

impl GuardedBuffer {
    fn new(region: Region, bytes: &[u8]) -> GuardedBuffer {
        let mut memory = vec![POISON; bytes.len() + 3 * GUARD_BYTES];
        let distance = (region.start() as usize).wrapping_sub(memory.as_ptr().addr());
        let begin = GUARD_BYTES + distance % GUARD_BYTES;
        memory[begin..begin + bytes.len()].copy_from_slice(bytes);
        GuardedBuffer { region, begin, memory }
    }

    fn address(&mut self) -> u64 {
        // The kernel receives only this number.
        self.memory[self.begin..].as_mut_ptr().expose_provenance() as u64
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.begin..][..self.region.bytes() as usize]
    }

    /// Returns whether the guard bytes are unchanged.
    fn is_guard_intact(&self) -> bool {
        let end = self.begin + self.region.bytes() as usize;
        [&self.memory[..self.begin], &self.memory[end..]].iter().all(|guard| guard.iter().all(|&byte| byte == POISON))
    }
}
