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
use crate::task::{Accesses, Task, accesses_of, u32_at, u64_at};

/// Bytes of a task in a table.
const TASK_BYTES: u64 = 48;
/// Tasks that fit into the parameters of a launch.
const BATCH_TASKS: u64 = 85;
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
    /// Expected positions of each task, none for rows.
    positions: Vec<Vec<u8>>,
    tile_count: u32,
    blocks: u32,
    threads: u32,
    /// Region and expected bytes of a table in device memory, or `None` for a table in the parameters.
    table: Option<(Region, Vec<u8>)>,
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
            outcome if kernel == Kernel::Dequantize => {
                let launch = self.prepare_matrices(stream, [blocks, threads], parameters)?;
                self.counters.launches += 1;
                self.push(stream, outcome.of(Work::Dequantize(launch)));
                Ok(())
            }
            outcome => {
                let (table, bytes, tile_count) = self.table_of(kernel, parameters)?;
                let tasks: Vec<Task> = bytes.chunks_exact(TASK_BYTES as usize).map(Task::parse).collect();
                let positions = tasks.iter().map(|task| self.positions_of(task)).collect::<Result<Vec<_>, _>>()?;
                let regions = accesses_of(&tasks, &positions, tile_count).map_err(|text| bad(self, text))?;
                let of_tasks = regions.iter().flat_map(|task| [Some(task.source), task.positions]).flatten();
                let reads = table.iter().copied().chain(of_tasks);
                let writes = regions.iter().map(|task| task.target);
                let accesses: Vec<(Region, bool)> =
                    reads.map(|region| (region, false)).chain(writes.map(|region| (region, true))).collect();
                // Check all regions first: a rejected launch accesses no memory.
                accesses.iter().try_for_each(|(region, _)| self.check_live(region, "scatter"))?;
                accesses
                    .iter()
                    .try_for_each(|&(region, writes)| self.access_on_stream(stream, region, writes, "scatter"))?;
                self.counters.launches += 1;
                let table = table.map(|region| (region, bytes));
                self.push(
                    stream,
                    outcome.of(Work::Launch(Launch { tasks, positions, tile_count, blocks, threads, table })),
                );
                Ok(())
            }
        }
    }

    /// Returns the positions of a task when the launch runs, none for rows.
    fn positions_of(&mut self, task: &Task) -> Result<Vec<u8>, Status> {
        let Some(region) = task.positions() else { return Ok(Vec::new()) };
        self.check_live(&region, "positions of a scatter")?;
        self.memory.read_expected(&region).ok_or(Status::InvalidValue)
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
            _ => {
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
pub(crate) fn parameter(parameters: u64, index: u64, bytes: u64) -> Result<Vec<u8>, Status> {
    let read = |address: u64, bytes: u64| Region::linear(address, bytes).and_then(|region| read_host(&region));
    let pointer = parameters.checked_add(8 * index).filter(|_| parameters != 0);
    let address = pointer.and_then(|pointer| read(pointer, 8)).ok_or(Status::InvalidValue)?;
    read(u64_at(&address, 0), bytes).ok_or(Status::InvalidValue)
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
        let changed = self.tasks.iter().zip(&self.positions).find(|(task, expected)| {
            task.positions().is_some_and(|region| driver.memory.read(&region).as_ref() != Some(expected))
        });
        if let Some((task, _)) = changed {
            return driver.report(Kind::BadLaunch, format!("the positions of {task:?} changed before the launch ran"));
        }
        // Freed memory was reported when it was freed.
        let buffers = self.tasks.iter().zip(&self.positions).map(|(task, positions)| {
            let Accesses { source, target, .. } = task.accesses(positions)?;
            // The buffer of rows has the gaps between them.
            let source = Region::linear(source.start(), source.span())?;
            let buffer = |region: Region| Some(GuardedBuffer::new(region, &driver.memory.read(&region)?));
            Some((buffer(source)?, buffer(target)?))
        });
        let Some(mut buffers) = buffers.collect::<Option<Vec<_>>>() else { return };
        drop(driver);
        let tasks: Vec<Task> = std::iter::zip(&self.tasks, &mut buffers)
            .zip(&self.positions)
            .map(|((task, (source, target)), positions)| {
                // The target of positions begins before its buffer.
                let skipped = target.region.start() - task.target;
                let (source, target) = (source.address(), target.address().wrapping_sub(skipped));
                let third = if task.put_bytes > 0 {
                    positions.as_ptr().expose_provenance() as u64
                } else {
                    task.source_stride_bytes
                };
                Task { source, target, source_stride_bytes: third, ..*task }
            })
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
pub(crate) struct GuardedBuffer {
    pub(crate) region: Region,
    begin: usize,
    memory: Vec<u8>,
}

impl GuardedBuffer {
    pub(crate) fn new(region: Region, bytes: &[u8]) -> GuardedBuffer {
        let mut memory = vec![POISON; bytes.len() + 3 * GUARD_BYTES];
        let distance = (region.start() as usize).wrapping_sub(memory.as_ptr().addr());
        let begin = GUARD_BYTES + distance % GUARD_BYTES;
        memory[begin..begin + bytes.len()].copy_from_slice(bytes);
        GuardedBuffer { region, begin, memory }
    }

    pub(crate) fn address(&mut self) -> u64 {
        // The kernel receives only this number.
        self.memory[self.begin..].as_mut_ptr().expose_provenance() as u64
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.memory[self.begin..][..self.region.bytes() as usize]
    }

    /// Returns whether the guard bytes are unchanged.
    pub(crate) fn is_guard_intact(&self) -> bool {
        let end = self.begin + self.region.bytes() as usize;
        [&self.memory[..self.begin], &self.memory[end..]].iter().all(|guard| guard.iter().all(|&byte| byte == POISON))
    }
}
