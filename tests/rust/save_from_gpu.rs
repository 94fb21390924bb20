//! Saves from device memory, on the simulated CUDA driver.

use crate::sim::abi::Fault;
use crate::sim::gpu::Gpu;
use crate::sim::{Sim, TIGHT, schedules, with_fault_at_every_call};
use fst::device::Scratch;
use fst::device::cuda::Cuda;
use fst::device::host::Host;
use fst::dtype::Dtype;
use fst::error::Result;
use fst::format::layout::{Layout, Tensor};
use fst::ranks::mesh::{Mesh, MeshLayout, Placement};
use fst::ranks::save::{self, SavePlan, SaveRequest, SaveTensor};
use fst::save::atomic_file::{self, OutputFile};
use fst::save::file_kernel::Linux;
use fst::save::memory::SourceMemory;
use fst::save::ranks_save::RankSave;
use fst::save::writer::Writer;
use fst::save::{DeviceStream, Extent, Save};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// Sizes of the tensors in bytes: empty, tiny, and larger than a chunk.
const SIZES: [usize; 8] = [5000, 3, 0, 4096, 20_000, 1, 12_345, 700];

/// Tensors on two GPUs and on the host. A queued kernel writes one of the tensors.
struct Checkpoint<'a> {
    gpus: [&'a Gpu<'a>; 2],
    directory: TempDir,
    tensors: Vec<SourceTensor>,
}

struct SourceTensor {
    /// Index in the list of streams.
    device: usize,
    address: u64,
    bytes: Vec<u8>,
}

impl<'a> Checkpoint<'a> {
    fn new(sim: &Sim, gpus: [&'a Gpu<'a>; 2]) -> Checkpoint<'a> {
        let tensor = |(index, &size): (usize, &usize)| {
            let mut bytes: Vec<u8> = (0..size).map(|at| u8::try_from((at * 7 + index) % 251).unwrap()).collect();
            let device = index % 3;
            if device == 2 || size == 0 {
                let address = u64::try_from(bytes.as_ptr().expose_provenance()).unwrap();
                return SourceTensor { device: 2, address, bytes };
            }
            let address = gpus[device].allocate(size);
            sim.write(address, &bytes).unwrap();
            if index == 4 {
                gpus[device].queue_fill(address, size);
                bytes.fill(0x11);
            }
            SourceTensor { device, address, bytes }
        };
        let tensors = SIZES.iter().enumerate().map(tensor).collect();
        Checkpoint { gpus, directory: tempfile::tempdir().unwrap(), tensors }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("x")
    }

    fn descriptions(&self) -> Vec<Tensor> {
        let indexed = self.tensors.iter().enumerate();
        indexed
            .map(|(index, source)| {
                let size = u64::try_from(source.bytes.len()).unwrap();
                Tensor::new(index.to_string(), Dtype::U8, vec![size]).unwrap()
            })
            .collect()
    }

    fn streams(&self) -> Result<Vec<DeviceStream>> {
        let cuda = |gpu: &Gpu<'_>| {
            let stream = u64::try_from(gpu.stream).unwrap();
            let memory: Arc<dyn SourceMemory> = Arc::new(Cuda::open(gpu.ordinal, stream)?);
            Ok(DeviceStream { memory, stream })
        };
        let [first, second] = self.gpus;
        Ok(vec![cuda(first)?, cuda(second)?, DeviceStream { memory: Arc::new(Host), stream: 0 }])
    }

    fn save(&self) -> Result<()> {
        let layout = Layout::new(&self.descriptions(), &None)?;
        let order = layout.order().to_vec();
        let mut save =
            Save::begin(layout, OutputFile::create(&self.path(), Box::new(Linux))?, self.streams()?, &TIGHT)?;
        for indices in order.chunks(3) {
            let extent = |&index: &usize| {
                let source = &self.tensors[index];
                let length = u64::try_from(source.bytes.len()).unwrap();
                Extent { device: source.device, address: source.address, length }
            };
            let extents: Vec<Extent> = indices.iter().map(extent).collect();
            let needs = save.scratch_bytes(&extents);
            let scratch: Vec<Scratch> = needs.iter().enumerate().map(|(of, &bytes)| self.scratch(of, bytes)).collect();
            // SAFETY: the GPUs own the blocks, and only queued work writes to them.
            let appended = unsafe { save.append(&extents, &scratch) };
            // The allocator may return the scratch memory to its next user at once.
            self.use_scratch(&scratch);
            appended?;
        }
        save.finish()
    }

    /// Allocates scratch memory on a device. Its last use is still queued.
    fn scratch(&self, device: usize, bytes: usize) -> Scratch {
        if bytes == 0 {
            return Scratch::default();
        }
        let scratch = Scratch { address: self.gpus[device].allocate(bytes), bytes: u64::try_from(bytes).unwrap() };
        self.gpus[device].queue_fill(scratch.address, bytes);
        scratch
    }

    fn use_scratch(&self, scratch: &[Scratch]) {
        for (gpu, scratch) in self.gpus.iter().zip(scratch).filter(|(_, scratch)| scratch.bytes > 0) {
            gpu.queue_fill(scratch.address, usize::try_from(scratch.bytes).unwrap());
        }
    }

    fn write(&self) -> Result<()> {
        let streams = self.streams()?;
        let mut writer = Writer::begin(OutputFile::create(&self.path(), Box::new(Linux))?, None, None, &TIGHT)?;
        for (tensor, source) in self.descriptions().into_iter().zip(&self.tensors) {
            let (device, length) = (&streams[source.device], tensor.bytes());
            writer.add(tensor)?;
            // SAFETY: as above.
            unsafe { writer.append(device.memory.as_ref(), device.stream, source.address, length) }?;
            if source.device < 2 {
                // The caller may overwrite the tensor immediately.
                self.gpus[source.device].queue_fill(source.address, source.bytes.len());
            }
        }
        writer.finish()
    }

    /// Saves as the only rank of a group.
    fn save_by_rank(&self) -> Result<()> {
        let mesh = Mesh::new(vec![1], vec![0])?;
        let tensor = |(index, source): (usize, &SourceTensor)| SaveTensor {
            name: index.to_string(),
            dtype: Dtype::U8,
            shape: vec![u64::try_from(source.bytes.len()).unwrap()],
            file: 0,
            layout: 0,
        };
        let plan = Arc::new(SavePlan::new(&SaveRequest {
            files: vec![None],
            layouts: vec![save::Layout::Mesh(MeshLayout::new(mesh, vec![Placement::Replicated])?)],
            tensors: self.tensors.iter().enumerate().map(tensor).collect(),
            ranks: 1,
            window_bytes: 1 << 20,
            block_bytes: 4096,
            run_bytes_min: 1,
            write_bytes_max: u64::MAX,
        })?);
        let work = Arc::new(plan.rank_plan(0));
        atomic_file::create_sized(&self.path(), plan.file(0).unwrap().file_bytes(), None, &|| Ok(()))?;
        let (paths, uploads) = ([self.path()], [String::new()]);
        let save = RankSave::open(Arc::clone(&plan), Arc::clone(&work), &paths, &uploads, self.streams()?, &TIGHT)?;
        for (window, own) in work.windows.iter().enumerate() {
            let extent = |source: &save::Source| {
                let SourceTensor { device, address, .. } = self.tensors[source.tensor];
                Extent { device, address: address + source.local.start, length: source.local.end - source.local.start }
            };
            let extents: Vec<Extent> = own.sources.iter().map(extent).collect();
            // SAFETY: as above.
            unsafe { save.write(window, 0..own.writes.len(), &extents) }?;
        }
        assert_eq!(save.finish()?, []);
        Ok(())
    }

    fn assert_saved(&self) {
        let file = std::fs::read(self.path()).unwrap();
        let found = SafeTensors::deserialize(&file).unwrap();
        for (index, source) in self.tensors.iter().enumerate() {
            assert!(found.tensor(&index.to_string()).unwrap().data() == source.bytes, "tensor {index}");
        }
    }

    /// Queues writes to the tensors, as the caller may do after a save.
    fn overwrite_blocks(&self) {
        for source in self.tensors.iter().filter(|source| source.device < 2) {
            self.gpus[source.device].queue_fill(source.address, source.bytes.len());
        }
    }
}

