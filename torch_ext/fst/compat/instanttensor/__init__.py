"""Public names of InstantTensor, implemented with fst.

    from fst.compat.instanttensor import safe_open

Tensors own their storage and need not be cloned. Tensors can also be loaded to the CPU. The documentation page "Coming
from InstantTensor" lists the arguments that have no effect.
"""

from fst.compat.instanttensor._impl import init
from fst.compat.instanttensor._safe_open import safe_open

# Release of InstantTensor that this package mirrors. Programs compare it with the release they require.
__version__ = "0.2.2"

__all__ = ["init", "safe_open"]
