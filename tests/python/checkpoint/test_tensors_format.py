"""Files in tensorizer's format: everything that loads safetensors loads them, and faults are errors."""

import random
import re

import pytest
import torch

import fst
import tensorsfile
from fst._checkpoint.checkpoint import OpenCheckpoint
from fst_bench.http_server import Server
from placements import rows, shard_of
from rank_processes import on_ranks
from rawfile import DTYPES, Raw, assert_all_same, assert_same, bits_of, random_raw
from saved import flip_bit
from tensorsfile import BUFFER, PARAMETER, Stored, encode, stored

SHAPES = [(), (1,), (0, 3), (5, 8), (3, 2, 4), (300, 200)]
RAW = {
    f"{dtype} {list(shape)}": random_raw(dtype, shape) for dtype in DTYPES for shape in SHAPES if dtype != "F4" or shape
}
RAW = {name: raw for name, raw in RAW.items() if raw.dtype != "F4" or raw.shape[-1] % 2 == 0}
SMALL = {"w": random_raw("F32", (2, 3)), "v": random_raw("BF16", (5,)), "u": random_raw("U8", (7,))}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file whose metadata is not in the order of the data, and with gaps between tensors."""
    order = list(RAW)
    random.Random(1).shuffle(order)
    tensors = {name: stored(raw, gap=index % 3) for index, (name, raw) in enumerate(RAW.items())}
    path = tmp_path_factory.mktemp("format") / "model"
    path.write_bytes(encode(tensors, metadata_bytes=20_000, order=order))
    return path


def test_slices(path):
    with fst.safe_open(path) as file:
        for name, raw in RAW.items():
            if raw.torch_shape and raw.torch_shape[0]:
                assert_same(file.get_slice(name)[: raw.torch_shape[0] // 2 + 1], raw.tensor()[: raw.shape[0] // 2 + 1])


def test_element_across_blocks_of_direct_reads(tmp_path, monkeypatch):
    values = torch.arange(5000, dtype=torch.float64)
    (tmp_path / "odd").write_bytes(encode({"w": stored(Raw("F64", (5000,), values.numpy().tobytes()), gap=3)}))
    monkeypatch.setenv("FST_CHUNK_BYTES", "4096")
    monkeypatch.setenv("FST_READER", "uring")
    assert torch.equal(fst.load_file(tmp_path / "odd", dtype=torch.float32)["w"], values.float())


def test_names_in_the_order_of_the_data(tmp_path):
    tensors = {name: stored(raw) for name, raw in SMALL.items()}
    (tmp_path / "m").write_bytes(encode(tensors, order=["v", "u", "w"]))
    assert fst.tensor_names(tmp_path / "m") == ["v", "u", "w"]
    assert fst.metadata(tmp_path / "m") == {}
    checkpoint = OpenCheckpoint(tmp_path / "m")
    begin = {name: checkpoint.tensor_info(name).begin for name in SMALL}
    content = (tmp_path / "m").read_bytes()
    for name, raw in SMALL.items():
        assert content[begin[name] : begin[name] + len(raw.data)] == raw.data
        offsets = begin[name] - begin["v"], begin[name] - begin["v"] + len(raw.data)
        assert fst.safe_open(tmp_path / "m").get_tensor_meta(name).data_offsets == offsets


@pytest.fixture
def empty(tmp_path):
    """A file with tensors that are stored without data."""
    tensors = {
        "zeros": Stored("<f4", (4, 3), kind=PARAMETER),
        "w": stored(SMALL["w"]),
        "narrow": Stored("|V1\0torch.float4_e2m1fn_x2", (3,), kind=BUFFER),
        "many": Stored("<V2\0torch.bfloat16", (40_000,)),
    }
    path = tmp_path / "empty.tensors"
    path.write_bytes(encode(tensors, version=4))
    return path


def test_tensors_without_data_are_zeros(empty):
    casts = {"dtype": torch.float64}
    for loaded in (fst.load_file(empty, verify=True), fst.load_file(empty, **casts), dict(fst.stream(empty, **casts))):
        assert not loaded["zeros"].any()
        assert not loaded["many"].any()
        assert (loaded["zeros"].shape, loaded["many"].shape) == ((4, 3), (40_000,))
        assert not loaded["narrow"].view(torch.uint8).any()
    assert_same(fst.load_file(empty)["w"], SMALL["w"].tensor())
    out = torch.ones(3, 4).t()
    fst.load_into(empty, ["zeros"], [out])
    assert not out.any()
    assert fst.safe_open(empty).get_slice("zeros")[1:, ::2].tolist() == [[0, 0]] * 3


def test_versions(tmp_path):
    path = tmp_path / "m"
    for version in (1, 2, 4, 5):
        tensorsfile.write(path, SMALL, version=version)
        assert_same(fst.load_file(path)["v"], SMALL["v"].tensor())
    # Dimensions of 8 bytes.
    tensors = {"long": Stored("|u1", (2**33, 0), is_long=True), "w": stored(SMALL["w"])}
    path.write_bytes(encode(tensors, version=5, flags=2))
    assert fst.load_file(path, verify=True)["long"].shape == (2**33, 0)
    for version, flags in ((3, 0), (4, 1), (5, 3)):
        tensorsfile.write(path, SMALL, version=version, flags=flags)
        with pytest.raises(ValueError, match="encrypted"):
            fst.load_file(path)
    # Old versions ignore the flag of encryption.
    fst.load_file(tensorsfile.write(path, SMALL, version=2, flags=1))


@pytest.mark.parametrize("strategy", ["own", "exchange"])
@on_ranks(2)
def test_sharded_loads(path, empty, strategy):
    for file in (path, empty):
        expected = {name: shard_of(tensor, rows(name, tensor.shape)) for name, tensor in fst.load_file(file).items()}
        assert_all_same(fst.load_sharded(file, rows, strategy=strategy, window_bytes=4096), expected)


def test_modules(tmp_path):
    def make():
        layer = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        layer.register_buffer("extra", torch.rand(2))
        return layer

    expected = make().state_dict()
    tensors = {}
    for name, tensor in expected.items():
        kind = PARAMETER if name.endswith(("weight", "bias")) else BUFFER
        raw = Raw("I64" if tensor.dtype == torch.int64 else "F32", tuple(tensor.shape), bits_of(tensor))
        # tensorizer begins the names of a root module's own tensors with a dot.
        tensors[name if "." in name else f".{name}"] = stored(raw, kind=kind)
    (tmp_path / "m").write_bytes(encode(tensors))
    with torch.device("meta"):
        other = make()
    fst.load_module(other, tmp_path / "m", "cpu")
    assert_all_same(other.state_dict(), expected)


def test_remote_files(path):
    # The metadata is longer than the bytes that the first request brings.
    long = encode({name: stored(raw) for name, raw in RAW.items()}, metadata_bytes=3 << 20)
    with Server() as server:
        for name, content in {"long": long, "model.tensors": path.read_bytes()}.items():
            server.put(name, content)
            for loaded in (fst.load_file(server.url(name)), dict(fst.stream(server.url(name)))):
                assert_all_same(loaded, RAW)
            fst.verify(server.url(name))


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("verify", [False, True])
def test_loads_of_every_dtype_and_shape(path, verify):
    out = {name: torch.empty_like(raw.tensor()) for name, raw in RAW.items()}
    fst.load_into(path, list(RAW), list(out.values()), verify=verify)
    for loaded in (
        out,
        fst.load_file(path, verify=verify),
        dict(zip(RAW, fst.load_tensors(path, list(RAW), verify=verify), strict=True)),
        dict(fst.stream(path, verify=verify)),
        fst.safe_open(path, verify=verify).get_tensors(),
    ):
        assert_all_same(loaded, RAW)


@pytest.mark.parametrize("algorithm", ["sha256", "crc32"])
def test_changed_data_is_found(tmp_path, algorithm):
    algorithms = "both" if algorithm == "sha256" else algorithm
    content = encode({name: stored(raw, algorithms=algorithms) for name, raw in SMALL.items()})
    path = tmp_path / "m"
    path.write_bytes(content)
    fst.verify(path)
    begin = OpenCheckpoint(path).tensor_info("v").begin
    out = torch.zeros(5, dtype=torch.bfloat16)
    # A byte of the data, and of the number of the module in the header before it.
    for at in (begin, begin - len(tensorsfile.header("v", stored(SMALL["v"], algorithms=algorithms))) + 8):
        path.write_bytes(content)
        flip_bit(path, at)
        for load in (
            lambda: fst.verify(path),
            lambda: fst.load_file(path, verify=True),
            lambda: fst.load_tensors(path, ["v"], verify=True),
            lambda: fst.load_into(path, ["v"], [out], verify=True),
        ):
            with pytest.raises(fst.IntegrityError, match=rf'm: tensor "v".*{algorithm}:'):
                load()
        assert not out.any()
        assert_same(fst.load_tensors(path, ["w"], verify=True)[0], SMALL["w"].tensor())


def test_tensors_without_hashes(tmp_path):
    (tmp_path / "m").write_bytes(encode({"v": stored(SMALL["v"], algorithms="none")}))
    with pytest.raises(fst.IntegrityError, match=r"m: .*no hash"):
        fst.verify(tmp_path / "m")


def test_slices_are_not_verified(tmp_path):
    path = tensorsfile.write(tmp_path / "m", SMALL)
    with pytest.raises(fst.IntegrityError, match='"v"'):
        fst.load_slices(path, ["v"], [0], [1], [3], verify=True)
    with pytest.warns(fst.IntegrityWarning, match='"v"'):
        [part] = fst.load_slices(path, ["v"], [0], [1], [3], verify=fst.Verify(True, partial="allow"))
    assert_same(part, SMALL["v"].tensor()[1:4])


def one(**fields) -> bytes:
    return encode({"w": Stored("<f4", (2, 3), bytes(24), **fields)})


def dtype(name: str, shape: tuple[int, ...] = (6,)) -> bytes:
    return encode({"w": Stored(name, shape, bytes(24))})


W = 'tensor "w": byte '
# The data of the second tensor is the last byte of the first and those after it.
PLACE = tensorsfile.PREAMBLE_BYTES + 4096 + len(tensorsfile.header("v", stored(SMALL["u"]))) + 6
OVERLAPPING = {"v": stored(SMALL["u"]), "w": stored(SMALL["u"], changes={"data": PLACE, "header": PLACE - 1})}
MALFORMED = {
    "a preamble that is cut off": (encode({})[:72], "72 bytes"),
    "metadata that are cut off": (encode({})[:100], "4096, .*27 bytes after it.*cut off"),
    "metadata beyond any file": (encode({}, metadata_bytes=0)[:65] + b"\xff" * 8, "cut off"),
    "version 0": (encode({}, version=0), "byte 5: .*version 0"),
    "version 6": (encode({}, version=6), "byte 5: .*version 6"),
    "an unknown flag": (encode({}, flags=4), "byte 9: "),
    "a high flag": (encode({}, flags=1 << 255), "byte 9: "),
    "versions of entries in version 4": (encode({}, version=4, flags=2), "byte 9: "),
    "more tensors stated": (encode({"w": stored(SMALL["w"])}, count=2**64 - 1), "the dtype is empty"),
    "a name twice": (
        encode({"a": stored(SMALL["u"]), "b": stored(SMALL["u"])}).replace(b"\1\0b", b"\1\0a"),
        'tensor "a": byte .*twice',
    ),
    "a kind of 3": (one(kind=3), W + ".*kind is 3"),
    "data in the metadata": (one(changes={"data": 80, "header": 75}), W + "80"),
    "data past the end": (one(changes={"data": 4400}), W + "4400: .*cut off"),
    "data at 2^64": (one(changes={"data": 2**64 - 1}), W),
    "a negative length": (one(changes={"length": 2**64 - 24}), W),
    "a shorter length": (one(changes={"length": 23}), W + ".*24 bytes, but the data has 23"),
    "a longer length": (one(changes={"length": 25}), W + ".*24 bytes, but the data has 25"),
    "a header in the metadata": (one(changes={"header": 0}), W + ".*header"),
    "a header after the data": (one(changes={"header": 4300}), W + ".*header"),
    "a shape that overflows": (encode({"w": Stored("<f4", (2**32 - 1,) * 3)}), W + ".*overflows"),
    "65 dimensions": (encode({"w": Stored("<f4", (1,) * 65, bytes(4))}), W + ".*65 dimensions"),
    "a name that is not UTF-8": (one().replace(b"\1\0w", b"\1\0\xff"), "UTF-8"),
    "another size of raw bytes": (dtype("<V4\0torch.bfloat16"), W + ".*2 bytes"),
    "overlapping tensors": (encode(OVERLAPPING), W + ".*another tensor ends"),
}
UNSUPPORTED = {
    "big-endian": (dtype(">f4"), W + ".*big-endian"),
    "NumPy's text": (dtype("<U1"), W + ".*<U1"),
    "four bits": (dtype("|V1\0torch.uint4", (24,)), W + ".*torch.uint4"),
    "two separators": (dtype("|V1\0torch.bfloat16\0", (24,)), W),
}


def test_malformed_files(tmp_path):
    path = tmp_path / "bad.tensors"
    for cases, expected in ((MALFORMED, fst.SafetensorError), (UNSUPPORTED, NotImplementedError)):
        for content, message in cases.values():
            path.write_bytes(content)
            for call in (fst.load_file, fst.tensor_names, lambda path: fst.load_file(path, "meta")):
                with pytest.raises(expected, match=f"^{re.escape(str(path))}: .*{message}"):
                    call(path)
