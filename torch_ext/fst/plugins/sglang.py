"""`--load-format fst` for SGLang.

SGLang finds `register` through the entry point `sglang.srt.plugins`, and calls it in each of its processes before it
parses the command line.
"""

from collections.abc import Callable
from functools import cache

from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import add_load_format_choices


def _accept_fst(verify_load_format: Callable[[LoadConfig], None], config: LoadConfig) -> None:
    """Replaces the load format `fst` with its loader class. SGLang verifies all other load formats."""
    if isinstance(config.load_format, str) and config.load_format.lower() == "fst":
        # SGLang's loaders take long to import, and not all processes load a model.
        from fst.plugins._sglang_loader import FstModelLoader

        config.load_format = FstModelLoader
    else:
        verify_load_format(config)


@cache
def register() -> None:
    """Registers the load format with SGLang. Further calls in a process have no effect."""
    add_load_format_choices(["fst"])
    target = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
    HookRegistry.register(target, _accept_fst, HookType.AROUND)
