"""Names the bottleneck of a recording, and advises how to remove it."""

from dataclasses import dataclass

from fst._profile.formatting import format_rate
from fst._profile.stages import Stage
from fst._profile.trace import Recording

# An activity that takes a smaller share of the time is not a bottleneck.
_BUSY_SHARE_MIN = 0.5
# The stages of a pipeline run at the pace of the slowest one, so their busy times are close. Activities whose share is
# within this distance of the largest are candidates.
_TIE_SHARE = 0.1
# The GPU is the bottleneck if workers wait for slots for at least this share of their time.
_WAIT_SHARE_MIN = 0.25
# Files were in the page cache if a smaller share of the bytes read came from storage.
_STORAGE_SHARE_MIN = 0.1

_WORKER_STAGES: tuple[Stage, ...] = ("slot", "read", "hash", "cipher", "cast", "place", "gather", "write", "queue")


@dataclass(frozen=True)
class _Activity:
    """Group of stages with one cause.

    Attributes:
        stages: The stages. The first one has the bytes of the activity.
        name: The activity as the subject of a sentence.
        advice: Measures that would and would not help if the activity is the bottleneck.
        has_rate: Whether bytes per second are meaningful.
    """

    stages: tuple[Stage, ...]
    name: str
    advice: str
    has_rate: bool = False


_THREADS = "more threads (FST_THREADS)"
_CORES = f"{_THREADS} on more cores"
_NOT_STORAGE = "would help, faster storage would not"
_READ = _Activity(
    ("read",), "Reading files", f"faster storage or {_THREADS} would help, faster copies would not", has_rate=True
)
_READ_REMOTE_ADVICE = "a faster network, or a service that answers faster, would help, more threads would not"
_READ_CACHED_ADVICE = f"the bytes were in the page cache, so {_CORES} {_NOT_STORAGE}"
_HOST = (
    _READ,
    _Activity(("hash",), "Computing digests", f"{_CORES}, or BLAKE3 instead of SHA-256, {_NOT_STORAGE}", has_rate=True),
    _Activity(("cipher",), "Decrypting or encrypting on the CPU", f"{_CORES} {_NOT_STORAGE}", has_rate=True),
    _Activity(("cast",), "Casting on the CPU", f"{_CORES}, or no dtype=, {_NOT_STORAGE}", has_rate=True),
    _Activity(("place",), "Copying from staging into the tensors", f"{_CORES} {_NOT_STORAGE}", has_rate=True),
    _Activity(
        ("write",), "Writing files", "faster storage would help, more threads or faster copies would not", has_rate=True
    ),
    _Activity(("gather",), "Copying from the tensors into staging", f"{_CORES} {_NOT_STORAGE}", has_rate=True),
    _Activity(("flush",), "Flushing files to the disk", "fewer and larger files would help, more threads would not"),
    _Activity(("queue",), "Passing copies to the GPU's driver", f"fewer and larger tensors {_NOT_STORAGE}"),
    _Activity(
        ("open", "header"),
        "Opening files and checking headers",
        "fewer files, or files of fewer tensors, would help, faster copies would not",
    ),
    _Activity(("plan", "map"), "Looking up names, planning and mapping", f"fewer tensors or slices {_NOT_STORAGE}"),
    _Activity(("allocate", "pin"), "Allocating staging memory", "the process keeps it, so the next load is faster"),
)
_GPU = _Activity(
    ("copy", "kernel"),
    "Copying to or from the GPU",
    "the link to the GPU is the limit, and faster storage or more threads would not help",
    has_rate=True,
)
# Replaces `_GPU` in recordings without times of the GPU.
_GPU_WAIT = _Activity(
    ("slot", "wait"),
    "Waiting for staging slots",
    "faster copies or more staging (FST_STAGING_BYTES) would help, more threads would not",
)
_OUTSIDE = _Activity(
    (),
    "Work outside of fst's stages, such as allocating tensors or using those of a stream,",
    "faster storage or more threads would not help",
)


def bottleneck(recording: Recording) -> str:
    """Describes the bottleneck in a sentence: its share of the time, and measures that would and would not help."""
    if not recording.seconds:
        return "Nothing was loaded or saved."
    sentence = _describe(recording, _find(recording))
    if recording.total("map", "bytes") and not recording.total("read", "bytes"):
        return (
            "No bytes were read: the tensors are views of mapped files, whose pages are read on first use. "
            f"Before the tensors were returned: {_uncapitalized(sentence)}"
        )
    return sentence


def _find(recording: Recording) -> _Activity:
    gpu = _GPU if recording.total("copy", "spans") else _GPU_WAIT
    busy = {activity: _busy_seconds(recording, activity) for activity in (*_HOST, gpu, _OUTSIDE)}
    longest = max(busy.values())
    candidates = [activity for activity in busy if busy[activity] >= longest - _TIE_SHARE * recording.seconds]
    if gpu in candidates:
        worker_seconds = recording.thread_seconds(*_WORKER_STAGES)
        wait_seconds = recording.thread_seconds("slot", "wait")
        if wait_seconds >= _WAIT_SHARE_MIN * worker_seconds or candidates == [gpu]:
            return gpu
        candidates.remove(gpu)
    # A worker alternates between activities, so the one that takes most of all workers' time is the bottleneck.
    return max(candidates, key=lambda activity: (recording.thread_seconds(*activity.stages), busy[activity]))


def _busy_seconds(recording: Recording, activity: _Activity) -> float:
    return recording.busy_seconds(*activity.stages) if activity.stages else recording.outside_seconds


def _describe(recording: Recording, activity: _Activity) -> str:
    busy = _busy_seconds(recording, activity)
    share = busy / recording.seconds
    if share < _BUSY_SHARE_MIN:
        name = _uncapitalized(activity.name)
        return f"No stage was busy for most of the time; {name} came first with {share:.0%}."
    verb = "took" if activity is _OUTSIDE else "was busy"
    nbytes = recording.total(activity.stages[0], "bytes") if activity.has_rate else 0
    rate = f" at {format_rate(nbytes, busy)}" if nbytes else ""
    advice = _read_advice(recording) if activity is _READ else activity.advice
    return f"{activity.name} {verb} {share:.0%} of the time{rate}; {advice}."


def _read_advice(recording: Recording) -> str:
    storage_bytes, read_bytes = recording.storage_bytes, recording.total("read", "bytes")
    if 2 * recording.remote_bytes > read_bytes:
        return _READ_REMOTE_ADVICE
    was_cached = storage_bytes is not None and storage_bytes < _STORAGE_SHARE_MIN * read_bytes
    return _READ_CACHED_ADVICE if was_cached else _READ.advice


def _uncapitalized(text: str) -> str:
    return text[0].lower() + text[1:]
