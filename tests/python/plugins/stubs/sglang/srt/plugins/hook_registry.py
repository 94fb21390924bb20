import pkgutil
from enum import Enum


class HookType(Enum):
    AROUND = "around"


_hooks = []


class HookRegistry:
    @classmethod
    def register(cls, target, hook, hook_type):
        assert hook_type is HookType.AROUND
        _hooks.append((target, hook))

    @classmethod
    def apply_hooks(cls):
        for target, hook in _hooks:
            owner, name = target.rsplit(".", 1)
            owner = pkgutil.resolve_name(owner)
            original = getattr(owner, name)
            setattr(owner, name, lambda *args, hook=hook, original=original: hook(original, *args))
        _hooks.clear()
