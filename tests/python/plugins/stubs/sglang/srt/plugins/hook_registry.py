import pkgutil
from enum import Enum


class HookType(Enum):
    AROUND = "around"


_hooks = []


def wrapped(original, hook):
    return lambda *args, **kwargs: hook(original, *args, **kwargs)


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
            setattr(owner, name, wrapped(getattr(owner, name), hook))
        _hooks.clear()
