"""Options of the load format `fst` in a server's configuration."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from fst._core.arguments import DEFAULT_WINDOW_BYTES, size_of
from fst._core.urls import is_url

Order = Literal["file", "ready"]
DeviceType = Literal["cpu", "cuda"]
Ranks = Literal["alone", "together"]


@dataclass(frozen=True)
class Options:
    """Extra configuration of the load format `fst`.

    Attributes:
        window_bytes: As in `fst.stream`.
        order: As in `fst.stream`.
        device: Device of the tensors that the model gets. "cuda" is the GPU of the rank. `None` is the model's device.
        ranks: How the ranks of tensor parallelism read. "alone": each rank reads all files. "together": each byte is
            read once for all ranks.
        uri: URL of the weights, as in `fst.load_file`: a file, an index file, or a prefix with one checkpoint. `None`
            is the model's path, which then has the weights. Otherwise it has everything else, such as the
            configuration and the tokenizer.
    """

    window_bytes: int = DEFAULT_WINDOW_BYTES
    order: Order = "file"
    device: DeviceType | None = None
    ranks: Ranks = "alone"
    uri: str | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "window_bytes", size_of(self.window_bytes, "window_bytes"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"load format fst: {error}") from None
        choices = {"order": get_args(Order), "device": get_args(DeviceType), "ranks": get_args(Ranks)}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed and (name, value) != ("device", None):
                raise ValueError(f"load format fst: {name} must be one of {allowed}, not {value!r}")
        if self.uri is not None and not (isinstance(self.uri, str) and is_url(self.uri)):
            # The value may be secret.
            raise ValueError("load format fst: uri must be a URL, such as s3://bucket/model/")
        if self.ranks == "together" and self.order != "file":
            raise ValueError('load format fst: ranks="together" requires order="file"')

    @classmethod
    def of(cls, config: object, *, ignored: Container[str] = ()) -> "Options":
        """Returns the options of a decoded JSON object. Names in `ignored` are options of the server.

        Raises:
            ValueError: `config` is not an object, or an option is unknown or has an invalid value.
        """
        if not isinstance(config, Mapping):
            raise ValueError(f"load format fst: the extra config must be an object, not {type(config).__name__}")
        known = [field.name for field in fields(cls)]
        options = {name: value for name, value in config.items() if name not in ignored}
        unknown = [name for name in options if name not in known]
        if unknown:
            raise ValueError(
                f"load format fst: unknown option in the extra config: {', '.join(map(repr, unknown))};"
                f" the options are {', '.join(known)}"
            )
        return cls(**options)
