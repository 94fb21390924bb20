"""Public names of fastsafetensors, implemented with fst.

    from fst.compat.fastsafetensors import SafeTensorsFileLoader, SingleGroup

Tensors own their storage, and stay valid after loaders and buffers are closed. The documentation page "Coming from
fastsafetensors" lists the arguments that have no effect.
"""

from fst.compat.fastsafetensors.file_buffer import FilesBufferOnDevice
from fst.compat.fastsafetensors.loader import SafeTensorsFileLoader, SingleGroup

# Release of fastsafetensors that this package mirrors. Programs compare it with the release they require.
__version__ = "0.5.0"

__all__ = ["FilesBufferOnDevice", "SafeTensorsFileLoader", "SingleGroup"]
