"""What a server's configuration may say to fst."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from fst._load.stream import WINDOW_BYTES

Order = Literal["file", "landed"]
DeviceType = Literal["cpu", "cuda"]
Ranks = Literal["alone", "together"]


@dataclass(frozen=True)
class Options:
    """The extra configuration of the load format `fst`.

    Attributes:
        window_bytes: As in `fst.stream`: how far the load may be ahead of the model.
        order: As in `fst.stream`.
        device: Where tensors are handed to the model: "cuda" is the GPU of the rank; None is where the model is.
        ranks: How the ranks of tensor parallelism read: each by itself, or "together", so that each byte is read once.
    """

    window_bytes: int = WINDOW_BYTES
    order: Order = "file"
    device: DeviceType | None = None
    ranks: Ranks = "alone"

    def __post_init__(self) -> None:
        # A bool is an int, but no number of bytes.
        if type(self.window_bytes) is not int or self.window_bytes < 1:
            raise ValueError(f"load format fst: window_bytes must be a whole number from 1, not {self.window_bytes!r}")
        if self.order not in get_args(Order):
            raise ValueError(f"load format fst: order must be one of {get_args(Order)}, not {self.order!r}")
        if self.device not in (None, *get_args(DeviceType)):
            raise ValueError(f"load format fst: device must be one of {get_args(DeviceType)}, not {self.device!r}")
        if self.ranks not in get_args(Ranks):
            raise ValueError(f"load format fst: ranks must be one of {get_args(Ranks)}, not {self.ranks!r}")
        if self.ranks == "together" and self.order != "file":
            raise ValueError('load format fst: ranks that load together have one order, which is "file"')

    @classmethod
    def of(cls, config: object, *, besides: Container[str] = ()) -> "Options":
        """The options that a decoded JSON object gives, `besides` those of these names, which others read.

        Raises ValueError, which names what is wrong.
        """
        if not isinstance(config, Mapping):
            raise ValueError(f"load format fst: the extra config must be an object, not {type(config).__name__}")
        known = [field.name for field in fields(cls)]
        ours = {name: value for name, value in config.items() if name not in besides}
        unknown = [name for name in ours if name not in known]
        if unknown:
            raise ValueError(
                f"load format fst: no such option in the extra config: {', '.join(map(repr, unknown))};"
                f" there are {', '.join(known)}"
            )
        return cls(**ours)
