"""The public names of InstantTensor, over fst.

    from fst.compat.instanttensor import safe_open

Tensors own their memory and stay valid; nothing needs to be cloned. Tensors can also be loaded to the CPU. The page
"Coming from InstantTensor" of the documentation says which arguments have no meaning here.
"""

from fst.compat.instanttensor._backend import Backend, BackendPolicy
from fst.compat.instanttensor._init import init
from fst.compat.instanttensor._safe_open import safe_open

# Release of InstantTensor that this package mirrors. Programs compare it with the release that they need.
__version__ = "0.2.2"

__all__ = ["Backend", "BackendPolicy", "init", "safe_open"]
