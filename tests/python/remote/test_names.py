"""Names of files in indices, listings, manifests and answers of the Hub: each is a file below its prefix."""

import contextlib
import hashlib
import json

import pytest
import torch
from safetensors.torch import save

import fst
from fst._core import ops
from fst_bench.http_server import Fault
from objects import assert_equal, set_environ, write_all

ONE, TWO = {"a": torch.ones(3)}, {"a": torch.zeros(3)}
# Names that lead to other files if they are pasted into a URL or a path.
KEYS = ["%41.safetensors", "x.safetensors#y.safetensors", "x.safetensors?y.safetensors", "s p+ä.safetensors"]
ODD = [*KEYS, "a\\..\\b.safetensors"]
# Names that would be outside.
OUTSIDE = ["%2e%2e/%2e%2e/victim/m.safetensors", "..\\..\\victim\\m.safetensors", ".%2E/victim/m.safetensors"]
# Names that are refused without a request.
REFUSED = ["../victim/m.safetensors", "/victim/m.safetensors", ".\t./m.safetensors", "a//m.safetensors", ".", ""]


def index_of(*names):
    weight_map = {f"{number}": name for number, name in enumerate(names)}
    return json.dumps({"weight_map": weight_map}).encode()


def file_of(number):
    return save({str(number): torch.full((3,), float(number))})


def description(commit, names):
    return json.dumps({"sha": commit, "siblings": [{"rfilename": name} for name in names]}).encode()


