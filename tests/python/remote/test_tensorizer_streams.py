"""Remote files through the names of tensorizer."""

import io

import pytest
import torch
from safetensors.torch import save

import fst
from fst.compat.tensorizer import (
    TensorDeserializer,
    TensorSerializer,
    stream_io,
)
from rawfile import assert_same

TENSORS = {"large": torch.arange(1 << 20), "weight": torch.randn(4, 3)}
DATA = save(TENSORS)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home directory without a file of s3cmd, and an environment without keys."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ENDPOINT_URL", "ENDPOINT_URL_S3", "PROFILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


@pytest.fixture
def server(http_server):
    http_server.put("m", DATA)
    return http_server


@pytest.fixture
def bucket(s3):
    s3.put("dir/m", DATA)
    return s3


def keys_of(s3):
    return {
        "s3_access_key_id": s3.access_key_id,
        "s3_secret_access_key": s3.secret_access_key,
        "s3_endpoint": s3.endpoint.removeprefix("http://"),
        "s3_region_name": s3.region,
        "force_http": True,
    }


def check_same(loaded, expected=TENSORS):
    assert list(loaded) == list(expected)
    for name, tensor in expected.items():
        assert_same(loaded[name].detach(), tensor)


def test_stream_is_a_file(server):
    with stream_io.open_stream(server.url("m")) as file:
        assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
        assert file.read(10) == DATA[:10]
        assert file.tell() == 10
        assert file.seek(-5, io.SEEK_END) == len(DATA) - 5
        assert file.read() == DATA[-5:]
        assert file.read() == b""
        assert file.seek(len(DATA) + 1) == len(DATA) + 1
        assert file.read(1) == b""
        into = bytearray(3 << 20)
        file.seek(7)
        assert file.readinto(into) == len(into)
        assert into == DATA[7 : 7 + len(into)]
        file.seek(-1, io.SEEK_CUR)
        assert file.readinto(memoryview(into)[:1]) == 1
        with pytest.raises(ValueError, match="negative"):
            file.seek(-1)
    with pytest.raises(ValueError, match="closed"):
        file.read(1)
    with io.BufferedReader(stream_io.open_stream(server.url("m")), 100) as buffered:
        assert buffered.read(1000) == DATA[:1000]


def test_short_reads_share_requests(server):
    with stream_io.open_stream(server.url("m")) as file:
        file.seek(2 << 20)
        before = server.counts().requests
        assert b"".join(file.read(1000) for _ in range(1000)) == DATA[2 << 20 : (2 << 20) + 1_000_000]
        assert server.counts().requests - before == 1


def test_deserializer_loads_from_the_url_of_a_stream(server):
    stream = stream_io.open_stream(server.url("m"))
    with TensorDeserializer(stream, device="cpu", num_readers=8) as tensors:
        check_same(tensors)
    assert stream.closed
    with TensorDeserializer(server.url("m"), device="cpu", lazy_load=True) as tensors:
        assert [name for _, _, name, _ in tensors.read_tensors()] == list(TENSORS)
    server.put("shifted", b"begin" + DATA)
    with stream_io.open_stream(server.url("shifted")) as stream:
        stream.seek(5)
        with TensorDeserializer(stream, device="cpu") as tensors:
            check_same(tensors)


def test_invalid_arguments():
    """Before anything is requested."""
    modes = {"r": "text", "w+": "text"} | dict.fromkeys(("ab", "xb", "rb+", "b"), '"rb", "wb" or "wb\\+"')
    urls = dict.fromkeys(("http://host/m", "hf://org/name/m", "s3://bucket"), "URL names no object|cannot be saved")
    arguments = {("s3://b/m", mode): match for mode, match in modes.items()}
    for (url, mode), match in (arguments | {(url, "wb"): match for url, match in urls.items()}).items():
        with pytest.raises(ValueError, match=match):
            stream_io.open_stream(url, mode)


def test_s3_keys_are_for_one_load(bucket, configure):
    url = f"s3://{bucket.bucket}/dir/m"
    with stream_io.open_stream(url, **keys_of(bucket)) as file:
        assert file.read(10) == DATA[:10]
        with TensorDeserializer(stream_io.open_stream(url, **keys_of(bucket)), device="cpu", lazy_load=True) as tensors:
            check_same({name: tensor for _, _, name, tensor in tensors.read_tensors()})
    wrong = keys_of(bucket) | {"s3_secret_access_key": "wrong-secret"}
    with pytest.raises(PermissionError) as error:
        stream_io.open_stream(url, **wrong)
    assert "wrong-secret" not in str(error.value)
    configure(url, endpoint=bucket.endpoint, access_key_id="other", secret_access_key="other")
    # What the program has set for the URL stays.
    with stream_io.open_stream(url, **keys_of(bucket)), pytest.raises(PermissionError):
        fst.load_file(url)
    for wrong, match in (
        ({"s3_endpoint": bucket.endpoint, "force_http": None}, "force_http"),
        ({"s3_signature_version": "s3"}, "s3_signature_version"),
    ):
        with pytest.raises(ValueError, match=match):
            stream_io.open_stream(url, **keys_of(bucket) | wrong)
    bucket.put("m", DATA, bucket=bucket.public_bucket)
    public = keys_of(bucket) | {"s3_access_key_id": "", "s3_secret_access_key": "", "s3_region_name": None}
    with stream_io.open_stream(f"s3://{bucket.public_bucket}/m", **public) as file:
        assert file.read(10) == DATA[:10]


