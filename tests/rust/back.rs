//! The trip back, from device memory to a file.

use crate::sim::Sim;
use crate::sim::abi::Fault;
use crate::sim::gpu::Gpu;
use crate::{TIGHT, finish, schedules};
use fst::device::cuda::Cuda;
use fst::device::host::Host;
use fst::dtype::Dtype;
use fst::error::{Kind, Result};
use fst::format::layout::{Layout, Tensor};
use fst::save::atomic_file::OutputFile;
use fst::save::kernel::Linux;
use fst::save::memory::SourceMemory;
use fst::save::writer::Writer;
use fst::save::{DeviceStream, Extent, Save};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// Of tensors, those of the host among them empty, tiny, and larger than a chunk.
const SIZES: [usize; 8] = [5000, 3, 0, 4096, 20_000, 1, 12_345, 700];

/// Tensors on two GPUs and the host, of which a queued kernel still writes one.
struct Scene<'a> {
    gpus: [&'a Gpu<'a>; 2],
    directory: TempDir,
    tensors: Vec<Source>,
}

struct Source {
    /// Position among the streams.
    device: usize,
    address: u64,
    bytes: Vec<u8>,
}

impl<'a> Scene<'a> {
    fn new(sim: &Sim, gpus: [&'a Gpu<'a>; 2]) -> Scene<'a> {
        let tensor = |(index, &size): (usize, &usize)| {
            let mut bytes: Vec<u8> = (0..size).map(|at| u8::try_from((at * 7 + index) % 251).unwrap()).collect();
            let device = index % 3;
            if device == 2 || size == 0 {
                let address = u64::try_from(bytes.as_ptr().expose_provenance()).unwrap();
                return Source { device: 2, address, bytes };
            }
            let address = gpus[device].allocate(size);
            sim.write(address, &bytes).unwrap();
            if index == 4 {
                gpus[device].queue_fill(address, size);
                bytes.fill(0x11);
            }
            Source { device, address, bytes }
        };
        let tensors = SIZES.iter().enumerate().map(tensor).collect();
        Scene { gpus, directory: tempfile::tempdir().unwrap(), tensors }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("x")
    }

    fn described(&self) -> Vec<Tensor> {
        let named = self.tensors.iter().enumerate();
        named
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
        let layout = Layout::new(&self.described(), &None)?;
        let order = layout.order().to_vec();
        let mut save =
            Save::begin(layout, OutputFile::create(&self.path(), Box::new(Linux))?, self.streams()?, &TIGHT)?;
        for part in order.chunks(3) {
            let piece = |&index: &usize| {
                let source = &self.tensors[index];
                let length = u64::try_from(source.bytes.len()).unwrap();
                Extent { device: source.device, address: source.address, length }
            };
            let pieces: Vec<Extent> = part.iter().map(piece).collect();
            // SAFETY: the blocks are the gpus', and nothing but what is queued writes to them.
            unsafe { save.append(&pieces) }?;
        }
        save.finish()
    }

    fn write(&self) -> Result<()> {
        let streams = self.streams()?;
        let mut writer = Writer::begin(OutputFile::create(&self.path(), Box::new(Linux))?, None, &TIGHT)?;
        for (tensor, source) in self.described().into_iter().zip(&self.tensors) {
            let (device, length) = (&streams[source.device], tensor.bytes());
            writer.add(tensor)?;
            // SAFETY: as above.
            unsafe { writer.append(device.memory.as_ref(), device.stream, source.address, length) }?;
            if source.device < 2 {
                // The caller may change it at once.
                self.gpus[source.device].queue_fill(source.address, source.bytes.len());
            }
        }
        writer.finish()
    }

    fn assert_holds(&self) {
        let file = std::fs::read(self.path()).unwrap();
        let found = SafeTensors::deserialize(&file).unwrap();
        for (index, source) in self.tensors.iter().enumerate() {
            assert!(found.tensor(&index.to_string()).unwrap().data() == source.bytes, "tensor {index}");
        }
    }

    /// What the caller does with its memory next.
    fn use_blocks(&self) {
        for source in self.tensors.iter().filter(|source| source.device < 2) {
            self.gpus[source.device].queue_fill(source.address, source.bytes.len());
        }
    }
}

const WAYS: [fn(&Scene<'_>) -> Result<()>; 2] = [|scene| scene.save(), |scene| scene.write()];

fn is_empty(directory: &Path) -> bool {
    std::fs::read_dir(directory).unwrap().next().is_none()
}

#[test]
fn tensors_of_several_devices_are_saved_bit_for_bit() {
    for run in WAYS {
        for sim in schedules() {
            let (first, second) = (Gpu::new(&sim, 0), Gpu::new(&sim, 1));
            let scene = Scene::new(&sim, [&first, &second]);
            run(&scene).unwrap();
            scene.use_blocks();
            scene.assert_holds();
            drop(scene);
            drop((first, second));
            finish(sim);
        }
    }
}

#[test]
fn a_fault_at_any_call_is_an_error_and_leaves_no_file() {
    for (fault, kind, least) in [
        (Fault::CopyEnqueue, Kind::Device, 5),
        (Fault::CopyAsync, Kind::Device, 5),
        (Fault::OutOfMemory, Kind::OutOfMemory, 4),
    ] {
        for run in WAYS {
            let mut failed = 0;
            for at in 1.. {
                let sim = Sim::start(at);
                let (first, second) = (Gpu::new(&sim, 0), Gpu::new(&sim, 1));
                let scene = Scene::new(&sim, [&first, &second]);
                sim.inject(fault, at);
                let result = run(&scene);
                let is_over = sim.counters().faults == 0;
                match &result {
                    Ok(()) => scene.assert_holds(),
                    Err(error) => {
                        failed += 1;
                        assert_eq!(error.kind(), kind, "{error}");
                        assert!(is_empty(scene.directory.path()));
                    }
                }
                drop(scene);
                drop((first, second));
                finish(sim);
                if is_over {
                    result.unwrap();
                    break;
                }
            }
            assert!(failed >= least, "{fault:?}: {failed}");
        }
    }
}

#[test]
fn saves_are_right_without_pinned_memory() {
    for sim in schedules() {
        let (first, second) = (Gpu::new(&sim, 0), Gpu::new(&sim, 1));
        let scene = Scene::new(&sim, [&first, &second]);
        sim.inject(Fault::RefusePinning, 0);
        scene.save().unwrap();
        scene.assert_holds();
        drop(scene);
        drop((first, second));
        finish(sim);
    }
}
