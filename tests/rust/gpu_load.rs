//! Loads to the simulated GPU, and models to load.

use crate::host_load;
use crate::model::Model;
use crate::sim::gpu::Gpu;
use fst::checkpoint::Checkpoint;
use fst::checkpoint::region::TensorRegion;
use fst::device::Scratch;
use fst::device::cuda::Cuda;
use fst::dtype::Dtype;
use fst::error::{Error, Kind, Result};
use fst::load::transfer::Transfer;
use fst::options::Options;
use fst::plan::Destination;
use std::sync::Arc;

/// Load as C++ performs it: into blocks of the allocator, whose last use may still be queued.
pub struct Load<'a> {
    pub gpu: &'a Gpu<'a>,
    pub checkpoint: Checkpoint,
    pub regions: Arc<[TensorRegion]>,
    pub blocks: Vec<u64>,
}

impl<'a> Load<'a> {
    /// Loads all tensors of a model.
    pub fn all(gpu: &'a Gpu<'a>, model: &Model) -> Load<'a> {
        let checkpoint = Checkpoint::open(&model.paths).unwrap();
        let regions =
            checkpoint.entries().map(|(file, entry)| TensorRegion::whole(file, entry)).collect::<Result<_>>().unwrap();
        Load::new(gpu, checkpoint, regions)
    }

    /// Loads one slice of every tensor: dimension, start and length.
    pub fn slices(gpu: &'a Gpu<'a>, model: &Model, slices: &[(usize, u64, u64)]) -> Load<'a> {
        let checkpoint = Checkpoint::open(&model.paths).unwrap();
        let entries = checkpoint.entries().zip(slices);
        let region = |((file, entry), &(dim, start, length))| host_load::slice(file, entry, dim, start, length);
        let regions = entries.map(region).collect();
        Load::new(gpu, checkpoint, regions)
    }

    pub fn new(gpu: &'a Gpu<'a>, checkpoint: Checkpoint, regions: Arc<[TensorRegion]>) -> Load<'a> {
        let block = |region: &TensorRegion| if region.bytes() == 0 { 0 } else { gpu.allocate(bytes_of(region)) };
        let load = Load { gpu, checkpoint, blocks: regions.iter().map(block).collect(), regions };
        load.use_blocks();
        load
    }

    /// Returns the destinations: each tensor goes to its block.
    pub fn destinations(&self) -> Vec<Destination> {
        let blocks = self.regions.iter().zip(&self.blocks).enumerate();
        let destination = |(tensor, (region, &address)): (usize, (&TensorRegion, &u64))| Destination {
            tensor,
            begin: 0,
            end: region.bytes(),
            address,
            cast: None,
        };
        blocks.map(destination).collect()
    }

    pub fn open(&self, options: Options) -> Result<Transfer<Cuda>> {
        let cuda = Cuda::open(self.gpu.ordinal, u64::try_from(self.gpu.stream).unwrap())?;
        Transfer::open(&self.checkpoint, Arc::clone(&self.regions), Arc::new(cuda), options)
    }

    /// Fills one batch, with scratch memory from the allocator.
    pub fn fill(&self, transfer: &mut Transfer<Cuda>, destinations: &[Destination]) -> Result<()> {
        let batch = transfer.planner().prepare(destinations)?;
        let bytes = batch.scratch_bytes();
        let scratch = match bytes {
            0 => Scratch::default(),
            _ => {
                let none_left = |_| Error::new(Kind::OutOfMemory, "no scratch");
                let address = self.gpu.try_allocate(bytes).map_err(none_left)?;
                Scratch { address, bytes: u64::try_from(bytes).unwrap() }
            }
        };
        if bytes > 0 {
            // The previous use of the block may still be queued.
            self.gpu.queue_fill(scratch.address, bytes);
        }
        // SAFETY: nothing else uses the blocks of the GPU.
        let filled = unsafe { transfer.fill(&batch, scratch) };
        if bytes > 0 {
            // The allocator may return the scratch memory to its next user at once.
            self.gpu.queue_fill(scratch.address, bytes);
        }
        filled
    }

    /// Runs the load. After a failure, the next user gets the blocks while the transfer still exists.
    pub fn run(&self, options: Options) -> Result<()> {
        let mut transfer = self.open(options)?;
        let filled = self.fill(&mut transfer, &self.destinations());
        if filled.is_err() {
            self.use_blocks();
        }
        filled.and_then(|()| transfer.finish())
    }

    /// Returns the bytes that a kernel on the caller's stream finds in each tensor.
    pub fn read(&self) -> Vec<Vec<u8>> {
        let blocks: Vec<(u64, usize)> = self.used_blocks().map(|(region, block)| (block, bytes_of(region))).collect();
        let mut found = self.gpu.read_all(blocks).into_iter();
        let bytes = |region: &TensorRegion| if region.bytes() == 0 { Some(Vec::new()) } else { found.next() };
        self.regions.iter().filter_map(bytes).collect()
    }

    pub fn assert_holds(&self, model: &Model) {
        let found = self.read();
        assert_eq!(found.len(), model.tensors.len());
        for (found, tensor) in found.into_iter().zip(&model.tensors) {
            assert!(found == tensor.bytes, "{} {:?} {:?}", tensor.name, tensor.dtype, tensor.shape);
        }
    }

    /// Queues work of the caller on every block.
    pub fn use_blocks(&self) {
        self.used_blocks().for_each(|(region, block)| self.gpu.queue_fill(block, bytes_of(region)));
    }

    /// Returns the tensors with a block, and their blocks.
    pub fn used_blocks(&self) -> impl Iterator<Item = (&TensorRegion, u64)> {
        let blocks = self.regions.iter().zip(self.blocks.iter().copied());
        blocks.filter(|(region, _)| region.bytes() > 0)
    }
}

pub fn bytes_of(region: &TensorRegion) -> usize {
    usize::try_from(region.bytes()).unwrap()
}

/// Model whose chunks differ: large, small and empty tensors, and a scalar.
pub fn mixed_model() -> Model {
    let shapes: [(Dtype, &[u64]); 8] = [
        (Dtype::F32, &[50, 70]),
        (Dtype::BF16, &[]),
        (Dtype::U8, &[0, 5]),
        (Dtype::I64, &[3]),
        (Dtype::F16, &[11_000]),
        (Dtype::Bool, &[17]),
        (Dtype::F64, &[40, 40]),
        (Dtype::U8, &[5000]),
    ];
    Model::sharded(&shapes, 2)
}
