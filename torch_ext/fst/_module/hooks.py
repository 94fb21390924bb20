"""Hooks that `load_state_dict` calls."""

from torch.nn import Module
from torch.nn.modules.module import _IncompatibleKeys


def call_post_hooks(module: Module, keys: _IncompatibleKeys) -> None:
    """Calls the post-hooks of `load_state_dict` in its order."""
    for child in module.children():
        call_post_hooks(child, keys)
    for hook in module._load_state_dict_post_hooks.values():
        hook(module, keys)
