"""Public names of unifiedefficientloader 0.2 to 0.5, implemented with fst.

from fst.compat.unifiedefficientloader import UnifiedSafetensorsLoader
"""

import importlib.util

from fst.compat.unifiedefficientloader.buffer_pools import GpuBufferPool, PinnedBufferPool
from fst.compat.unifiedefficientloader.incremental_writer import IncrementalSafetensorsWriter
from fst.compat.unifiedefficientloader.logging_utils import (
    DEBUG_LEVEL,
    MINIMAL_LEVEL,
    NORMAL_LEVEL,
    VERBOSE_LEVEL,
    debug,
    error,
    info,
    minimal,
    normal,
    setup_logging,
    verbose,
    warning,
)
from fst.compat.unifiedefficientloader.memory_efficient_loader import MemoryEfficientSafeOpen, UnifiedSafetensorsLoader
from fst.compat.unifiedefficientloader.pinned_transfer import (
    get_pinned_transfer_stats,
    reset_pinned_transfer_stats,
    set_verbose,
    transfer_to_gpu_pinned,
)
from fst.compat.unifiedefficientloader.tensor_utils import (
    dict_to_tensor,
    st_to_torch_dtype,
    tensor_to_dict,
    torch_to_st_dtype,
)
from fst.compat.unifiedefficientloader.unified_data_loader import UnifiedDataLoader

# Release of unifiedefficientloader that this package mirrors. Programs compare it with the release they require.
__version__ = "0.5.4"

__all__ = [
    "DEBUG_LEVEL",
    "MINIMAL_LEVEL",
    "NORMAL_LEVEL",
    "VERBOSE_LEVEL",
    "GpuBufferPool",
    "IncrementalSafetensorsWriter",
    "MemoryEfficientSafeOpen",
    "PinnedBufferPool",
    "UnifiedDataLoader",
    "UnifiedSafetensorsLoader",
    "check_dependencies",
    "debug",
    "dict_to_tensor",
    "error",
    "get_pinned_transfer_stats",
    "info",
    "minimal",
    "normal",
    "reset_pinned_transfer_stats",
    "set_verbose",
    "setup_logging",
    "st_to_torch_dtype",
    "tensor_to_dict",
    "torch_to_st_dtype",
    "transfer_to_gpu_pinned",
    "verbose",
    "warning",
]


def check_dependencies(*packages: str) -> None:
    """Raises ImportError, which lists them, if some packages are not installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(f"these packages are not installed: {', '.join(missing)}")
