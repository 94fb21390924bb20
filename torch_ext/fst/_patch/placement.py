"""Loads to other devices than programs request: `fst.patch(device=...)`."""

import os
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fst._checkpoint.checkpoint import OpenCheckpoint
from fst._checkpoint.framework import PYTORCH, Output
from fst._checkpoint.prefetch import PrefetchLoader, plan_regions
from fst._checkpoint.safe_open import safe_open
from fst._checkpoint.slice import Slice, Source
from fst._core.arguments import DEFAULT_WINDOW_BYTES, Device, device_of
from fst._core.errors import SafetensorError

DeviceMap = Mapping[str, Device]

# Values of `device_map` for which transformers computes a map.
_AUTOMATIC = frozenset({"auto", "balanced", "balanced_low_0", "sequential"})


class Placement:
    """Devices of tensors by name.

    Args:
        devices: One device for all tensors, or a map as transformers takes it: names of modules or tensors to devices.
            The longest name applies. "" is the whole model. "disk", and tensors that no name covers, mean the CPU.
    """

    def __init__(self, devices: Device | DeviceMap) -> None:
        named = devices if isinstance(devices, Mapping) else {"": devices}
        if not _AUTOMATIC.isdisjoint(device for device in named.values() if isinstance(device, str)):
            raise ValueError(
                'fst.patch does not distribute a model over devices as device_map="auto" does; pass a device, or a map '
                "of names to devices such as accelerate.infer_auto_device_map returns"
            )
        self._devices = {
            name: torch.device("cpu" if device == "disk" else device_of(device)) for name, device in named.items()
        }

    def device(self, name: str) -> torch.device:
        """Returns the device of a tensor."""
        prefix = name
        while prefix not in self._devices and prefix:
            prefix = prefix.rpartition(".")[0]
        return self._devices.get(prefix, torch.device("cpu"))


class PlacedLoads:
    """Loads of one open checkpoint to the devices of a placement.

    The tensors of a device load in the background from the first request on. Those are the tensors for which a program
    has called `get_slice` until then, as transformers does for all tensors before it loads the first.
    """

    def __init__(self, checkpoint: OpenCheckpoint, placement: Placement) -> None:
        self._checkpoint = checkpoint
        self._placement = placement
        self._expected: dict[torch.device, list[str]] = {}
        self._loaders: dict[torch.device, PrefetchLoader] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def output(self, name: str) -> Output:
        """Returns the output for a tensor."""
        return Output(PYTORCH, self._placement.device(name))

    def load(self, names: list[str]) -> dict[str, Tensor]:
        """Loads tensors, all of a device at once."""
        by_device: dict[torch.device, list[str]] = {}
        for name in names:
            by_device.setdefault(self._placement.device(name), []).append(name)
        loaded: dict[str, Tensor] = {}
        for device, group in by_device.items():
            output = Output(PYTORCH, device)
            tensors = self._checkpoint.load_tensors(group, output.load_device)
            loaded.update(zip(group, map(output.convert, tensors), strict=True))
        return {name: loaded[name] for name in names}

    def expect(self, name: str) -> Slice:
        """Returns the slice of a tensor that the program may request later."""
        self._expected.setdefault(self._placement.device(name), []).append(name)
        return _PlacedSlice(Source(self._checkpoint, self.output(name)), name, self)

    def take(self, name: str) -> Tensor:
        """Returns a whole tensor."""
        device = self._placement.device(name)
        try:
            loader = self._loader(device)
            if loader is not None:
                return loader.take(name)
        except SafetensorError:
            # It was taken before, its slice was requested after the load had begun, or the loader is closed.
            pass
        return self.load([name])[name]

    def close(self) -> None:
        """Ends the loads in the background."""
        with self._lock:
            self._is_closed = True
            for loader in self._loaders.values():
                loader.close()

    def _loader(self, device: torch.device) -> PrefetchLoader | None:
        """Returns the loader of a device, or None if the operators do not load to it, and after `close`."""
        with self._lock:
            if self._is_closed or Output(PYTORCH, device).load_device != device:
                return None
            if device not in self._loaders:
                plan = dict.fromkeys(self._expected[device])
                names, regions = plan_regions(self._checkpoint, plan)
                self._loaders[device] = PrefetchLoader(self._checkpoint, names, regions, device, DEFAULT_WINDOW_BYTES)
            return self._loaders[device]


class _PlacedSlice(Slice):
    def __init__(self, source: Source, name: str, loads: PlacedLoads) -> None:
        self._source, self._name, self._loads = source, name, loads

    def __getitem__(self, index: Any) -> Any:
        return self._loads.take(self._name) if index is Ellipsis else super().__getitem__(index)


def load_file(filename: str | os.PathLike[str], backend: str, placement: Placement) -> dict[str, Tensor]:
    """Loads all tensors of a file to the devices of a placement."""
    with safe_open(filename, backend=backend) as file:
        checkpoint = file._opened()
        return PlacedLoads(checkpoint, placement).load(checkpoint.names())
