"""Public names of fastsafetensors, implemented with fst.

    from fst.compat.fastsafetensors import SafeTensorsFileLoader, SingleGroup

Tensors own their storage, and stay valid after loaders and buffers are closed. The documentation page "Coming from
fastsafetensors" lists the arguments that have no effect.
"""

from fst.compat.fastsafetensors.auto_loader import AutoLoader
from fst.compat.fastsafetensors.common import (
    SingleGroup,
    get_device_numa_node,
    live_allocation_bytes,
    live_allocation_count,
)
from fst.compat.fastsafetensors.config import LoaderConfig, load_config
from fst.compat.fastsafetensors.ep_slice import (
    expert_parallel_filter,
    expert_parallel_filter_from_env,
    owned_expert_range,
)
from fst.compat.fastsafetensors.file_buffer import FilesBufferOnDevice
from fst.compat.fastsafetensors.loader import SafeTensorsFileLoader, fastsafe_open
from fst.compat.fastsafetensors.metadata import SafeTensorsMetadata, TensorFrame
from fst.compat.fastsafetensors.parallel_loader import BudgetInfeasibleError, ParallelLoader, PipelineParallel
from fst.compat.fastsafetensors.saver import ParallelSaver

# Release of fastsafetensors that this package mirrors. Programs compare it with the release they require.
__version__ = "0.5.0"

__all__ = [
    "AutoLoader",
    "BudgetInfeasibleError",
    "FilesBufferOnDevice",
    "LoaderConfig",
    "ParallelLoader",
    "ParallelSaver",
    "PipelineParallel",
    "SafeTensorsFileLoader",
    "SafeTensorsMetadata",
    "SingleGroup",
    "TensorFrame",
    "expert_parallel_filter",
    "expert_parallel_filter_from_env",
    "fastsafe_open",
    "get_device_numa_node",
    "live_allocation_bytes",
    "live_allocation_count",
    "load_config",
    "owned_expert_range",
]
