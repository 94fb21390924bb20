"""What a profile has found, in numbers and as text."""

from dataclasses import dataclass

from fst._profile.bottleneck import bottleneck
from fst._profile.trace import WHOLE, Recording


@dataclass(frozen=True)
class StageTime:
    """What one stage of the loads took.

    Attributes:
        busy_seconds: How long any thread (or GPU, for `copy` and `kernel`) was at it.
        thread_seconds: The same, with two threads for a second each making two.
        bytes: What it moved or was for; 0 where that means nothing.
        spans: How often it happened.
    """

    busy_seconds: float
    thread_seconds: float
    bytes: int
    spans: int


@dataclass(frozen=True)
class ReaderUse:
    """What one reader brought from one sort of file system.

    Attributes:
        reader: Its name, as for `FST_READER`.
        why: Why it was chosen.
        file_system: The type of the mount, such as "ext4", or None where the kernel does not say.
        files: How many files it read or mapped.
        bytes: What it read, or what tensors view of its mappings.
    """

    reader: str
    why: str
    file_system: str | None
    files: int
    bytes: int


@dataclass(frozen=True)
class Summary:
    """What the loads of a profile did; `str()` of it is for people.

    Attributes:
        loads: How many loads ended.
        tensors: How many tensors they gave or filled.
        tensor_bytes: What these take in their files.
        seconds: How long any load was under way.
        read_bytes: What was read from files, gaps that were read through included, headers not.
        mapped_bytes: What tensors view of mapped files: it is read when it is first used.
        read_ahead_bytes: What of it was asked for in the background before the profile ended.
        storage_bytes: What the kernel fetched from storage for this process meanwhile: what it did not find in the page
            cache. None where it does not say.
        copied_bytes: What was copied to GPUs, tables for kernels included.
        written_bytes: What was written to files by saves and writers.
        rate_gb_per_second: `read_bytes` by `seconds`, in 10^9 bytes; None where nothing was read.
        stages: The time of each stage that happened, in the order of a byte's trip. Where a thread was in a finer
            stage inside another, the time is the finer one's.
        readers: What moved the bytes and why.
        reads: Ranges of files that were asked for.
        copies: Copies that a GPU's driver was asked for.
        launches: Kernels that it was asked for.
        waits: How often a thread waited for a GPU.
        allocations: How often staging got new memory.
        peak_staging_bytes: The most memory that the process held for staging, in use or not.
        peak_scratch_bytes: The most memory on a GPU that a load used besides its tensors.
        errors: What went wrong in fst, in the words of its exceptions.
        exception: The exception that ended the block, if one did.
        spans_dropped: How many pieces of work are missing in the trace, the plot and the busy times because there
            were too many. Bytes and counts include them.
        bottleneck: What set the pace, in a sentence.
    """

    loads: int
    tensors: int
    tensor_bytes: int
    seconds: float
    read_bytes: int
    written_bytes: int
    mapped_bytes: int
    read_ahead_bytes: int
    storage_bytes: int | None
    copied_bytes: int
    rate_gb_per_second: float | None
    stages: dict[str, StageTime]
    readers: list[ReaderUse]
    reads: int
    copies: int
    launches: int
    waits: int
    allocations: int
    peak_staging_bytes: int
    peak_scratch_bytes: int
    errors: list[str]
    exception: str | None
    spans_dropped: int
    bottleneck: str

    def __str__(self) -> str:
        if not self.stages:
            lines = [self.bottleneck]
        else:
            lines = [*self._load_lines(), *self._stage_lines(), *self._count_lines(), self.bottleneck]
        lines += [f"error: {text}" for text in self.errors]
        if self.exception:
            lines.append(f"the block ended with {self.exception}")
        if self.spans_dropped:
            lines.append(f"{self.spans_dropped} spans did not fit; busy times and the trace are incomplete")
        return "\n".join(lines)

    def _load_lines(self) -> list[str]:
        rate = "" if self.rate_gb_per_second is None else f": {self.rate_gb_per_second:.2f} GB/s read"
        lines = []
        if self.loads or not self.written_bytes:
            lines.append(
                f"{_count(self.loads, 'load')}, {_count(self.tensors, 'tensor')}, {_size(self.tensor_bytes)}"
                f" in {_time(self.seconds)}{rate}"
            )
        if self.written_bytes:
            written_rate = f": {self.written_bytes / self.seconds / 1e9:.2f} GB/s" if self.seconds else ""
            lines.append(f"{_size(self.written_bytes)} written in {_time(self.seconds)}{written_rate}")
        for use in self.readers:
            where = f" on {use.file_system}" if use.file_system else ""
            lines.append(f"{use.reader}: {_count(use.files, 'file')}{where}, {_size(use.bytes)}; {use.why}")
        if self.storage_bytes is not None and self.read_bytes:
            rest = ", the rest from the page cache" if self.storage_bytes < self.read_bytes else ""
            lines.append(f"{_size(self.storage_bytes)} from storage{rest}")
        if self.mapped_bytes:
            lines.append(
                f"mapped {_size(self.mapped_bytes)}, of which {_size(self.read_ahead_bytes)} were asked for so far"
            )
        return lines

    def _stage_lines(self) -> list[str]:
        lines = [f"{'stage':<12}{'busy':>10}{'of time':>9}{'threads':>9}{'bytes':>12}{'spans':>8}"]
        for name, stage in self.stages.items():
            share = stage.busy_seconds / self.seconds if self.seconds and name != "read ahead" else None
            threads = stage.thread_seconds / stage.busy_seconds if stage.busy_seconds else 0
            lines.append(
                f"{name:<12}{_time(stage.busy_seconds):>10}{'' if share is None else format(share, '.0%'):>9}"
                f"{threads:>9.1f}{_size(stage.bytes) if stage.bytes else '':>12}{stage.spans:>8}"
            )
        return lines

    def _count_lines(self) -> list[str]:
        counts = [_count(self.reads, "read")]
        if self.copies or self.launches or self.waits:
            counts += [_count(self.copies, "copy"), _count(self.launches, "launch"), _count(self.waits, "wait")]
        staging = f"staging at most {_size(self.peak_staging_bytes)}"
        scratch = f", scratch at most {_size(self.peak_scratch_bytes)}" if self.peak_scratch_bytes else ""
        return [f"{', '.join(counts)}; {staging} ({self.allocations} allocated){scratch}"]


