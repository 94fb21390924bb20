"""Deltas of other writers: the changes that they make, and faults that are errors."""

import json
import re

import pytest
import torch

import fst
from deltafile import INDEX, frame_of, write_delta
from fst._update.delta_files import apply_delta
from fst._update.source import UpdateSource
from fst_bench.http_server import Server
from rawfile import assert_all_same


def model(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(40, 30, generator=generator).to(torch.bfloat16),
        "b": torch.randint(0, 2, (400,), generator=generator) > 0,
        "c": torch.randn(200_000, generator=generator, dtype=torch.float64),
        "same": torch.ones(3),
    }


def changed(tensors, seed):
    """Returns tensors with some elements of others, except for one tensor, and one with all elements of others."""
    others, generator = model(seed), torch.Generator().manual_seed(seed)
    new = {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < 0.05, others[name], tensor)
        for name, tensor in tensors.items()
    }
    return new | {"b": others["b"]}


def apply(old, changes):
    """Returns old tensors with changes."""
    new = []
    for tensor, (positions, values) in zip(old, changes, strict=True):
        flat = tensor.contiguous().clone().view(-1)
        if positions is None:
            flat = values.reshape(-1)
        else:
            numbers = positions.to(torch.int64)
            assert (numbers.diff() > 0).all()
            flat[numbers] = values
        new.append(flat.view(tensor.shape))
    return new


@pytest.fixture
def versions(tmp_path):
    """Three versions of a model, and the paths of the deltas between them, one with each encoding."""
    first = model(0)
    second = changed(first, 1)
    third = changed(second, 2)
    paths = [
        write_delta(tmp_path / "weight_v000001", first, second),
        write_delta(tmp_path / "weight_v000002", second, third, ("000001", "000002"), "overwrite"),
    ]
    return [first, second, third], list(map(str, paths))


def test_chain_results_in_the_last_version(versions, tmp_path):
    (first, second, third), paths = versions
    fst.save_file(first, tmp_path / "first.safetensors", metadata={"format": "pt"})
    for count, expected in (1, second), (2, third):
        directory = tmp_path / f"full{count}"
        apply_delta(tmp_path / "first.safetensors", paths[:count], directory, 1_000_000)
        assert_all_same(fst.load_file(directory), expected)
        index = json.loads((directory / INDEX).read_text())
        assert index["metadata"]["version"] == f"00000{count}"
        assert set(fst.metadata(directory / next(iter(index["weight_map"].values())))) == {"format"}
    # The result is the base of later deltas only.
    with pytest.raises(ValueError, match=r"full1: is version '000001', but .*weight_v000001 changes version '000000'"):
        apply_delta(tmp_path / "full1", paths[0], tmp_path / "other")


def test_changes_hold_only_what_differs(versions):
    (first, _, third), paths = versions
    chain = UpdateSource(paths)
    assert (chain.base_version(), chain.version(), chain.names()) == ("000000", "000002", ["a", "b", "c"])
    old = [first[name] for name in chain.names()]
    changes = chain.changes(chain.names(), old)
    assert_all_same(dict(zip(chain.names(), apply(old, changes), strict=True)), {name: third[name] for name in "abc"})
    [(positions, values), (no_positions, all_values), _] = changes
    assert torch.equal(positions.to(torch.int64), (first["a"] != third["a"]).view(-1).nonzero().view(-1))
    assert (positions.dtype, values.dtype, values.shape) == (torch.uint32, torch.bfloat16, positions.shape)
    # Most elements change, so that positions would take more memory than all values.
    assert no_positions is None
    assert torch.equal(all_values, third["b"])


def test_old_values_with_strides_and_of_mapped_files(versions, tmp_path):
    (first, _, third), paths = versions
    fst.save_file(first, tmp_path / "first.safetensors")
    chain = UpdateSource(paths)
    strided = first["a"].t().contiguous().t()
    mapped = fst.load_file(tmp_path / "first.safetensors")["c"]
    # In another order than the files.
    new = apply([mapped, strided], chain.changes(["c", "a"], [mapped, strided]))
    assert_all_same(dict(zip("ca", new, strict=True)), {name: third[name] for name in "ca"})


@pytest.mark.gpu
def test_changes_of_tensors_on_a_gpu(versions):
    (first, _, third), paths = versions
    chain = UpdateSource(paths)
    old = [first["a"].cuda(), first["b"], first["c"].cuda()[::2]]
    regions = [[], [], [(0, 100_000, 2)]]
    changes = chain.changes(["a", "b", "c"], old, [[40, 30], [400], [200_000]], regions)
    assert [values.device.type for _, values in changes] == ["cuda", "cpu", "cuda"]
    new = apply(old, changes)
    expected = {"a": third["a"], "b": third["b"], "c": third["c"][::2]}
    assert_all_same({name: tensor.cpu() for name, tensor in zip("abc", new, strict=True)}, expected)