@pytest.fixture
def hub(http_server, hub_environ, monkeypatch):
    """Returns a function that puts files into a repository, whose API is at `api`, and its files below `files`."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    def put(files, api="models/o/n", below="o/n", revision="main", described=None):
        commit = hashlib.sha1(api.encode()).hexdigest()
        http_server.put(
            f"api/{api}/revision/{revision}", description(commit, files if described is None else described)
        )
        for name, data in files.items():
            http_server.put(f"{below}/resolve/{commit}/{name}", data)
        return commit

    return put


def test_odd_files_of_the_hub(hub):
    others = ["A.safetensors", "x.safetensors", "b.safetensors"]
    hub(dict.fromkeys(others, save(TWO)) | dict.fromkeys(ODD, save(ONE)))
    for name in ODD:
        assert_equal(fst.load_file(f"hf://o/n/{name}"), ONE)
        assert_equal(dict(fst.stream(f"hf://o/n/{name}")), ONE)
        with fst.safe_open(f"hf://o/n/{name}") as file:
            assert file.get_tensor("a").equal(ONE["a"])


@pytest.mark.parametrize("scheme", ["hf", "http"])
def test_index_stays_in_its_directory(hub, http_server, configure, scheme):
    """Odd names of an index are files beside it. Requests with the token go to no other directory."""
    index = "model.safetensors.index.json"
    files = {name: file_of(number) for number, name in enumerate([*ODD, "plain.safetensors"])}
    directory = f"o/n/resolve/{hub({})}/" if scheme == "hf" else "private/"

    def load(*names):
        http_server.reset()
        content = index_of(*names)
        hub({index: content})
        http_server.put(f"private/{index}", content)
        return fst.load_file("hf://o/n" if scheme == "hf" else http_server.url("private/"))

    configure(http_server.url("private"), token="secret")
    http_server.put("victim/m.safetensors", save(ONE))
    for name, data in files.items():
        http_server.put(f"{directory}{name}", data)
    loaded = load(*ODD, "./plain.safetensors")
    assert [loaded[str(number)][0].item() for number in range(len(files))] == list(range(len(files)))
    for name in OUTSIDE:
        with pytest.raises(FileNotFoundError):
            load(name)
        assert all(request.path.startswith(("api/", directory)) for request in http_server.requests())
    for name in REFUSED:
        with pytest.raises(fst.SafetensorError, match="the name of a file beside the index"):
            load(name)


def test_descriptions_of_the_hub_name_files_below_it(hub, http_server, tmp_path):
    """Names of the description that are not below a repository lead neither to other addresses nor to local files."""
    names = ["../../../secret.safetensors", "/etc/x.safetensors", "a//x.safetensors", "..\\..\\v\\m.safetensors"]
    commit = hub({"m.safetensors": save(ONE)}, described=[*names, "m.safetensors"])
    (tmp_path / "hub-home/hub/models--o--n/snapshots" / commit).mkdir(parents=True)
    (tmp_path / "hub-home/hub/secret.safetensors").write_bytes(save(TWO))
    # A file whose name begins with a dot is hidden.
    assert_equal(fst.load_file("hf://o/n"), ONE)
    asked = {request.path for request in http_server.requests()}
    assert all(path.startswith((f"o/n/resolve/{commit}/", "api/")) for path in asked)


def test_token_goes_to_the_endpoint_only(hub, http_server, monkeypatch):
    """A repository that was renamed is at the endpoint. Everything else gets no token."""
    monkeypatch.setenv("HF_ENDPOINT", http_server.url("hub"))
    commit = hub({}, described=["m.safetensors"])
    file = f"hub/o/n/resolve/{commit}/m.safetensors"
    http_server.put("hub/api/models/o/n/revision/main", description(commit, ["m.safetensors"]))
    for target, token in {"hub/renamed": "Bearer hf_secret", "elsewhere": None, "hub/../other": None}.items():
        http_server.heal()
        headers = {"Location": f"{http_server.url('')}{target}"}
        http_server.fault(file, Fault("status", status=307, headers=headers, times=None))
        target = target.removeprefix("hub/../")
        http_server.put(target, save(ONE))
        fst.release_memory()
        assert_equal(fst.load_file("hf://o/n"), ONE)
        assert {request.headers.get("authorization") for request in http_server.requests(target)} == {token}


# tests/rust/names.rs has more forms.
TYPES = [
    ("gpt2", "models/gpt2", "gpt2", "main"),
    ("models/o/n", "models/o/n", "o/n", "main"),
    ("datasets/o/n@v1", "datasets/o/n", "datasets/o/n", "v1"),
    ("spaces/o/n", "spaces/o/n", "spaces/o/n", "main"),
    ("o/n@refs%2Fpr%2F1", "models/o/n", "o/n", "refs/pr/1"),
    (f"o/n@{'0123456789' * 4}", "models/o/n", "o/n", "0123456789" * 4),
]


def test_forms_of_urls_of_the_hub(hub, http_server):
    for url, api, below, revision in TYPES:
        hub({"model.safetensors": save(ONE), "sub/m.safetensors": save(TWO)}, api, below, revision)
        assert_equal(fst.load_file(f"hf://{url}"), ONE)
        assert_equal(fst.load_file(f"hf://{url}/model.safetensors"), ONE)
        assert_equal(fst.load_file(f"hf://{url}/sub"), TWO)
        assert_equal(dict(fst.stream(f"hf://{url}/sub/m.safetensors")), TWO)
    assert {request.headers["authorization"] for request in http_server.requests()} == {"Bearer hf_secret"}


def test_kernels_and_buckets_of_the_hub_are_listed(hub, http_server):
    commit = hub({"m.safetensors": save(ONE)}, "kernels/o/n", "kernels/o/n", described=[])
    entries = [
        {"type": "file", "path": "m.safetensors"},
        {"type": "directory", "path": "d"},
        {"type": "file", "path": "../x"},
    ]
    http_server.put(f"api/kernels/o/n/tree/{commit}", json.dumps(entries).encode())
    assert_equal(fst.load_file("hf://kernels/o/n"), ONE)
    tree = "api/buckets/o/n/tree/a/b"
    for name, tensors in [("a/b/1.safetensors", ONE), ("a/b/2.safetensors", {"b": torch.ones(2)})]:
        http_server.put(f"buckets/o/n/resolve/{name}", save(tensors))
    first = json.dumps([{"type": "file", "path": "a/b/1.safetensors"}]).encode()
    second = json.dumps([{"type": "file", "path": "a/b/2.safetensors"}]).encode()
    http_server.put(tree, first, headers={"Link": f'<{http_server.url("api/next")}>; rel="next"'})
    http_server.put("api/next", second)
    assert fst.load_file("hf://buckets/o/n/a/b").keys() == {"a", "b"}
    assert_equal(fst.load_file("hf://buckets/o/n/a/b/1.safetensors"), ONE)
    # Files of buckets change.
    with fst.safe_open("hf://buckets/o/n/a/b/1.safetensors") as file:
        file.get_tensor("a")
    http_server.put(tree, first, headers={"Link": f'<{http_server.url(tree)}>; rel="next"'})
    with pytest.raises(OSError, match="once more"):
        fst.load_file("hf://buckets/o/n/a/b")
    http_server.put(tree, first, headers={"Link": f'<{http_server.url("x", host="localhost")}>; rel="next"'})
    with pytest.raises(OSError, match="at another server"):
        fst.load_file("hf://buckets/o/n/a/b")


def test_file_of_a_repository_without_owner(hub, http_server, monkeypatch):
    """`hf://a/b` is a repository, or else a file."""
    hub({"model.safetensors": save(ONE)}, "models/gpt2", "gpt2")
    assert_equal(fst.load_file("hf://gpt2/model.safetensors"), ONE)
    hub({"model.safetensors": save(TWO)}, "models/gpt2/model.safetensors", "gpt2/model.safetensors")
    assert_equal(fst.load_file("hf://gpt2/model.safetensors"), TWO)
    assert_equal(fst.load_file("hf://gpt2@main/model.safetensors"), ONE)
    with pytest.raises(FileNotFoundError, match=r"hf://gpt2/none\.safetensors"):
        fst.load_file("hf://gpt2/none.safetensors")
    with pytest.raises(ValueError, match="write hf://datasets/o/n"):
        fst.load_file("hf://dataset/o/n")


def test_options_of_a_place(hub, http_server, configure, monkeypatch):
    """Options belong to the place as the server sees it."""
    monkeypatch.delenv("HF_TOKEN")
    hub({"model.safetensors": save(ONE)})
    configure("hf://models/o/n", token="hf_place")
    fst.load_file("hf://o/n@main")
    assert {request.headers.get("authorization") for request in http_server.requests()} == {"Bearer hf_place"}
    configure(http_server.url("private"), token="secret")
    for path in ("private/m.safetensors", "m.safetensors"):
        http_server.put(path, save(ONE))
    http_server.reset()
    for path, token in [
        ("private/../m.safetensors", None),
        ("private/%2e%2e/m.safetensors", None),
        ("x/../private/m.safetensors", "Bearer secret"),
    ]:
        fst.load_file(f"{http_server.url('')}{path}")
        assert http_server.requests()[-1].headers.get("authorization") == token


def test_manifest_names_files_below_a_url(http_server, tmp_path):
    data = {name: save(ONE) for name in ["a b%41#?.safetensors", "sub/m.safetensors"]}
    for name, content in data.items():
        http_server.put(f"p/{name}", content)
    http_server.put("victim/m.safetensors", save(ONE))
    digests = {name: f"sha256:{hashlib.sha256(content).hexdigest()}" for name, content in data.items()}
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(digests))
    assert ops.call("verify_files", [str(manifest), http_server.url("p/")]) == 2
    # A load finds the digest of the name in an index.
    http_server.put(
        "p/model.safetensors.index.json", json.dumps({"weight_map": {"a": "a b%41#?.safetensors"}}).encode()
    )
    index = http_server.url("p/model.safetensors.index.json")
    fst.load_file(index, verify={"a b%41#?.safetensors": digests["a b%41#?.safetensors"]})
    http_server.reset()
    for name in ["%2e%2e/victim/m.safetensors", "..\\victim\\m.safetensors"]:
        manifest.write_text(json.dumps({name: digests["sub/m.safetensors"]}))
        with pytest.raises(FileNotFoundError):
            ops.call("verify_files", [str(manifest), http_server.url("p")])
    assert all(request.path.startswith("p/") for request in http_server.requests())


@pytest.fixture(params=["s3", "gcs", "azure"])
def bucket(request, monkeypatch):
    server = request.getfixturevalue(request.param)
    set_environ(monkeypatch, server)
    return server


USES = [
    lambda url: fst.save_file(ONE, url),
    lambda url: fst.save_file({**ONE, "b": torch.ones(3)}, url, max_shard_bytes=12),
    lambda url: fst.save_file_async(ONE, url).result(),
    lambda url: write_all(ONE, url),
    fst.load_file,
    fst.safe_open,
    lambda url: list(fst.stream(url)),
    fst.verify,
]


def test_odd_keys(bucket, request):
    """Neither a load nor a save takes another object than the one that its URL names."""
    bucket.put("lead.safetensors", save(TWO))
    bucket.put("p/lead.safetensors", save(TWO))
    for key in ["/lead.safetensors", "p//lead.safetensors", "p/./lead.safetensors", "p/../lead.safetensors"]:
        for use in USES:
            with pytest.raises(ValueError, match="write the key that is meant"):
                use(bucket.url(key))
    for key in ["/", "p//", "./", "../", "//p/"]:
        with pytest.raises(ValueError, match="write the key that is meant"):
            fst.load_file(bucket.url(key))
    with pytest.raises(ValueError, match="names no object"):
        fst.save_file(ONE, bucket.url("p/lead.safetensors/"))
    assert_equal(fst.load_file(bucket.url("lead.safetensors")), TWO)
    assert_equal(fst.load_file(bucket.url("p/lead.safetensors")), TWO)
    # An object whose key no path can have does not make the others unusable.
    for number, name in enumerate(KEYS):
        bucket.put(f"odd{number}/{name}", file_of(number))
    odd = ["odd0//sub/x.safetensors", "odd0/sub//y.safetensors", "odd0/", "odd0/sub/z.safetensors"]
    stored = 0
    for key in odd:
        # Not every server has such keys.
        with contextlib.suppress(AssertionError):
            bucket.put(key, save({"x": torch.ones(1)}))
            stored += 1
    assert stored > 1
    for number in range(len(KEYS)):
        [(name, tensor)] = fst.load_file(bucket.url(f"odd{number}/")).items()
        assert (name, tensor[0].item()) == (str(number), number)
    if "gcs" in request.node.name:
        # The server takes no objects by Google's XML interface.
        return
    two = {"a": torch.ones(3), "b": torch.ones(3)}
    fst.save_file(two, bucket.url("odd/model.safetensors"), max_shard_bytes=12)
    assert_equal(fst.load_file(bucket.url("odd/model.safetensors.index.json")), two)


def test_answers_of_buckets_end(http_server, configure):
    """An endless answer, and one that is no listing, are errors without a repetition. tests/rust/names.rs has more."""
    for scheme, name, options in [
        ("s3", "endpoint", {"access_key_id": "k", "secret_access_key": "s", "region": "r"}),
        ("gs", "base_url", {"skip_signature": True}),
        ("az", "endpoint", {"account_name": "a", "access_key": "a2V5"}),
    ]:
        url = f"{scheme}://bucket/p/"
        configure(url, **options, **{name: http_server.url("").rstrip("/")})
        for answer, message in [(b" " * (33 << 20), "sent more than 33554432 bytes"), (b"no list", "cannot be parsed")]:
            http_server.reset()
            http_server.put("bucket", answer)
            with pytest.raises(OSError, match=message):
                fst.load_file(url)
            assert len(http_server.requests("bucket")) == 1