def summarize(recording: Recording, exception: str | None) -> Summary:
    """The summary of a recording of a block that ended with an exception or none."""
    facts = recording.facts
    loads = recording.of("load")
    seconds = recording.seconds
    read_bytes = recording.total("read", "bytes")
    return Summary(
        loads=recording.total("load", "spans"),
        tensors=sum(load.arguments["tensors"] for load in loads),
        tensor_bytes=recording.total("load", "bytes"),
        seconds=seconds,
        read_bytes=read_bytes,
        written_bytes=recording.total("write", "bytes"),
        mapped_bytes=recording.total("map", "bytes"),
        read_ahead_bytes=recording.total("read ahead", "bytes"),
        storage_bytes=facts["storage_bytes"],
        copied_bytes=recording.total("copy", "bytes"),
        rate_gb_per_second=read_bytes / seconds / 1e9 if read_bytes and seconds else None,
        stages={stage: _stage_time(recording, stage) for stage in recording.stages if stage not in WHOLE},
        readers=_reader_uses(recording),
        reads=facts["reads"],
        copies=facts["copies"],
        launches=facts["launches"],
        waits=recording.total("wait", "spans"),
        allocations=recording.total("allocate", "spans"),
        peak_staging_bytes=facts["peak_staging_bytes"],
        peak_scratch_bytes=facts["peak_scratch_bytes"],
        errors=facts["errors"],
        exception=exception,
        spans_dropped=facts["spans_dropped"],
        bottleneck=bottleneck(recording),
    )


def _stage_time(recording: Recording, stage: str) -> StageTime:
    return StageTime(
        recording.busy_seconds(stage),
        recording.thread_seconds(stage),
        recording.total(stage, "bytes"),
        recording.total(stage, "spans"),
    )


def _reader_uses(recording: Recording) -> list[ReaderUse]:
    """The readers that moved anything: one is chosen for the views of a file and one for the rest, if there is any."""
    facts = {(fact["path"], fact["reader"]): fact for fact in recording.facts["readers"]}
    files: dict[tuple[str, str, str | None], set[str]] = {}
    moved: dict[tuple[str, str, str | None], int] = {}
    for span in (*recording.of("map"), *recording.of("read")):
        path, reader = span.arguments["path"], span.arguments["reader"]
        fact = facts.get((path, reader), {"why": "chosen before the profile began", "file_system": None})
        use = (reader, fact["why"], fact["file_system"])
        files.setdefault(use, set()).add(path)
        moved[use] = moved.get(use, 0) + span.bytes
    return [ReaderUse(*use, files=len(files[use]), bytes=moved[use]) for use in files]


def _count(number: int, what: str) -> str:
    plural = {"copy": "copies", "launch": "launches"}.get(what, what + "s")
    return f"{number} {what if number == 1 else plural}"


def _size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
