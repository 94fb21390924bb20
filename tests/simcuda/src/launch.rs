//! Launches of the kernels of fst.
//!
//! What a launch will read and write stands in its table of tasks. A table in
//! device memory was written by copies that were queued earlier, so that its
//! content is known when the launch is queued (see
//! [`DeviceMemory::read_foreseen`](crate::memory::DeviceMemory::read_foreseen)),
//! and everything can be checked then, in the order of the calls. When the
//! launch runs, it looks whether the table is really what it was taken for.

use crate::abi::{Kind, POISON, Status};
use crate::driver::{Driver, SharedDriver};
use crate::fault::Fate;
use crate::host::read_host;
use crate::module::Kernel;
use crate::region::Region;
use crate::stream::Work;

/// Bytes of a task in a table.
const TASK_BYTES: u64 = 48;
/// Tasks that fit into the parameters of a launch.
const BATCH_TASKS: u64 = 85;
/// Bytes of a tile's wider side.
const TILE_BYTES: u64 = 16 << 10;
/// The most threads of a block that the kernels were compiled for.
const BLOCK_THREADS_MAX: u32 = 256;
/// Tasks begin at a multiple of this.
const TABLE_ALIGNMENT: u64 = 8;
/// Bytes around what a task may touch, which shows if it touches more. A
/// multiple of 16, so that alignments stay what they are.
const GUARD_BYTES: usize = 64;

/// The sizes of a launch, as the driver takes them.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    /// Blocks in three directions.
    pub blocks: [u32; 3],
    /// Threads of a block in three directions.
    pub threads: [u32; 3],
    /// Shared memory of a block.
    pub shared_bytes: u32,
    /// Whether parameters come packed in a buffer, too.
    pub has_extra: bool,
}

/// A launch that was queued.
#[derive(Debug)]
pub struct Launch {
    tasks: Vec<Task>,
    tile_count: u32,
    blocks: u32,
    threads: u32,
    /// Where the table lies, unless it came with the launch, and its bytes.
    table: Option<(Region, Vec<u8>)>,
    fails: bool,
}

/// One row of the table, as csrc/kernels/scatter.h declares it.
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

/// Runs the kernel on host memory, where the calling test owns all that the
/// tasks name, and nothing is checked.
///
/// # Safety
/// `tasks` points to that many tasks, and they to memory of the lengths that they say.
pub unsafe fn run_on_host(tasks: *const u8, task_count: u32, tile_count: u32, blocks: u32, threads: u32) {
    // SAFETY: the caller promises it.
    unsafe { fst_sim_scatter(tasks.cast(), task_count, tile_count, blocks, threads) };
}

impl Driver {
    /// `cuLaunchKernel`. `parameters` is the host address of the parameters'
    /// addresses; all of them are read now and never again.
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
            return Err(bad(self, format!("the kernels are not made for {grid:?}")));
        };
        if blocks == 0 || blocks > i32::MAX as u32 || threads == 0 || threads > BLOCK_THREADS_MAX {
            return Err(bad(self, format!("a launch of {blocks} blocks of {threads} threads")));
        }
        match self.faults.launch() {
            Fate::Refused => Err(Status::LaunchOutOfResources),
            fate => {
                let (table, bytes, tile_count) = self.table_of(kernel, parameters)?;
                let tasks: Vec<Task> = bytes.chunks_exact(TASK_BYTES as usize).map(Task::parse).collect();
                let regions = regions_of(&tasks, tile_count).map_err(|text| bad(self, text))?;
                let reads = table.iter().copied().chain(regions.iter().map(|&(source, _)| source));
                let writes = regions.iter().map(|&(_, target)| target);
                let uses: Vec<(Region, bool)> =
                    reads.map(|region| (region, false)).chain(writes.map(|region| (region, true))).collect();
                // A launch that is refused uses nothing.
                uses.iter().try_for_each(|(region, _)| self.must_be_live(region, "scatter"))?;
                uses.iter().try_for_each(|&(region, writes)| self.use_on_stream(stream, region, writes, "scatter"))?;
                self.counters.launches += 1;
                let table = table.map(|region| (region, bytes));
                let fails = fate == Fate::FailsLater;
                self.push(stream, Work::Launch(Launch { tasks, tile_count, blocks, threads, table, fails }));
                Ok(())
            }
        }
    }

    /// Where the table lies if it is in device memory, its bytes, and its number of tiles.
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
                self.must_be_live(&region, "table of a scatter")?;
                let bytes = self.memory.read_foreseen(&region).ok_or(Status::InvalidValue)?;
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

