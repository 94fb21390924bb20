"""`fst.profile` of real loads, and summaries of prepared recordings."""

import json
import re
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

import fst
from fst._profile.bottleneck import bottleneck
from fst._profile.plot import COLORS
from fst._profile.stages import STAGES
from fst._profile.summary import summarize
from fst._profile.trace import Recording, covered_seconds
from suite import CHECKOUT

TENSORS = {"large": torch.arange(400_000).float(), "small": torch.ones(7), "matrix": torch.randn(300, 50)}
DATA_BYTES = sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    return path


def events_of(profile, tmp_path):
    profile.save_trace(tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_read_bytes_are_counted(path, monkeypatch, chunks):
    monkeypatch.setenv("FST_READER", "pread")
    with fst.profile() as profile:
        fst.load_file(path)
    summary = profile.summary()
    assert summary.read_bytes == summary.tensor_bytes == DATA_BYTES
    assert (summary.loads, summary.tensors, summary.mapped_bytes) == (1, 3, 0)
    assert list(summary.stages)[:3] == ["open", "header", "plan"]
    assert summary.stages["header"].bytes == path.stat().st_size - DATA_BYTES
    assert summary.stages["read"].bytes == DATA_BYTES
    assert summary.reads >= 1
    [use] = summary.readers
    assert (use.reader, use.why, use.files, use.bytes) == ("pread", "requested", 1, DATA_BYTES)
    assert use.file_system
    assert summary.rate_gb_per_second == pytest.approx(DATA_BYTES / summary.seconds / 1e9)
    assert 0 < summary.stages["read"].busy_seconds <= summary.seconds
    # The file has just been written, so it is in the page cache.
    assert summary.storage_bytes is None or summary.storage_bytes < DATA_BYTES
    assert str(path.parent) not in str(summary)


def test_mapped_bytes_do_not_count_as_read(path, monkeypatch):
    monkeypatch.setenv("FST_READER", "mmap")
    with fst.profile() as profile:
        weights = fst.load_file(path)
    summary = profile.summary()
    assert (summary.mapped_bytes, summary.read_bytes, summary.rate_gb_per_second) == (DATA_BYTES, 0, None)
    assert [(use.reader, use.bytes) for use in summary.readers] == [("mmap", DATA_BYTES)]
    assert "read" not in summary.stages
    assert summary.bottleneck.startswith("No bytes were read")
    assert "GB/s" not in str(summary)
    del weights


def test_load_slices_and_load_into_count_as_loads(path):
    out = [torch.empty(7), torch.empty(300, 50)]
    with fst.profile() as profile:
        fst.load_slices(path, ["matrix"], dims=[0], starts=[10], lengths=[20])
        fst.load_into(path, ["small", "matrix"], out)
        fst.tensor_names(path)
    summary = profile.summary()
    assert (summary.loads, summary.tensors) == (2, 3)
    assert summary.tensor_bytes == 20 * 50 * 4 + 7 * 4 + 300 * 50 * 4
    assert summary.stages["open"].spans == 3


def test_trace_format(path, monkeypatch, tmp_path):
    monkeypatch.setenv("FST_READER", "pread")
    with fst.profile() as profile:
        fst.load_file(path, dtype=torch.float16)
    summary = profile.summary()
    assert summary.stages["cast"].bytes == summary.read_bytes == DATA_BYTES
    assert 0 < summary.peak_staging_bytes <= 256 << 20
    events = events_of(profile, tmp_path)
    spans = [event for event in events if event["ph"] == "X"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(processes.values()) == ["host", "loads"]
    assert {event["ph"] for event in events} == {"M", "X"}
    [load] = [span for span in spans if span["name"] == "load"]
    assert load["args"] == {"bytes": DATA_BYTES, "device": "cpu", "paths": [str(path)], "tensors": 3}
    assert {span["args"]["path"] for span in spans if span["name"] in ("read", "header")} == {str(path)}
    assert {"read", "cast", "slot"} <= {span["name"] for span in spans}
    for span in spans:
        assert (span["pid"], span["tid"]) in named
        assert isinstance(span["args"]["bytes"], int)
        if span["name"] in ("read", "cast", "slot"):
            assert load["ts"] <= span["ts"]
            assert span["ts"] + span["dur"] <= load["ts"] + load["dur"] + 0.01


def test_staging_memory_of_an_earlier_load_counts(tmp_path):
    save_file({"weight": torch.ones(200_000)}, tmp_path / "model.safetensors")
    fst.release_memory()
    fst.load_file(tmp_path / "model.safetensors", dtype=torch.float16)
    with fst.profile() as profile:
        fst.load_file(tmp_path / "model.safetensors", dtype=torch.float16)
    assert profile.summary().peak_staging_bytes >= 800_000


def test_plot(path, tmp_path, monkeypatch):
    """Each stage has its own color, all texts are inside the picture, and no panel is empty."""
    figure = pytest.importorskip("matplotlib.figure")
    assert len(set(COLORS.values())) == len(COLORS)
    drawn = []

    class Figure(figure.Figure):
        def savefig(self, *args, **kwargs):
            super().savefig(*args, **kwargs)
            drawn.append(self)

    monkeypatch.setattr(figure, "Figure", Figure)
    loads = (
        partial(fst.load_file, path, dtype=torch.float16),
        partial(fst.load_file, path),
        partial(fst.save_file, {}, path),
        None,
    )
    for load, panels in zip(loads, (2, 1, 2, 1), strict=True):
        with fst.profile() as profile:
            assert "is recording" in repr(profile)
            if load:
                load()
        assert "has not" not in repr(profile)
        profile.plot(tmp_path / "load.png")
        assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
        assert len(drawn[-1].axes) == panels
        width = drawn[-1].bbox.width
        title = drawn[-1]._suptitle.get_window_extent()
        assert title.x0 >= 0
        assert title.x1 <= width
    saved = [label.get_text() for label in drawn[2].axes[0].get_yticklabels()]
    assert "saves: save 0" in saved
    assert not any(label.startswith("loads") for label in saved)


def test_plot_requires_matplotlib(monkeypatch, tmp_path):
    with fst.profile() as profile:
        pass
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        profile.plot(tmp_path / "load.png")


def test_nested_profiles(path):
    fst.load_file(path)
    with fst.profile() as outer:
        fst.load_file(path)
        with fst.profile() as inner:
            fst.load_tensors(path, ["small"])
        with fst.profile() as empty:
            pass
        fst.load_file(path)
    assert (inner.summary().loads, inner.summary().tensors) == (1, 1)
    assert (outer.summary().loads, outer.summary().tensors) == (3, 7)
    assert (empty.summary().loads, empty.summary().seconds, empty.summary().stages) == (0, 0, {})
    assert str(empty.summary()) == empty.summary().bottleneck == "Nothing was loaded or saved."


@pytest.mark.parametrize("is_left_early", [False, True])
def test_stream_counts_as_load(path, monkeypatch, is_left_early):
    monkeypatch.setenv("FST_READER", "pread")
    with fst.profile() as profile, fst.stream(path) as stream:
        for _ in stream:
            if is_left_early:
                break
    summary = profile.summary()
    assert (summary.loads, summary.tensors, summary.tensor_bytes) == (1, 3, DATA_BYTES)
    assert summary.read_bytes == DATA_BYTES or is_left_early


def test_errors_are_recorded(path, tmp_path):
    profile = fst.profile()
    with pytest.raises(KeyError, match="other"), profile:
        fst.load_tensors(path, ["other"])
    summary = profile.summary()
    assert summary.exception.startswith("TensorNotFoundError: ")
    [error] = summary.errors
    assert error.startswith("[tensor-not-found]")
    assert "other" in str(summary)
    [event] = [event for event in events_of(profile, tmp_path) if event["ph"] == "i"]
    assert event["args"]["message"] == error


def test_invalid_use(path, tmp_path):
    profile = fst.profile()
    for ask in (profile.summary, lambda: profile.save_trace(tmp_path / "x"), lambda: profile.plot(tmp_path / "x")):
        with pytest.raises(RuntimeError, match="has not ended"):
            ask()
    with profile, pytest.raises(RuntimeError, match="has not ended"):
        profile.summary()
    with pytest.raises(RuntimeError, match="used for one block"), profile:
        pass
    with pytest.raises(ValueError, match="no profile 123456 runs"):
        torch.ops.fst.profile_stop(123456)


def test_stages_are_those_of_rust():
    stages, _, _ = (CHECKOUT / "rust" / "profile.rs").read_text().partition("    Count,\n")
    names = re.findall(r'^    \w+ = "([a-z ]+)",$', stages, re.MULTILINE)
    assert names
    assert names == list(STAGES) == list(COLORS)


def recording(*spans, dropped=0, storage_bytes=None, reader="pread"):
    """Builds a recording from spans: stage, row, begin and end in seconds, and bytes."""
    events, totals = [], {}
    for stage, row, begin, end, size in spans:
        process = 1 if stage == "load" else 3 if stage in ("copy", "kernel") else 2
        arguments = {"bytes": size, "tensors": 1, "path": "a", "reader": reader}
        event = {"name": stage, "ph": "X", "pid": process, "tid": row, "args": arguments}
        events.append(event | {"ts": begin * 1e6, "dur": (end - begin) * 1e6})
        total = totals.setdefault(stage, {"stage": stage, "spans": 0, "bytes": 0, "seconds": 0.0})
        total["spans"] += 1
        total["bytes"] += size
        total["seconds"] += end - begin
    names = ("reads", "copies", "launches", "retries", "hedged_requests", "repeated_bytes", "rate_limits", "requests")
    counts = dict.fromkeys((*names, "cache_hits", "peak_staging_bytes", "peak_scratch_bytes"), 0)
    data = counts | {"stages": list(totals.values()), "spans_dropped": dropped, "storage_bytes": storage_bytes}
    data |= {"readers": [], "missing_kernels": [], "errors": []}
    is_remote = reader == "object"
    data |= {"remote_bytes": sum(size for stage, *_, size in spans if is_remote and stage == "read")}
    return Recording(json.dumps({"otherData": data, "traceEvents": events}))


def test_missing_kernels_are_shown():
    found = recording(LOAD)
    found.metrics["missing_kernels"].append({"gpu": 1, "why": "cuModuleLoadData failed"})
    summary = summarize(found, None)
    assert summary.missing_kernels == {"cuda:1": "cuModuleLoadData failed"}
    assert "cuda:1 has no device kernels: cuModuleLoadData failed" in str(summary).splitlines()


def test_nested_spans_are_not_counted_twice():
    assert covered_seconds([(3, 4), (0, 2), (1, 1.5), (1, 3)]) == 4
    found = recording(("slot", 0, 0, 10, 0), ("allocate", 0, 2, 5, 0), ("wait", 0, 6, 8, 0), ("slot", 1, 9, 12, 0))
    assert found.thread_seconds("slot") == pytest.approx(8)
    assert found.busy_seconds("slot") == pytest.approx(7)
    assert found.busy_seconds("allocate") == pytest.approx(3)
    assert found.busy_seconds("slot", "wait", "allocate") == pytest.approx(12)
    assert found.seconds == pytest.approx(12)
    assert covered_seconds([]) == 0


LOAD = ("load", 0, 0, 10, 1)
GB = 10**9


# Spans of a recording, and the sentence.
BOTTLENECKS = [
    ([], r"Nothing was loaded or saved\."),
    (
        [LOAD, ("read", 0, 0, 9.6, 12 * GB)],
        r"Reading files was busy 96% of the time at 1\.25 GB/s; .*\(FST_THREADS\) would help",
    ),
    # Two workers alternate between reading and casting, and casting takes most of the time.
    (
        [
            LOAD,
            *[("read", row, 2 * n + row, 2 * n + row + 0.3, GB) for n in range(5) for row in (0, 1)],
            *[("cast", row, 2 * n + row + 0.3, 2 * n + row + 1.9, GB) for n in range(4) for row in (0, 1)],
        ],
        r"Casting on the CPU was busy 86% of the time at 0\.93 GB/s; .*no dtype=",
    ),
    (
        [LOAD, ("place", 0, 0, 9, 9 * GB), ("read", 0, 9, 10, GB)],
        r"Copying from staging into the tensors was busy 90% of the time at 1\.00 GB/s",
    ),
    # The GPU is the bottleneck: workers wait for slots between reads.
    (
        [
            LOAD,
            *[("copy", 0, n, n + 1, GB) for n in range(10)],
            *[("read", row, n + row / 2, n + row / 2 + 0.5, GB) for n in range(10) for row in (0, 1)],
            *[("slot", row, n + 0.5 - row / 2, n + 1 - row / 2, 0) for n in range(10) for row in (0, 1)],
        ],
        r"Copying to or from the GPU was busy 100% of the time at 1\.00 GB/s; the link to the GPU is the limit",
    ),
    # The disk is the bottleneck: the GPU is nearly as busy, but no worker waits for a slot.
    (
        [
            LOAD,
            *[("read", 0, n, n + 1, GB) for n in range(10)],
            *[("copy", 0, n + 0.05, n + 1, GB) for n in range(10)],
        ],
        r"Reading files was busy 100% of the time at 1\.00 GB/s",
    ),
    (
        [("open", 0, 0, 8, 0), ("header", 1, 1, 7, 100), ("load", 0, 8, 9, 1), ("read", 0, 8, 9, 10)],
        r"Opening files and checking headers was busy 89% of the time; fewer files",
    ),
    ([LOAD, ("plan", 0, 0, 6, 0), ("read", 0, 6, 10, 1)], "Looking up names, planning and mapping was busy 60%"),
    (
        [LOAD, ("slot", 0, 0, 8, 0), ("allocate", 0, 0, 4, 9), ("pin", 0, 4, 8, 9), ("read", 0, 8, 10, 1)],
        "Allocating staging memory was busy 80% of the time; the process keeps it",
    ),
    ([LOAD, ("queue", 0, 0, 7, 0), ("copy", 0, 1, 2, 1)], "Passing copies to the GPU's driver was busy 70%"),
    # Without GPU timings, only the wait for slots is visible.
    ([LOAD, ("slot", 0, 0, 9, 0), ("wait", 0, 1, 9, 0), ("read", 0, 9, 10, 1)], "Waiting for staging slots"),
    ([LOAD, ("read", 0, 8, 10, 1)], "Work outside of fst's stages, such as allocating .* took 80%"),
    (
        [LOAD, ("open", 0, 0, 3, 1), ("plan", 0, 3, 6, 1), ("read", 0, 6, 10, 1)],
        r"No stage was busy for most of the time; reading files came first with 40%\.",
    ),
    (
        [LOAD, ("map", 0, 0, 1, 5), ("open", 0, 1, 10, 1)],
        "No bytes were read: .* Before the tensors were returned: opening files and checking headers was busy 90%",
    ),
    # Read-ahead in the background does not count as a bottleneck.
    ([LOAD, ("read", 0, 0, 10, 1), ("read ahead", 1, 0, 100, 1)], "Reading files was busy 100% of the time"),
]


def test_bottleneck():
    for spans, expected in BOTTLENECKS:
        sentence = bottleneck(recording(*spans))
        assert re.match(expected, sentence), sentence


@pytest.mark.parametrize(
    ("reader", "storage_bytes", "advice", "origin"),
    [
        ("pread", 12 * GB, "faster storage or more threads (FST_THREADS) would help", "from storage\n"),
        (
            "pread",
            0,
            "the bytes were in the page cache, so more threads (FST_THREADS)",
            ", the rest from the page cache",
        ),
        ("object", 0, "a faster network, or a service that answers faster, would help", "11.2 GiB from storage\n"),
    ],
)
def test_read_advice_depends_on_the_origin_of_the_bytes(reader, storage_bytes, advice, origin):
    summary = summarize(recording(LOAD, ("read", 0, 0, 10, 12 * GB), storage_bytes=storage_bytes, reader=reader), None)
    assert advice in summary.bottleneck
    assert origin in str(summary)


def test_dropped_spans_are_reported():
    assert "12 spans did not fit" in str(summarize(recording(LOAD, dropped=12), None))
