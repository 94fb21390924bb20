"""What holds for updates from deltas as for any load: verification, encryption, ties, versions and addresses."""

import hashlib
import itertools
import threading
from functools import partial
from random import Random

import pytest
import torch
from torch import nn

import fst
from deltafile import INDEX, frame_of, write_delta, xor
from fst._update.delta_files import apply_delta
from fst_bench import memory
from fst_bench.http_server import Server
from rawfile import assert_all_same, bits_of

OLD = {"a": torch.arange(64.0), "b": torch.ones(8, 4).bfloat16()}
NEW = {"a": torch.arange(64.0).index_fill(0, torch.tensor([3, 60]), 7.0), "b": torch.ones(8, 4).bfloat16() * 2}
NEWEST = {"a": NEW["a"] + 1, "b": NEW["b"]}
VERSIONS = {"version": "000001", "base_version": "000000"}
KEY = fst.EncryptionKey.from_bytes(bytes(range(32)))


def held(values=OLD):
    target = {name: tensor.clone() for name, tensor in values.items()}
    fst.set_version(target, "000000")
    return target


def manifest_of(*folders):
    return {
        f"{folder.name}/{file.name}": f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
        for folder in folders
        for file in folder.iterdir()
    }


@pytest.fixture
def deltas(tmp_path):
    return [
        write_delta(tmp_path / "v1", OLD, NEW),
        write_delta(tmp_path / "v2", NEW, NEWEST, ("000001", "000002"), "overwrite"),
    ]


def forge(delta):
    """Encodes other new values of a tensor, with a checksum that fits."""
    other = {**NEW, "a": NEW["a"] * 2}
    forged = write_delta(delta.parent / "forged", OLD, other)
    for file in forged.iterdir():
        file.replace(delta / file.name)
    forged.rmdir()


PREPARE = {
    "function": lambda paths, **options: fst.prepare_update(held(), paths, **options),
    "not atomic": lambda paths, **options: fst.prepare_update(held(), paths, atomic=False, **options),
    "base": lambda paths, **options: fst.prepare_update(
        held({name: tensor.float() for name, tensor in OLD.items()}), paths, base=held(), **options
    ),
    "operator": lambda paths, verify: torch.ops.fst.prepare_update(
        list(map(str, paths)), list(OLD), list(held().values()), verify=fst._signatures.request.verify_of(verify)
    ),
}


def test_verify_holds_for_every_delta(deltas, tmp_path):
    """It is an error whenever it is one of `load_file`, for the first and for a later delta."""
    manifest = manifest_of(*deltas)
    requests = tmp_path / "missing.json", True, {"v1/other": manifest[f"v1/{INDEX}"]}
    for prepare in PREPARE.values():
        prepare(deltas, verify=manifest).commit()
        for verify in requests:
            for attempt in (fst.load_file, lambda delta, verify, prepare=prepare: prepare([delta], verify=verify)):
                # The operator raises PyTorch's exceptions.
                with pytest.raises((OSError, ValueError, RuntimeError), match=r"missing|digest"):
                    attempt(deltas[0], verify=verify)
    forge(deltas[0])
    with pytest.raises(fst.IntegrityError, match="sha256"):
        fst.load_file(deltas[0], verify=manifest)
    for prepare in PREPARE.values():
        for paths in (deltas[:1], deltas):
            with pytest.raises(ValueError, match="sha256"):
                prepare(paths, verify=manifest)
        prepare(deltas[:1], verify=False).commit()


def test_files_of_a_forged_delta_or_base_are_not_written(deltas, command, tmp_path):
    (tmp_path / "base").mkdir()
    fst.save_file(OLD, tmp_path / "base" / "m.safetensors")
    manifest = manifest_of(*deltas, tmp_path / "base")
    lines = "".join(f"{digest.removeprefix('sha256:')}  {name}\n" for name, digest in manifest.items())
    (tmp_path / "sums").write_text(lines)
    arguments = "delta", "apply", "base", "v1", "full"
    assert command(*arguments, "--manifest", "sums").returncode == 0
    assert_all_same(fst.load_file(tmp_path / "full"), NEW)
    forge(deltas[0])
    assert "sha256" in command(*arguments, "--force", "--manifest", "sums").stderr
    with pytest.raises(fst.IntegrityError, match="sha256"):
        apply_delta(tmp_path / "base", deltas[:1], tmp_path / "other", verify=manifest)
    fst.save_file(NEW, tmp_path / "base" / "m.safetensors")
    for old, new in ((tmp_path / "base", NEW), (OLD, tmp_path / "base")):
        with pytest.raises(fst.IntegrityError, match="sha256"):
            fst.save_delta(old, new, tmp_path / "other", **VERSIONS, verify=manifest)
    assert not (tmp_path / "other").exists()