/// The bytes of one parameter of a launch.
fn parameter(parameters: u64, index: u64, bytes: u64) -> Result<Vec<u8>, Status> {
    let read = |address: u64, bytes: u64| Region::linear(address, bytes).and_then(|region| read_host(&region));
    let place = parameters.checked_add(8 * index).filter(|_| parameters != 0);
    let address = place.and_then(|place| read(place, 8)).ok_or(Status::InvalidValue)?;
    read(u64_at(&address, 0), bytes).ok_or(Status::InvalidValue)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte))
}

/// What each task reads and writes, or what is wrong with the table.
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
        return Err(format!("the tasks have {next_tile} tiles, and the launch says {tile_count}"));
    }
    // Tasks run in any order, so nothing that one of them writes may be used by another.
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

    /// Bytes of an element of the source and of the target, unless the kernel has no such cast.
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

    /// From the first byte of the source to the last one, and all bytes of the target.
    fn spans(&self) -> Option<(Region, Region)> {
        let (source_bytes, target_bytes) = self.item_bytes()?;
        let gaps = (u64::from(self.rows) - 1) * self.source_stride_bytes;
        let source = Region::linear(self.source, gaps + self.row_elements * source_bytes)?;
        Some((source, Region::linear(self.target, u64::from(self.rows) * self.row_elements * target_bytes)?))
    }
}

impl Launch {
    /// Runs every thread of every block.
    pub fn run(self, shared: &SharedDriver, epoch: u64, context: usize) {
        let mut driver = shared.lock();
        if driver.epoch != epoch {
            return;
        }
        if self.fails {
            return driver.lose(context);
        }
        if let Some((region, expected)) = &self.table
            && driver.memory.read(region).as_ref() != Some(expected)
        {
            return driver.report(Kind::BadLaunch, format!("the table at {region} changed before its launch ran"));
        }
        // Whatever is gone was reported when it was freed.
        let spans: Option<Vec<(Region, Region)>> = self.tasks.iter().map(Task::spans).collect();
        let Some(mut stand_ins) = spans.and_then(|spans| {
            let stand_in = |region: &Region| Some(StandIn::new(*region, &driver.memory.read(region)?));
            spans
                .iter()
                .map(|(source, target)| Some((stand_in(source)?, stand_in(target)?)))
                .collect::<Option<Vec<_>>>()
        }) else {
            return;
        };
        drop(driver);
        let tasks: Vec<Task> = std::iter::zip(&self.tasks, &mut stand_ins)
            .map(|(task, (source, target))| Task { source: source.address(), target: target.address(), ..*task })
            .collect();
        // SAFETY: the tasks are those that were checked, with stand-ins of the
        // right lengths in place of device memory.
        unsafe { fst_sim_scatter(tasks.as_ptr(), tasks.len() as u32, self.tile_count, self.blocks, self.threads) };
        let mut driver = shared.lock();
        if driver.epoch != epoch {
            return;
        }
        for (source, target) in &stand_ins {
            if !source.is_guarded() || !target.is_guarded() {
                let text = format!("scatter from {} to {} writes around its target", source.region, target.region);
                driver.report(Kind::OutOfBounds, text);
            }
            driver.memory.write(&target.region, target.bytes());
        }
    }
}

/// Host memory in place of device memory, with the same alignment.
struct StandIn {
    region: Region,
    begin: usize,
    memory: Vec<u8>,
}

impl StandIn {
    fn new(region: Region, bytes: &[u8]) -> StandIn {
        let mut memory = vec![POISON; bytes.len() + 3 * GUARD_BYTES];
        let distance = (region.start() as usize).wrapping_sub(memory.as_ptr().addr());
        let begin = GUARD_BYTES + distance % GUARD_BYTES;
        memory[begin..begin + bytes.len()].copy_from_slice(bytes);
        StandIn { region, begin, memory }
    }

    fn address(&mut self) -> u64 {
        // The kernel gets no more than this number.
        self.memory[self.begin..].as_mut_ptr().expose_provenance() as u64
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.begin..][..self.region.bytes() as usize]
    }

    /// Whether the bytes around are as they were.
    fn is_guarded(&self) -> bool {
        let behind = self.begin + self.region.bytes() as usize;
        [&self.memory[..self.begin], &self.memory[behind..]]
            .iter()
            .all(|guard| guard.iter().all(|&byte| byte == POISON))
    }
}
