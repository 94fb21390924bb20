"""`--load-format fst` for SGLang.

SGLang finds `register` by the entry point `sglang.srt.plugins` and calls it in each of its processes, before it reads
the command line there.
"""

from collections.abc import Callable
from functools import cache

from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import add_load_format_choices


def _accept_fst(verify_load_format: Callable[[LoadConfig], None], config: LoadConfig) -> None:
    """A load format is one of SGLang's or a class of a loader; `fst` becomes the latter."""
    if isinstance(config.load_format, str) and config.load_format.lower() == "fst":
        # SGLang's loaders are much to import for processes that load no model.
        from fst.plugins._sglang_loader import FstModelLoader

        config.load_format = FstModelLoader
    else:
        verify_load_format(config)


@cache
def register() -> None:
    """Makes the load format known to SGLang. A second time in a process it does nothing."""
    add_load_format_choices(["fst"])
    target = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
    HookRegistry.register(target, _accept_fst, HookType.AROUND)
