"""Saves and loads on a FUSE file system that refuses calls, as mounts of object stores do."""

import os

import pytest
import torch
import torch.distributed as dist

import fst
from fusefs import mounted
from saved import write_each

TENSORS = {"a": torch.arange(70_000.0), "b": torch.arange(11, dtype=torch.uint8), "c": torch.zeros(0)}


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group of this process alone, for saves by ranks."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SAVES = {
    "file": fst.save_file,
    "shards": lambda tensors, path: fst.save_file(tensors, path, max_shard_bytes=100),
    "writer": lambda tensors, path: write_each(path, tensors),
    "ranks": lambda tensors, path: fst.save_distributed(tensors, path.parent),
}


# Calls that mounts refuse. Saves and loads do without them.
OPTIONAL = [
    {"truncate": "ENOSYS"},
    {"truncate": "EPERM", "fallocate": "EOPNOTSUPP"},
    {"statfs": "EPERM"},
    {"fsync": "EINVAL", "fsyncdir": "EINVAL"},
    {"unlink_open": "EBUSY"},
    {"fsync": "EOPNOTSUPP", "link": "EPERM", "chmod": "EPERM", "chown": "EPERM", "fallocate": "ENOSYS"},
]


@pytest.fixture
def mount(tmp_path, request):
    try:
        with mounted(tmp_path, **request.param) as path:
            yield path
    except OSError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("mount", OPTIONAL, indirect=True, ids=lambda refused: "-".join(refused))
def test_optional_calls(mount):
    for way, save in SAVES.items():
        directory = mount / way
        directory.mkdir()
        for value in (1, 2):
            tensors = {name: tensor + value for name, tensor in TENSORS.items()}
            save(tensors, directory / "model.safetensors")
            loaded = fst.load_file(directory)
            assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items()), way
            assert not [name for name in os.listdir(directory) if "tmp" in name], way


# Calls without which a save fails, and a part of its error. The old checkpoint stays.
REQUIRED = [
    ({"rename": "EPERM"}, "cannot give the complete new file its name.*not permitted"),
    ({"rename": "ENOSYS"}, "cannot give the complete new file its name.*save to a file system that renames files"),
    ({"rename": "EPERM", "unlink": "EIO"}, "the file .*tmp remains, since it cannot be removed"),
    ({"fsync": "EIO"}, "cannot flush the file"),
]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("mount", "message"),
    REQUIRED,
    indirect=["mount"],
    ids=lambda rule: "-".join(rule) if isinstance(rule, dict) else "",
)
def test_required_calls(mount, message):
    for way, save in SAVES.items():
        directory = mount / way
        directory.mkdir()
        old = mount.parent / "source" / way / "model.safetensors"
        fst.save_file({"old": torch.ones(3)}, old)
        with pytest.raises(OSError, match=message if way in ("file", "writer") else None):
            save(TENSORS, directory / "model.safetensors")
        assert list(fst.load_file(directory)) == ["old"], way
        if "remains" not in message:
            assert os.listdir(directory) == ["model.safetensors"], way
