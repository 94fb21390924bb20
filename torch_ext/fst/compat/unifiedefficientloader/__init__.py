"""Public names of unifiedefficientloader 0.2 to 0.5, implemented with fst.

from fst.compat.unifiedefficientloader import UnifiedSafetensorsLoader
"""

from fst.compat.unifiedefficientloader.incremental_writer import IncrementalSafetensorsWriter
from fst.compat.unifiedefficientloader.loader import UnifiedSafetensorsLoader
from fst.compat.unifiedefficientloader.pinned_transfer import transfer_to_gpu_pinned
from fst.compat.unifiedefficientloader.tensor_utils import dict_to_tensor, tensor_to_dict
from fst.compat.unifiedefficientloader.unified_data_loader import UnifiedDataLoader

# Release of unifiedefficientloader that this package mirrors. Programs compare it with the release they require.
__version__ = "0.5.4"

__all__ = [
    "IncrementalSafetensorsWriter",
    "UnifiedDataLoader",
    "UnifiedSafetensorsLoader",
    "dict_to_tensor",
    "tensor_to_dict",
    "transfer_to_gpu_pinned",
]