def test_file_of_s3cmd(bucket, home):
    url = f"s3://{bucket.bucket}/dir/m"
    host = bucket.endpoint.removeprefix("http://")
    text = (
        f"[default]\naccess_key = {bucket.access_key_id}\nsecret_key = {bucket.secret_access_key}\nhost_base = {host}\n"
        "use_https = False\ncheck_%s = %d\n"
    )
    (home / "other").write_text(text)
    with stream_io.open_stream(url, s3_config_path=home / "other", s3_region_name=bucket.region) as file:
        assert file.read(10) == DATA[:10]
    (home / ".s3cfg").write_text(text)
    with TensorDeserializer(url, device="cpu") as tensors:
        check_same(tensors)
    (home / ".s3cfg").write_text("[other]\n")
    with pytest.raises(ValueError, match=r"no section \[default\]"):
        stream_io.open_stream(url)
    (home / ".s3cfg").write_text("secret_key = secret\n")
    with pytest.raises(ValueError, match="not a file of s3cmd") as error:
        stream_io.open_stream(url)
    assert "secret_key" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="s3_config_path"):
        stream_io.open_stream(url, s3_config_path="missing")


@pytest.mark.parametrize("mode", ["wb", "wb+"])
def test_written_stream_is_stored_when_it_is_closed(bucket, monkeypatch, mode):
    url = bucket.url("dir/written")
    for close in (lambda stream: stream.close(), lambda stream: stream.__exit__(None, None, None)):
        bucket.put("dir/written", b"old")
        stream = stream_io.open_stream(url, mode, **keys_of(bucket))
        assert (stream.writable(), stream.seekable(), stream.write(DATA)) == (True, True, len(DATA))
        stream.seek(2)
        stream.write(b"!")
        assert bucket.get("dir/written").body == b"old"
        close(stream)
        assert bucket.get("dir/written").body == DATA[:2] + b"!" + DATA[3:]
        stream.close()
    with pytest.raises(PermissionError):
        stream_io.open_stream(url, mode, **keys_of(bucket) | {"s3_secret_access_key": "wrong"}).close()
    with stream_io.open_stream(url, mode, **keys_of(bucket)):
        pass
    assert bucket.get("dir/written").body == b""
    monkeypatch.setattr("fst.compat.tensorizer._upload._OBJECT_BYTES_MAX", 10)
    stream = stream_io.open_stream(url, mode, **keys_of(bucket))
    stream.write(bytes(11))
    with pytest.raises(ValueError, match="dir/written: the file has 11 bytes, but one request takes 10"):
        stream.close()


def test_incomplete_stream_is_not_stored(bucket):
    bucket.put("dir/kept", b"old")

    def fail():
        with stream_io.open_stream(bucket.url("dir/kept"), "wb", **keys_of(bucket)) as stream:
            stream.write(DATA)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    stream = stream_io.open_stream(bucket.url("dir/kept"), "wb", **keys_of(bucket))
    stream.write(DATA)
    with pytest.warns(ResourceWarning, match=r"dir/kept: close\(\) was not called"):
        del stream
    with stream_io.open_stream(bucket.url("dir/kept"), "wb", **keys_of(bucket)) as stream:
        stream.write(b"begin")
        serializer = TensorSerializer(stream)
        serializer.write_state_dict(TENSORS)
        with pytest.warns(ResourceWarning, match=r"close\(\) was not called"):
            del serializer
    assert bucket.get("dir/kept").body == b"old"


def test_serializer_writes_to_the_url_of_a_stream(bucket, monkeypatch):
    url = bucket.url("dir/m.tensors")
    with monkeypatch.context() as patch:
        patch.setattr(
            "fst.compat.tensorizer._upload.UploadFile._store", lambda _: pytest.fail("the stream was stored, too")
        )
        with stream_io.open_stream(url, "wb+", **keys_of(bucket)) as stream:
            serializer = TensorSerializer(stream)
            serializer.write_state_dict(TENSORS)
            serializer.close()
    with TensorDeserializer(stream_io.open_stream(url, **keys_of(bucket)), "cpu", verify_hash=True) as tensors:
        check_same(tensors)
    # Bytes before the tensors stay.
    with stream_io.open_stream(url, "wb", **keys_of(bucket)) as stream:
        stream.write(b"begin")
        with TensorSerializer(stream) as serializer:
            serializer.write_state_dict(TENSORS)
    with stream_io.open_stream(url, **keys_of(bucket)) as stream:
        stream.seek(5)
        with TensorDeserializer(stream, "cpu") as tensors:
            check_same(tensors)