@pytest.mark.parametrize("region", [[(0, 40, 1), (10, 7, 1)], [(3, 12, 3), (0, 30, 1)], [(39, 1, 1), (1, 14, 2)]])
def test_regions_change_as_slices_do(versions, region):
    (first, _, third), paths = versions
    chain = UpdateSource(paths)
    slices = tuple(slice(start, start + length * step, step) for start, length, step in region)
    old = first["a"][slices]
    [new] = apply([old], chain.changes(["a"], [old], [[40, 30]], [region]))
    assert torch.equal(new, third["a"][slices])


def test_delta_of_a_server(versions, tmp_path):
    (first, second, _), _ = versions
    files = {f"v1/{file.name}": file.read_bytes() for file in (tmp_path / "weight_v000001").iterdir()}
    with Server(files) as server:
        chain = UpdateSource([server.url(f"v1/{INDEX}")])
        old = [first[name] for name in chain.names()]
        new = apply(old, chain.changes(chain.names(), old))
        # Errors name the files without the query, which may be a secret.
        signed = [f"{server.url(path)}?token=secret" for path in (f"v1/{INDEX}", "v1/model-00001-of-00004.safetensors")]
        for paths, fault in ((signed[:1], "version"), (signed, "invalid-argument")):
            with pytest.raises(ValueError, match=rf"\[{fault}\] http://.*\?\.\.\.: ") as caught:
                torch.ops.fst.prepare_update(paths, ["a"], [first["a"].clone()])
            assert "secret" not in str(caught.value)
    assert_all_same(dict(zip(chain.names(), new, strict=True)), {name: second[name] for name in "abc"})


def test_deltas_that_do_not_follow_each_other(versions):
    _, [first, second] = versions
    with pytest.raises(ValueError, match=r'weight_v000001/.*changes version "000000", but .*weight_v000002/.*"000002"'):
        UpdateSource([second, first])


OLD, NEW = {"w": torch.zeros(4)}, {"w": torch.ones(4)}


def test_invalid_delta_is_an_error(tmp_path):
    for number, (options, message) in enumerate(
        [
            ({"delta_encoding": None}, "not a delta, but a full checkpoint"),
            ({"delta_encoding": "sparse"}, '"delta_encoding": "sparse"; known are xor, overwrite'),
            ({"compression_format": "lz4"}, '"compression_format": "lz4"; known are zstd'),
            ({"checksum_format": "crc32"}, '"checksum_format": "crc32"; known are xxh3-128, blake3, adler32'),
            ({"base_version": None}, 'has no "base_version"'),
            ({"checksums": {"w": "xyz"}}, 'tensor "w": .*adler32 checksum .* is "xyz"; expected 8 hexadecimal digits'),
        ]
    ):
        path = write_delta(tmp_path / f"delta{number}", OLD, NEW, **options)
        with pytest.raises(ValueError, match=message) as error:
            UpdateSource([str(path)]).names()
        assert str(path) in str(error.value)


def test_files_with_tensors_that_the_index_does_not_list(tmp_path):
    path = write_delta(tmp_path / "delta", OLD | {"v": torch.zeros(1)}, NEW | {"v": torch.ones(1)})
    index = json.loads((path / INDEX).read_text())
    [shard] = {index["weight_map"]["w"]}
    (path / shard).write_bytes((path / index["weight_map"].pop("v")).read_bytes())
    index["weight_map"]["v"] = index["weight_map"].pop("w")
    (path / INDEX).write_text(json.dumps(index))
    UpdateSource([str(path)])
    fst.save_file({"v": torch.zeros(8, dtype=torch.uint8), "w": torch.zeros(8, dtype=torch.uint8)}, path / shard)
    with pytest.raises(ValueError, match="lists 1 tensors, but its files hold 2"):
        UpdateSource([str(path)])


def test_invalid_frame_is_an_error(tmp_path):
    """tests/rust/delta.rs has all faults of frames."""
    frame = frame_of(bytes(16))
    for fault, message in (
        (frame[:-1], "the frame is incomplete"),
        (frame, "the new bytes have adler32:00100001; adler32:16f402fd was expected"),
    ):
        path = write_delta(tmp_path / message[:9], OLD, NEW, frames={"w": fault})
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            UpdateSource([str(path)]).changes(["w"], [OLD["w"]])
        assert re.search(r'model-00000-of-00001\.safetensors: tensor "w": byte \d+: ', str(error.value))


def test_arguments_that_do_not_fit(tmp_path):
    chain = UpdateSource([str(write_delta(tmp_path / "delta", OLD, NEW))])
    for names, old, shapes, message in [
        (["v"], [OLD["w"]], None, 'tensor "v": no delta changes it'),
        (["w", "w"], [OLD["w"]] * 2, None, 'tensor "w": no delta changes it; give each name of names\\(\\) once'),
        (["w"], [], None, "1 names, but 0 tensors"),
        (["w"], [OLD["w"]], [[5]], 'tensor "w": has 16 bytes; its shape and index region have 20'),
        (["w"], [torch.zeros(4, device="meta")], None, 'tensor "w": is on meta'),
    ]:
        with pytest.raises(ValueError, match=message):
            chain.changes(names, old, shapes)