const SAVES: [fn(&Checkpoint<'_>) -> Result<()>; 2] = [|checkpoint| checkpoint.save(), |checkpoint| checkpoint.write()];

fn is_empty(directory: &Path) -> bool {
    std::fs::read_dir(directory).unwrap().next().is_none()
}

#[test]
fn tensors_of_several_devices_are_saved_bit_for_bit() {
    let by_rank: fn(&Checkpoint<'_>) -> Result<()> = |checkpoint| checkpoint.save_by_rank();
    for (run, refuses_pinning) in [(SAVES[0], false), (SAVES[1], false), (SAVES[0], true), (by_rank, false)] {
        for sim in schedules() {
            let (first, second) = (Gpu::new(&sim, 0), Gpu::new(&sim, 1));
            let checkpoint = Checkpoint::new(&sim, [&first, &second]);
            if refuses_pinning {
                sim.inject(Fault::RefusePinning, 0);
            }
            run(&checkpoint).unwrap();
            checkpoint.overwrite_blocks();
            checkpoint.assert_saved();
        }
    }
}

#[test]
fn fault_at_any_call_fails_without_a_file() {
    for (fault, least) in [(Fault::CopyEnqueue, 5), (Fault::CopyAsync, 5), (Fault::OutOfMemory, 4)] {
        for run in SAVES {
            let results = with_fault_at_every_call(fault, least, |sim, begin| {
                let (first, second) = (Gpu::new(sim, 0), Gpu::new(sim, 1));
                let checkpoint = Checkpoint::new(sim, [&first, &second]);
                begin();
                let result = run(&checkpoint);
                match result {
                    Ok(()) => checkpoint.assert_saved(),
                    Err(_) => assert!(is_empty(checkpoint.directory.path())),
                }
                result
            });
            assert!(results.iter().any(Result::is_err), "{fault:?}");
        }
    }
}
