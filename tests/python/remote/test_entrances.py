"""URLs at every entrance of the Python package."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fst
import fst.dcp
import fst.torch
from fst.compat import fastsafetensors, instanttensor
from fst.compat.unifiedefficientloader import UnifiedSafetensorsLoader
from objects import assert_equal
from rawfile import assert_same

# The large one is beyond the bytes that come with the header.
TENSORS = {"large": torch.arange(1 << 19).reshape(512, 1024), "weight": torch.randn(4, 3), "bias": torch.randn(4)}
FILES = {
    "model-1.safetensors": {"large": TENSORS["large"]},
    "model-2.safetensors": {"weight": TENSORS["weight"], "bias": TENSORS["bias"]},
}
INDEX = {"weight_map": {name: file for file, tensors in FILES.items() for name in tensors}}


@pytest.fixture
def server(http_server):
    """Server of the checkpoint as one file, and as two files with an index."""
    http_server.put("m.safetensors", save(TENSORS, metadata={"format": "pt"}))
    for file, tensors in FILES.items():
        http_server.put(f"dir/{file}", save(tensors))
    http_server.put("dir/model.safetensors.index.json", json.dumps(INDEX).encode())
    return http_server


@pytest.fixture(params=["m.safetensors", "dir/model.safetensors.index.json", "dir/"])
def url(server, request):
    return server.url(request.param)


def load_module(url):
    model = torch.nn.Linear(3, 4)
    model.register_buffer("large", torch.zeros_like(TENSORS["large"]))
    fst.load_module(model, url)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def load_dcp(url, **options):
    assert fst.dcp.StorageReader.validate_checkpoint_id(url)
    state = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(state, storage_reader=fst.dcp.StorageReader(url), **options)
    return state


def load_instanttensor(url):
    with instanttensor.safe_open(url, "pt", "cpu") as file:
        assert_same(file.get_tensor("large"), TENSORS["large"])
        return dict(file.tensors())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "load", [load_module, lambda url: load_dcp(url, no_dist=True), load_instanttensor], ids=["module", "dcp", "instant"]
)
def test_entrances_of_checkpoints(url, load):
    assert_equal(load(url), TENSORS)


def test_state_beside_a_signed_index(http_server, tmp_path):
    dcp.save({"a": torch.arange(3), "step": 7}, storage_writer=fst.dcp.StorageWriter(tmp_path), no_dist=True)
    for file in tmp_path.iterdir():
        http_server.put(file.name, file.read_bytes())
    [index] = tmp_path.glob("*.index.json")
    reader = fst.dcp.StorageReader(f"{http_server.url(index.name)}?signature=secret")
    state_dict = {"a": torch.zeros(3, dtype=torch.int64), "step": 0}
    dcp.load(state_dict, storage_reader=reader, no_dist=True)
    assert (state_dict["step"], state_dict["a"].tolist()) == (7, [0, 1, 2])


def test_entrances_of_files(server):
    url = server.url("m.safetensors")
    assert_equal(fst.torch.load_file(url), TENSORS)
    with fst.torch.safe_open(url, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert_same(file.get_slice("large")[500:, ::3], TENSORS["large"][500:, ::3])
    for low_memory in (False, True):
        with UnifiedSafetensorsLoader(url, low_memory) as loader:
            assert_equal(loader.load_all(), TENSORS)
            assert_same(loader.get_tensor("bias"), TENSORS["bias"])
            [[streamed]] = loader.async_stream(["large"])
            assert_same(streamed[1], TENSORS["large"])
    urls = [server.url(f"dir/{file}") for file in FILES]
    loader = fastsafetensors.SafeTensorsFileLoader(None)
    loader.add_filenames({0: urls})
    with loader.copy_files_to_device() as buffer:
        assert_equal({name: buffer.get_tensor(name) for name in buffer.key_to_rank_lidx}, TENSORS)


def load_with_ranks(url):
    distributed = fst.load_distributed(url, init_device_mesh("cpu", (2,)), {"*": [Shard(0)]})
    whole = {name: tensor.full_tensor() for name, tensor in distributed.items()}
    return whole, load_dcp(url), dict(fst.stream_sharded(url, ...))


def test_ranks(url, ranks):
    """test_remote_ranks.py has `load_sharded`."""
    for results in ranks(2).run(load_with_ranks, url):
        for loaded in results:
            assert_equal(loaded, TENSORS)


def test_cli(url, command, tmp_path):
    signed = f"{url}?signature=secret" if url.endswith("m.safetensors") else url
    for arguments in (["inspect"], ["time"], ["verify", "--finite"], ["convert"]):
        done = command(*arguments, signed, *(["new.safetensors"] if arguments == ["convert"] else []))
        assert done.returncode == 0, done
        assert "secret" not in done.stdout + done.stderr
    assert_equal(fst.load_file(tmp_path / "new.safetensors"), TENSORS)


def test_verify_reports_a_missing_file_once(server, command):
    server.remove("dir/model-2.safetensors")
    done = command("verify", server.url("dir/"))
    assert done.returncode == 1
    assert "ok      bytes of http" in done.stdout
    assert done.stdout.count("WRONG") == 1
    assert f"WRONG   header of {server.url('dir/model-2.safetensors')}: " in done.stdout
    assert "status 404" in done.stdout
    assert "secret" not in command("verify", f"{server.url('missing.safetensors')}?signature=secret").stdout