def test_encrypted_inputs_stay_encrypted_unless_asked(command, tmp_path, monkeypatch):
    (tmp_path / "key").write_bytes(bytes(range(32)))
    base, new = tmp_path / "base.safetensors", tmp_path / "new.safetensors"
    fst.save_file(OLD, base, encryption_key=KEY)
    fst.save_file(NEW, new, encryption_key=KEY)
    monkeypatch.setenv("FST_ENCRYPTION_KEY_FILE", str(tmp_path / "key"))
    make = "delta", "make", base.name, new.name, "d", "--version", "000001", "--base-version", "000000"
    for arguments, output in (
        (make, "d"),
        (("delta", "apply", base.name, "d", "full"), "full"),
        (("convert", base.name, "c.safetensors"), "c.safetensors"),
    ):
        refused = command(*arguments)
        assert (refused.returncode, (tmp_path / output).exists()) == (1, False)
        assert "--encrypt KEY" in refused.stderr
        assert command(*arguments, "--encrypt", "key", "--decrypt").returncode == 1
        assert command(*arguments, "--decrypt").returncode == 0
        monkeypatch.delenv("FST_ENCRYPTION_KEY_FILE")
        fst.load_file(tmp_path / output)
        monkeypatch.setenv("FST_ENCRYPTION_KEY_FILE", str(tmp_path / "key"))
        assert command(*arguments, "--encrypt", "key", "--force").returncode == 0
        monkeypatch.delenv("FST_ENCRYPTION_KEY_FILE")
        with pytest.raises(ValueError, match="the file is encrypted"):
            fst.load_file(tmp_path / output)
        fst.load_file(tmp_path / output, encryption_key=KEY)
        monkeypatch.setenv("FST_ENCRYPTION_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.delenv("FST_ENCRYPTION_KEY_FILE")
    assert_all_same(fst.load_file(tmp_path / "full", encryption_key=KEY), NEW)
    # The functions take the key, which opens what is encrypted and leaves plain inputs as they are.
    fst.save_delta(OLD, new, tmp_path / "e", **VERSIONS, encryption_key=KEY, max_shard_bytes=1)
    fst.save_delta(OLD, NEW, tmp_path / "plain", **VERSIONS)
    apply_delta(base, tmp_path / "plain", tmp_path / "out", encryption_key=KEY)
    KEY.register()
    for old, delta in ((base, tmp_path / "plain"), (tmp_path / "c.safetensors", tmp_path / "e")):
        with pytest.raises(ValueError, match="decrypt=True"):
            apply_delta(old, delta, tmp_path / "f")
    KEY.unregister()
    target = held()
    fst.prepare_update(target, tmp_path / "e", encryption_key=KEY).commit()
    assert_all_same(target, NEW)
    assert_all_same(fst.load_file(tmp_path / "out", encryption_key=KEY), NEW)


def test_encryption_drops_copied_digests(command, tmp_path):
    (tmp_path / "key").write_bytes(bytes(range(32)))
    fst.save_file(OLD, tmp_path / "b.safetensors", digests="blake3")
    assert command("convert", "b.safetensors", "c.safetensors", "--encrypt", "key").returncode == 0
    casts = "--dtype", "float16", "--encrypt", "key"
    assert command("convert", "b.safetensors", "e.safetensors", *casts).returncode == 0
    metadata = fst.metadata(tmp_path / "b.safetensors")
    assert "fst.digests" in metadata
    copied = tmp_path / "d.safetensors"
    fst.save_file(OLD, copied, metadata=metadata, encryption_key=KEY, max_shard_bytes=300)
    for name in ("c.safetensors", "d.safetensors.index.json", "e.safetensors"):
        assert fst.load_file(tmp_path / name, encryption_key=KEY)["a"].shape == (64,)
    with pytest.raises(ValueError, match="digests would tell"):
        fst.save_file(OLD, copied, digests="blake3", encryption_key=KEY)
    assert command("convert", "b.safetensors", "n.safetensors", "--digests", "none").returncode == 0
    assert "fst.digests" not in fst.metadata(tmp_path / "n.safetensors")


def mutate(folder, random):
    """Changes a delta in one way."""
    file = random.choice(sorted(folder.iterdir()))
    data = bytearray(file.read_bytes())
    kind = random.choice(("bit", "cut", "extension", "exchange"))
    if kind == "bit":
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif kind == "cut":
        del data[random.randrange(len(data)) :]
    elif kind == "extension":
        data += random.randbytes(random.randint(1, 9))
    else:
        # Names, checksums or encodings of other tensors and deltas.
        text = random.choice(((b'"a"', b'"b"'), (b"xor", b"overwrite"), (b"overwrite", b"xor"), (b"00000", b"00001")))
        data = bytearray(data.replace(*text))
    file.write_bytes(data)


def test_mutated_deltas_commit_the_right_values_or_none(deltas, tmp_path):
    random = Random(7)
    manifest = manifest_of(*deltas)
    content = {delta: {file: file.read_bytes() for file in delta.iterdir()} for delta in deltas}
    for number in range(60):
        paths = deltas[: number % 2 + 1]
        mutate(random.choice(paths), random)
        is_changed = any(file.read_bytes() != data for delta in paths for file, data in content[delta].items())
        target, committed = held(), True
        try:
            if is_changed:
                with pytest.raises(ValueError, match=r".*"):
                    fst.prepare_update(target, paths, verify=manifest)
            fst.prepare_update(target, paths, atomic=number % 3 > 0).commit()
        except (ValueError, OSError, fst.ModuleMismatchError):
            committed = False
        assert_all_same(target, (NEW, NEWEST)[number % 2] if committed else OLD)
        for delta in deltas:
            for file, data in content[delta].items():
                file.write_bytes(data)


class Tied(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.one = nn.Linear(4, 4, bias=False, dtype=dtype)
        self.two = nn.Linear(4, 4, bias=False, dtype=dtype)
        self.two.weight = self.one.weight


def test_delta_does_not_untie_weights(tmp_path):
    names = ["one.weight", "two.weight"]
    old = {name: torch.ones(4, 4) for name in names}
    cases = {
        "one": {**old, "one.weight": torch.full((4, 4), 2.0)},
        "differing": {"one.weight": torch.full((4, 4), 2.0), "two.weight": torch.full((4, 4), 3.0)},
        "equal": dict.fromkeys(names, torch.full((4, 4), 2.0)),
    }
    for case, new in cases.items():
        fst.save_delta(old, new, tmp_path / case, **VERSIONS)
        for dtype, base in ((torch.float32, None), (torch.float64, dict(old))):
            model = Tied(dtype)
            nn.init.ones_(model.one.weight)
            for target in (model, [model.one.weight, model.two.weight]):
                fst.set_version(target, "000000")
                options = {"base": base} if base else {}
                options |= {"names": names} if isinstance(target, list) else {}
                if case == "equal":
                    fst.prepare_update(target, tmp_path / case, **options).rollback()
                    continue
                with pytest.raises(fst.ModuleMismatchError, match=r'"one.weight".*"two.weight"'):
                    fst.prepare_update(target, tmp_path / case, **options)
        weight = torch.ones(4, 4)
        fst.set_version([weight], "000000")
        attempt = [str(tmp_path / case)], names, [weight, weight]
        if case == "equal":
            torch.ops.fst.prepare_update(*attempt).commit()
            assert torch.equal(weight, new["one.weight"])
        else:
            with pytest.raises(ValueError, match=r"\[mismatch\]"):
                torch.ops.fst.prepare_update(*attempt)
    # The checkpoint may have the tensor under one name only, which the target cannot tell.
    fst.set_version(model := Tied(), "000000")
    nn.init.ones_(model.one.weight)
    fst.prepare_update(model, tmp_path / "one", strict=False).commit()
    assert torch.equal(model.two.weight, cases["one"]["one.weight"])
    nn.init.ones_(model.one.weight)
    fst.set_version(model, "000000")
    with pytest.raises(fst.ModuleMismatchError):
        fst.prepare_update(model, tmp_path / "differing", strict=False)


WRITES = {
    "load": lambda target, tmp_path: fst.load_into(tmp_path / "other.safetensors", ["a"], [target["a"]]),
    "update": lambda target, tmp_path: fst.prepare_update(target, tmp_path / "other.safetensors").commit(),
    "step": lambda target, tmp_path: target["a"].add_(3),
}


def test_write_while_a_delta_is_prepared(tmp_path):
    """The server writes to the tensors when it is asked for a frame that did not come with the header of its file."""
    old, new, delta = {"a": torch.zeros(400_000)}, {"a": torch.randn(400_000)}, tmp_path / "v1"
    fst.save_delta(old, new, delta, **VERSIONS)
    fst.save_file({"a": old["a"] + 5}, tmp_path / "other.safetensors")
    files = {f"v1/{file.name}": file.read_bytes() for file in delta.iterdir()}
    for way, write in (
        ("function", WRITES["step"]),
        ("function", WRITES["load"]),
        ("transform", WRITES["load"]),
        ("base", WRITES["update"]),
        ("operator", WRITES["step"]),
        ("operator", WRITES["update"]),
    ):
        target, wide = held(old), held({"a": old["a"].double()})

        class Writing(Server):
            written = ()
            # Several requests may be answered at once.
            lock = threading.Lock()

            def reply_to(self, request, write=write, target=target):
                with self.lock:
                    if "bytes=0-" not in request.headers.get("range", "bytes=0-") and not self.written:
                        self.written = [write(target, tmp_path)]
                return super().reply_to(request)

        with Writing(files) as server:
            path = server.url(f"v1/{INDEX}")
            options = {"base": target, "transform": None if way == "base" else lambda name, tensor: tensor.double()}
            prepare = {
                "operator": partial(torch.ops.fst.prepare_update, [path], list(target), list(target.values())),
                "function": partial(fst.prepare_update, target, path),
            }.get(way, partial(fst.prepare_update, wide, path, **options))
            # A checksum may find the write before the commit does.
            with pytest.raises(ValueError, match=r"written to|checksum|values of the base"):
                prepare().commit()
            assert server.written
        assert not torch.equal(target["a"], new["a"])
        assert torch.equal(wide["a"], old["a"].double())


REPLACEMENTS = {
    "dtype": lambda model: model.bfloat16(),
    "data": lambda model: setattr(model.weight, "data", torch.zeros(3, 4)),
    "parameter": lambda model: setattr(model, "weight", nn.Parameter(torch.zeros(3, 4))),
}


def test_commit_to_replaced_tensors_is_an_error(tmp_path):
    fst.save_file({"weight": torch.ones(3, 4), "bias": torch.ones(3)}, tmp_path / "m.safetensors")
    for replace, atomic in itertools.product(REPLACEMENTS, (True, False)):
        model = nn.Linear(4, 3)
        update = fst.prepare_update(model, tmp_path / "m.safetensors", atomic=atomic)
        REPLACEMENTS[replace](model)
        with pytest.raises(fst.VersionError, match=r'tensor "weight": .*[Pp]repare it again'):
            update.commit()
        assert not torch.equal(model.bias.float(), torch.ones(3))
    target = [torch.zeros(3)]
    update = torch.ops.fst.prepare_update([str(tmp_path / "m.safetensors")], ["bias"], target)
    target[0].data = torch.zeros(3)
    with pytest.raises(ValueError, match=r'\[version\] tensor "bias": its memory was replaced'):
        update.commit()


def test_transform_cannot_change_what_it_returned(tmp_path):
    fst.save_file({"a": torch.ones(4), "b": torch.full((4,), 2.0)}, tmp_path / "m.safetensors")
    seen = []

    def transform(name, tensor):
        for earlier in seen:
            earlier.fill_(-1)
        seen.append(tensor)
        return tensor if name == "a" else tensor.view(2, 2).view(4)

    target = {"a": torch.zeros(4), "b": torch.zeros(4)}
    update = fst.prepare_update(target, tmp_path / "m.safetensors", transform=transform)
    seen[-1].fill_(-1)
    update.commit()
    assert_all_same(target, fst.load_file(tmp_path / "m.safetensors"))


def test_errors_of_other_dtypes_name_the_base(deltas):
    for dtype, message in ((torch.float32, r"F32 of 128 bytes"), (torch.float16, r"F16 of 64 bytes")):
        target = held({**OLD, "b": OLD["b"].to(dtype)})
        with pytest.raises(ValueError, match=rf'tensor "b": .*{message}.*as base='):
            fst.prepare_update(target, deltas[0])


class Refusing:
    def __enter__(self):
        raise ZeroDivisionError

    def __exit__(self, *_):
        pass


def test_background_commit_may_be_repeated_and_rolled_back(deltas):
    target = held()
    update = fst.prepare_update(target, deltas[0])
    update.commit(Refusing(), background=True)
    with pytest.raises(ZeroDivisionError):
        update.wait()
    staged = update.staged_bytes
    update.commit(background=True)
    update.wait()
    assert_all_same(target, NEW)
    update = fst.prepare_update(target, deltas[1])
    update.commit(Refusing(), background=True)
    with pytest.raises(ZeroDivisionError):
        update.wait("a")
    assert update.staged_bytes > 0 < staged
    update.rollback()
    assert update.staged_bytes == 0
    with pytest.raises(ValueError, match="rolled back"):
        update.commit()


def test_holder_of_the_lock_rolls_back_while_a_commit_waits(deltas):
    target, lock, waiting = held(), threading.Lock(), threading.Event()

    class Waiting:
        def __enter__(self):
            waiting.set()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    update = fst.prepare_update(target, deltas[0])
    with lock:
        update.commit(Waiting(), background=True)
        waiting.wait()
        update.rollback()
    with pytest.raises(ValueError, match="rolled back"):
        update.wait()
    assert_all_same(target, OLD)


def test_failed_hook_leaves_the_new_version(tmp_path):
    model = nn.Linear(4, 3)
    fst.save_file({"weight": torch.ones(3, 4), "bias": torch.ones(3)}, tmp_path / "m.safetensors")
    model.register_load_state_dict_post_hook(lambda *_: 1 / 0)
    update = fst.prepare_update(model, tmp_path / "m.safetensors", version="1")
    with pytest.raises(ZeroDivisionError):
        update.commit()
    update.wait()
    assert fst.version_of(model) == "1"
    assert torch.equal(model.bias, torch.ones(3))


def test_decoders_of_a_chain_take_little_memory(tmp_path):
    """Frames that request large windows are errors, and frames of small tensors take no more than the tensors."""
    values = [{"w": torch.full((1250,), float(number))} for number in range(9)]
    for name, window in {"large": 0x90, "allowed": 0x68}.items():
        for number, (old, new) in enumerate(itertools.pairwise(values)):
            content = xor(bits_of(old["w"]), bits_of(new["w"]))
            # The header has a window, and not the size of a single segment.
            frame = frame_of(content)[:4] + bytes([0, window]) + frame_of(content)[9:]
            write_delta(tmp_path / f"{name}{number}", old, new, (str(number), str(number + 1)), frames={"w": frame})
    target = {"w": torch.zeros(1250)}
    fst.set_version(target, "0")
    with pytest.raises(ValueError, match=r"needs a window of .* bytes to decode, but at most 8388608"):
        fst.prepare_update(target, tmp_path / "large0")
    memory.reset_peak()
    before = memory.peak_bytes()
    fst.prepare_update(target, [tmp_path / f"allowed{number}" for number in range(8)]).commit()
    assert torch.equal(target["w"], values[8]["w"])
    assert memory.peak_bytes() - before < 24 << 20
