"""URLs at every entrance of the Python package."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fst
import fst.dcp
import fst.torch
from fst import cli
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


@pytest.fixture
def file_url(server):
    return server.url("m.safetensors")


def check_same(loaded):
    assert_equal(loaded, TENSORS)


def test_load_module(url):
    model = torch.nn.Linear(3, 4)
    model.register_buffer("large", torch.zeros_like(TENSORS["large"]))
    fst.load_module(model, url)
    assert_same(model.weight.data, TENSORS["weight"])
    assert_same(model.large, TENSORS["large"])


def test_safetensors_interface(file_url):
    check_same(fst.torch.load_file(file_url))
    with fst.torch.safe_open(file_url, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert_same(file.get_slice("large")[500:, ::3], TENSORS["large"][500:, ::3])


def load_with_ranks(url):
    loaded = fst.load_sharded(url, Shard(0))
    mesh = init_device_mesh("cpu", (2,))
    distributed = fst.load_distributed(url, mesh, {"*": [Shard(0)]})
    state = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(state, storage_reader=fst.dcp.StorageReader(url))
    streamed = dict(fst.stream_sharded(url, ...))
    return loaded, {name: tensor.full_tensor() for name, tensor in distributed.items()}, state, streamed


def test_ranks(url, ranks):
    results = ranks(2).run(load_with_ranks, url)
    for name, tensor in TENSORS.items():
        assert_same(torch.cat([loaded[name] for loaded, *_ in results]), tensor)
    for _, *whole in results:
        for loaded in whole:
            check_same(loaded)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_alone(url):
    state = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    assert fst.dcp.StorageReader.validate_checkpoint_id(url)
    dcp.load(state, storage_reader=fst.dcp.StorageReader(url), no_dist=True)
    check_same(state)


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    """Runs the command `fst`, and returns its exit code and its output."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        output = capsys.readouterr()
        return end.value.code, output.out + output.err

    return run


def test_cli(url, command):
    for arguments in (
        ["inspect", url],
        ["load", url],
        ["verify", "--finite", url],
        ["convert", url, "new.safetensors"],
    ):
        code, output = command(*arguments)
        assert code == 0, output
    check_same(fst.load_file("new.safetensors"))


def test_cli_hides_secrets(server, command):
    url = f"{server.url('m.safetensors')}?signature=secret"
    for arguments in (["inspect", url], ["load", url], ["verify", url], ["verify", url.replace("/m", "/missing")]):
        _, output = command(*arguments)
        assert "secret" not in output


def test_verify_reports_a_missing_file_once(server, command):
    server.remove("dir/model-2.safetensors")
    code, output = command("verify", server.url("dir/"))
    assert code == 1
    assert "ok      bytes of http" in output
    assert output.count("WRONG") == 1
    assert f"WRONG   header of {server.url('dir/model-2.safetensors')}: " in output
    assert "status 404" in output


def test_fastsafetensors(server):
    urls = [server.url(f"dir/{file}") for file in FILES]
    with fastsafetensors.fastsafe_open(urls) as file:
        check_same({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    metadata = fastsafetensors.SafeTensorsMetadata.from_file(urls[1])
    size = metadata.header_length + TENSORS["weight"].nbytes + TENSORS["bias"].nbytes
    assert metadata.size_bytes == size == len(save(FILES["model-2.safetensors"]))


def test_instanttensor(url):
    with instanttensor.safe_open(url, "pt", "cpu") as file:
        check_same(dict(file.tensors()))
        assert_same(file.get_tensor("large"), TENSORS["large"])


def test_unifiedefficientloader(file_url):
    for low_memory in (False, True):
        with UnifiedSafetensorsLoader(file_url, low_memory) as loader:
            check_same(loader.load_all())
            assert_same(loader.get_tensor("bias"), TENSORS["bias"])
            [[streamed]] = loader.async_stream(["large"])
            assert_same(streamed[1], TENSORS["large"])


def test_pathlib_cannot_hold_urls(file_url):
    uses = (
        fst.load_file,
        fst.stream,
        fst.tensor_names,
        fst.dcp.StorageReader,
        lambda path: fst.safe_open(path, "pt"),
        lambda path: fst.load_tensors([path], ["weight"]),
    )
    for use in uses:
        with pytest.raises(ValueError, match="pass the URL as a str"):
            use(Path(file_url))
    with pytest.raises(ValueError, match="pass the URL as a str") as error:
        fst.load_file(Path("redis://:secret@host/m"))
    assert "secret" not in str(error.value)
