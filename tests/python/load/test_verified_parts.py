"""Verified loads of parts of tensors, which compare the groups of BLAKE3's tree that the parts touch.

tests/rust/digest_groups.rs has parts of all forms.
"""

import base64
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fst
from saved import damage, write_each
from suite import READERS

GROUP_BYTES = 1 << 20
# Groups have 262,144 elements, and 256 rows of "large". Its last group has fewer.
TENSORS = {
    "large": torch.arange(1200 * 1024, dtype=torch.float32).reshape(1200, 1024),
    "small": torch.arange(1000, dtype=torch.int16).reshape(10, 100),
}
LARGE_BYTES = TENSORS["large"].nbytes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    fst.save_file(TENSORS, path, digests="blake3")
    return path


def safe_open(path: Path, index: object) -> Tensor:
    with fst.safe_open(path, verify=True) as file:
        return file.get_slice("large")[index]


def prefetch(path: Path, rows: slice) -> Tensor:
    with fst.safe_open(path, verify=True) as file, file.prefetch({"large": rows}) as loader:
        return loader.take("large")


def compiled(path: Path) -> Tensor:
    text = str(path)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def load() -> Tensor:
        [rows] = fst.load_slices(text, ["large"], [0], [300], [400], verify=True)
        return rows + 0

    return load()


ROWS = slice(300, 700)  # They touch groups 1 and 2.
LOADS: dict[str, Callable[[Path], Tensor]] = {
    "load_slices": lambda path: fst.load_slices(path, ["large"], [0], [300], [400], verify=True)[0],
    "progress": lambda path: fst.load_slices(path, ["large"], [0], [300], [400], progress=True, verify=True)[0],
    "load_boxes": lambda path: fst.load_boxes(path, ["large"], [[(300, 400, 1), (0, 1024, 1)]], verify=True)[0],
    "cast": lambda path: fst.load_slices(path, ["large"], [0], [300], [400], dtype=torch.float64, verify=True)[0],
    "safe_open": lambda path: safe_open(path, ROWS),
    "list": lambda path: safe_open(path, list(range(300, 700))),
    "prefetch": lambda path: prefetch(path, ROWS),
    "operator": lambda path: torch.ops.fst.load_slices([str(path)], ["large"], [0], [300], [400], verify="digests")[0],
    "compiled": compiled,
}


@pytest.mark.parametrize(
    ("load", "named_reader"), list(zip(LOADS.values(), cycle(["default", *READERS]))), indirect=["named_reader"]
)
@pytest.mark.usefixtures("named_reader")
def test_every_load_of_a_part_compares_its_groups(path, load):
    def load_rows() -> Tensor:
        return load(path).to(torch.float32)

    expected = TENSORS["large"][ROWS]
    assert load_rows().equal(expected)
    # In other groups, which are not read.
    damage(path, "large", GROUP_BYTES - 1)
    damage(path, "large", 3 * GROUP_BYTES)
    assert load_rows().equal(expected)
    # In a group of the part, but not in the part.
    damage(path, "large", 3 * GROUP_BYTES - 1)
    pattern = r'model.safetensors.*"large".*a group of 1048576 bytes is blake3:[0-9a-f]{64}'
    # Operators raise the exceptions of C++.
    is_operator = load in (LOADS["operator"], LOADS["compiled"])
    with pytest.raises(ValueError if is_operator else fst.IntegrityError, match=pattern):
        load(path)


@pytest.mark.parametrize(("start", "count"), [(0, 1), (255, 2), (300, 400), (0, 1199)])
def test_a_contiguous_part_reads_two_groups_too_many_at_most(path, start, count):
    with fst.profile() as profile:
        fst.load_slices(path, ["large"], [0], [start], [count], verify=True)
    first, last = start * 4096 // GROUP_BYTES, (start + count) * 4096 // -GROUP_BYTES
    touched_bytes = min(-last * GROUP_BYTES, LARGE_BYTES) - first * GROUP_BYTES
    stages = profile.summary().stages
    assert stages["read"].bytes == stages["hash"].bytes == touched_bytes
    assert touched_bytes < count * 4096 + 2 * GROUP_BYTES


def test_columns_read_each_group_once(path):
    with fst.profile() as profile:
        fst.load_slices(path, ["large"], [1], [10], [3], verify=True)
    # A slow thread may find that the copy of its group is gone, and read it again.
    assert LARGE_BYTES <= profile.summary().stages["read"].bytes <= LARGE_BYTES + 2 * GROUP_BYTES


def test_every_save_writes_the_values(path, tmp_path):
    def values(path: Path) -> str:
        _, _, _, group_bytes, values = fst.metadata(path)["fst.digests"].split(":")
        assert int(group_bytes) == GROUP_BYTES
        assert len(base64.urlsafe_b64decode(values + "=" * (-len(values) % 4))) == 5 * 32
        assert fst.load_file(path, verify=True)["large"].equal(TENSORS["large"])
        return values

    expected = values(path)
    other = tmp_path / "other.safetensors"
    fst.save_file_async(TENSORS, other, digests="blake3").result()
    assert values(other) == expected
    write_each(other, TENSORS, digests="blake3")
    assert values(other) == expected
    serialized = torch.ops.fst.serialize(list(TENSORS.values()), list(TENSORS), metadata={"fst.digests": "blake3"})
    other.write_bytes(serialized.numpy().tobytes())
    assert values(other) == expected
    sharded = tmp_path / "sharded" / "model.safetensors"
    sharded.parent.mkdir()
    fst.save_file(TENSORS, sharded, max_shard_bytes=LARGE_BYTES, digests="blake3")
    [first, _] = sorted(sharded.parent.glob("*.safetensors"))
    assert values(first) == expected
    assert fst.safe_open(sharded.parent).metadata() == {}
    assert fst.load_file(sharded.parent, verify=True).keys() == TENSORS.keys()
