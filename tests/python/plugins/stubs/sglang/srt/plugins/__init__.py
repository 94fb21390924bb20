from importlib.metadata import entry_points

from sglang.srt.plugins.hook_registry import HookRegistry


def load_plugins():
    for plugin in entry_points(group="sglang.srt.plugins"):
        plugin.load()()
    HookRegistry.apply_hooks()
