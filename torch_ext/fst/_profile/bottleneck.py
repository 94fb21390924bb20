"""Which part of the work the rest waited for, in a sentence."""

from dataclasses import dataclass

from fst._profile.trace import Recording

# A stage that is busy for a smaller part of the time holds nobody up.
_MOST = 0.5
# The stages of a pipeline run at its pace, so that several are about as busy as the one that sets it.
_CLOSE = 0.1
# The part of their time that workers wait for slots where the GPU sets the pace.
_WAITING = 0.25


@dataclass(frozen=True)
class _Work:
    stages: tuple[str, ...]
    what: str
    advice: str


# Less than this part of what was read came from storage: it was in the page cache.
_STORED = 0.1

_CACHED = (
    "the bytes were in the page cache, so more threads (FST_THREADS) on more cores would help, faster storage would not"
)
_GPU = _Work(
    ("copy", "kernel"),
    "Copying to or from the GPU",
    "the way to the GPU is the limit, and faster storage or more threads would not help",
)
_WAIT = _Work(
    ("slot", "wait"),
    "Waiting for slots of staging",
    "faster copies or more staging (FST_STAGING_BYTES) would help, more threads would not",
)
_HOST = (
    _Work(
        ("read",),
        "Reading files",
        "faster storage or more threads (FST_THREADS) would help, faster copies would not",
    ),
    _Work(
        ("cast",),
        "Casting on the CPU",
        "more threads (FST_THREADS) on more cores, or no dtype=, would help, faster storage would not",
    ),
    _Work(
        ("place",),
        "Copying from staging into the tensors",
        "more threads (FST_THREADS) on more cores would help, faster storage would not",
    ),
    _Work(
        ("write",),
        "Writing files",
        "faster storage would help, more threads or faster copies would not",
    ),
    _Work(
        ("gather",),
        "Copying from the tensors into staging",
        "more threads (FST_THREADS) on more cores would help, faster storage would not",
    ),
    _Work(
        ("flush",),
        "Flushing files to the disk",
        "fewer and larger files would help, more threads would not",
    ),
    _Work(
        ("queue",),
        "Handing copies to the GPU's driver",
        "fewer and larger tensors would help, faster storage would not",
    ),
    _Work(
        ("open", "header"),
        "Opening files and checking headers",
        "fewer files, or files of fewer tensors, would help, faster copies would not",
    ),
    _Work(
        ("plan", "map"),
        "Looking up names, planning and mapping",
        "fewer tensors or slices would help, faster storage would not",
    ),
    _Work(
        ("allocate", "pin"),
        "Getting memory for staging",
        "the process keeps it, so the next load is faster",
    ),
)
_OUTSIDE = _Work(
    (),
    "Work outside of fst's stages, such as allocating tensors or using those of a stream,",
    "faster storage or more threads would not help",
)


def bottleneck(recording: Recording) -> str:
    """What sets the pace, and what would and would not help."""
    seconds = recording.seconds
    if not seconds:
        return "Nothing was loaded or saved."
    pace = _sentence(recording, _pace_setter(recording))
    if recording.total("map", "bytes") and not recording.total("read", "bytes"):
        return (
            "No bytes were read: the tensors are views of mapped files, whose pages come with their first use. "
            f"Until the tensors were there: {pace[0].lower()}{pace[1:]}"
        )
    return pace


def _pace_setter(recording: Recording) -> _Work:
    gpu = _GPU if recording.total("copy", "spans") else _WAIT
    busy = {work: _busy_seconds(recording, work) for work in (*_HOST, gpu, _OUTSIDE)}
    longest = max(busy.values())
    close = [work for work in busy if busy[work] >= longest - _CLOSE * recording.seconds]
    if gpu in close:
        worker_seconds = recording.thread_seconds("slot", "read", "cast", "place", "gather", "write", "queue")
        if recording.thread_seconds("slot", "wait") >= _WAITING * worker_seconds or close == [gpu]:
            return gpu
        close.remove(gpu)
    # Each worker does several things in turn, and then what takes most of the workers' time sets the pace.
    return max(close, key=lambda work: (recording.thread_seconds(*work.stages), busy[work]))


def _busy_seconds(recording: Recording, work: _Work) -> float:
    return recording.busy_seconds(*work.stages) if work.stages else recording.outside_seconds


def _sentence(recording: Recording, work: _Work) -> str:
    busy = _busy_seconds(recording, work)
    share = busy / recording.seconds
    if share < _MOST:
        what = work.what[0].lower() + work.what[1:]
        return f"No stage was busy for most of the time; {what} came first with {share:.0%}."
    verb = "took" if work is _OUTSIDE else "was busy"
    moved = recording.total(work.stages[0], "bytes") if work in (_GPU, *_HOST[:5]) else 0
    rate = f" at {moved / busy / 1e9:.1f} GB/s" if moved else ""
    advice = _CACHED if work is _HOST[0] and _was_cached(recording) else work.advice
    return f"{work.what} {verb} {share:.0%} of the time{rate}; {advice}."


def _was_cached(recording: Recording) -> bool:
    stored = recording.facts["storage_bytes"]
    return stored is not None and stored < _STORED * recording.total("read", "bytes")
