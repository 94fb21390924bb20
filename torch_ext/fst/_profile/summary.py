"""Summaries of recordings, as numbers and as text."""

from dataclasses import dataclass

from fst._profile.bottleneck import bottleneck
from fst._profile.formatting import format_count, format_rate, format_seconds, format_size, visible
from fst._profile.stages import OUTER_STAGES, READ_AHEAD, Stage
from fst._profile.trace import Recording


@dataclass(frozen=True)
class StageTime:
    """Time and bytes of one stage.

    Attributes:
        busy_seconds: Duration in which at least one thread (for `copy` and `kernel`, one GPU) was in the stage.
        thread_seconds: Sum of the durations over all threads.
        bytes: Number of bytes that the stage processed, or 0 for stages without bytes.
        spans: Number of executions.
    """

    busy_seconds: float
    thread_seconds: float
    bytes: int
    spans: int


@dataclass(frozen=True)
class ReaderUse:
    """Files and bytes of one reader on one type of file system.

    Attributes:
        reader: Name of the reader, as in `FST_READER`, or `lease` for copies out of a mapping by ranks of one machine.
        why: Reason for the choice of the reader.
        file_system: Type of the mount, such as "ext4", or None if the kernel does not report it.
        files: Number of files that the reader read or mapped.
        bytes: Number of bytes that it read, or that tensors view in its mappings.
    """

    reader: str
    why: str
    file_system: str | None
    files: int
    bytes: int


@dataclass(frozen=True)
class Summary:
    """Totals of the loads and saves in a profile. Its `str()` is a short report.

    Attributes:
        loads: Number of loads that ended.
        tensors: Number of tensors that the loads returned or filled.
        tensor_bytes: Size of these tensors in their files.
        seconds: Duration in which at least one load or save ran.
        read_bytes: Number of bytes read from files, including gaps between tensors, excluding headers.
        written_bytes: Number of bytes that saves and writers wrote to files.
        mapped_bytes: Number of bytes of mapped files that tensors view. They are read on first use.
        read_ahead_bytes: Number of mapped bytes that were requested in the background before the profile ended.
        storage_bytes: Number of bytes that the kernel fetched from storage for this process during the profile, because
            they were not in the page cache, and of those from remote stores. None if the kernel does not report it.
        copied_bytes: Number of bytes copied to GPUs, including tables for kernels.
        rate_gb_per_second: `read_bytes` divided by `seconds`, in units of 10^9 bytes, or None if nothing was read.
        stages: Time of each recorded stage, in the order in which stages process a byte. The time of a nested stage
            counts for that stage only.
        readers: The readers that moved bytes, and the reasons for their choice.
        reads: Number of requested byte ranges of files.
        copies: Number of copies passed to a GPU's driver.
        launches: Number of kernels passed to a GPU's driver.
        retries: Number of requests to remote stores that were repeated.
        hedged_requests: Number of ranges of remote stores that were requested a second time, beside a slow request.
        repeated_bytes: Number of bytes that those and the retries requested again.
        requests: Number of requests to remote stores for bytes of objects.
        cache_hits: Number of objects that were opened from their copies in `FST_CACHE_DIR`.
        rate_limits: Number of answers of remote stores that asked for fewer requests.
        waits: Number of waits of a thread for a GPU.
        allocations: Number of allocations of staging memory.
        peak_staging_bytes: Peak size of the process's staging memory, in use or not.
        peak_scratch_bytes: Peak GPU memory that a load used besides its tensors.
        missing_kernels: GPUs that were used without the device kernels, such as "cuda:0", with the reasons.
        errors: Messages of the errors in fst.
        exception: The exception that ended the block, or None.
        spans_dropped: Number of spans that are missing in the trace, the plot and the busy times, because there were
            too many. Bytes and counts include them.
        bottleneck: The bottleneck, in a sentence.
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
    retries: int
    hedged_requests: int
    repeated_bytes: int
    requests: int
    cache_hits: int
    rate_limits: int
    waits: int
    allocations: int
    peak_staging_bytes: int
    peak_scratch_bytes: int
    missing_kernels: dict[str, str]
    errors: list[str]
    exception: str | None
    spans_dropped: int
    bottleneck: str

    def __str__(self) -> str:
        if not self.stages:
            lines = [self.bottleneck]
        else:
            lines = [*self._byte_lines(), *self._stage_lines(), self._count_line(), self.bottleneck]
        lines += [f"{gpu} has no device kernels: {visible(why)}" for gpu, why in self.missing_kernels.items()]
        lines += [f"error: {visible(message)}" for message in self.errors]
        if self.exception:
            lines.append(f"the block ended with {visible(self.exception)}")
        if self.spans_dropped:
            lines.append(f"{self.spans_dropped} spans did not fit; busy times and the trace are incomplete")
        return "\n".join(lines)

    def _byte_lines(self) -> list[str]:
        lines = []
        seconds = format_seconds(self.seconds)
        if self.loads or not self.written_bytes:
            loaded = f"{format_count(self.loads, 'load')}, {format_count(self.tensors, 'tensor')}"
            rate = f": {format_rate(self.read_bytes, self.seconds)} read" if self.read_bytes and self.seconds else ""
            lines.append(f"{loaded}, {format_size(self.tensor_bytes)} in {seconds}{rate}")
        if self.written_bytes:
            rate = f": {format_rate(self.written_bytes, self.seconds)}" if self.seconds else ""
            lines.append(f"{format_size(self.written_bytes)} written in {seconds}{rate}")
        for use in self.readers:
            files = format_count(use.files, "file") + (f" on {use.file_system}" if use.file_system else "")
            lines.append(f"{use.reader}: {files}, {format_size(use.bytes)}; {use.why}")
        if self.storage_bytes is not None and self.read_bytes:
            rest = ", the rest from the page cache" if self.storage_bytes < self.read_bytes else ""
            lines.append(f"{format_size(self.storage_bytes)} from storage{rest}")
        if self.mapped_bytes:
            ahead = format_size(self.read_ahead_bytes)
            lines.append(f"mapped {format_size(self.mapped_bytes)}, of which {ahead} were read ahead so far")
        return lines

    def _stage_lines(self) -> list[str]:
        lines = [f"{'stage':<12}{'busy':>10}{'of time':>9}{'threads':>9}{'bytes':>12}{'spans':>8}"]
        for name, stage in self.stages.items():
            # Read-ahead runs outside of the time of loads.
            share = f"{stage.busy_seconds / self.seconds:.0%}" if self.seconds and name != READ_AHEAD else ""
            threads = stage.thread_seconds / stage.busy_seconds if stage.busy_seconds else 0
            size = format_size(stage.bytes) if stage.bytes else ""
            busy = format_seconds(stage.busy_seconds)
            lines.append(f"{name:<12}{busy:>10}{share:>9}{threads:>9.1f}{size:>12}{stage.spans:>8}")
        return lines

    def _count_line(self) -> str:
        counts = [format_count(self.reads, "read")]
        if self.copies or self.launches or self.waits:
            counts.append(format_count(self.copies, "copy", "copies"))
            counts.append(format_count(self.launches, "launch", "launches"))
            counts.append(format_count(self.waits, "wait"))
        staging = f"staging at most {format_size(self.peak_staging_bytes)} ({self.allocations} allocated)"
        scratch = f", scratch at most {format_size(self.peak_scratch_bytes)}" if self.peak_scratch_bytes else ""
        return f"{', '.join(counts)}; {staging}{scratch}"


def summarize(recording: Recording, exception: str | None) -> Summary:
    """Summarizes a recording of a block that ended with this exception, if any."""
    metrics = recording.metrics
    seconds = recording.seconds
    read_bytes = recording.total("read", "bytes")
    return Summary(
        loads=recording.total("load", "spans"),
        tensors=sum(load.arguments["tensors"] for load in recording.spans_of("load")),
        tensor_bytes=recording.total("load", "bytes"),
        seconds=seconds,
        read_bytes=read_bytes,
        written_bytes=recording.total("write", "bytes"),
        mapped_bytes=recording.total("map", "bytes"),
        read_ahead_bytes=recording.total(READ_AHEAD, "bytes"),
        storage_bytes=recording.storage_bytes,
        copied_bytes=recording.total("copy", "bytes"),
        rate_gb_per_second=read_bytes / seconds / 1e9 if read_bytes and seconds else None,
        stages={stage: _stage_time(recording, stage) for stage in recording.stages if stage not in OUTER_STAGES},
        readers=_reader_uses(recording),
        reads=metrics["reads"],
        copies=metrics["copies"],
        launches=metrics["launches"],
        retries=metrics["retries"],
        hedged_requests=metrics["hedged_requests"],
        repeated_bytes=metrics["repeated_bytes"],
        requests=metrics["requests"],
        cache_hits=metrics["cache_hits"],
        rate_limits=metrics["rate_limits"],
        waits=recording.total("wait", "spans"),
        allocations=recording.total("allocate", "spans"),
        peak_staging_bytes=metrics["peak_staging_bytes"],
        peak_scratch_bytes=metrics["peak_scratch_bytes"],
        missing_kernels={f"cuda:{missing['gpu']}": missing["why"] for missing in metrics["missing_kernels"]},
        errors=metrics["errors"],
        exception=exception,
        spans_dropped=metrics["spans_dropped"],
        bottleneck=bottleneck(recording),
    )


def _stage_time(recording: Recording, stage: Stage) -> StageTime:
    return StageTime(
        recording.busy_seconds(stage),
        recording.thread_seconds(stage),
        recording.total(stage, "bytes"),
        recording.total(stage, "spans"),
    )


def _reader_uses(recording: Recording) -> list[ReaderUse]:
    """Returns the readers that moved bytes. A file may have two readers: one for views, and one for other loads."""
    choices = {(choice["path"], choice["reader"]): choice for choice in recording.metrics["readers"]}
    files: dict[tuple[str, str, str | None], set[str]] = {}
    moved: dict[tuple[str, str, str | None], int] = {}
    for span in (*recording.spans_of("map"), *recording.spans_of("read")):
        path, reader = span.arguments["path"], span.arguments["reader"]
        choice = choices.get((path, reader))
        use = (
            (reader, choice["why"], choice["file_system"])
            if choice is not None
            else (reader, "chosen before the profile began", None)
        )
        files.setdefault(use, set()).add(path)
        moved[use] = moved.get(use, 0) + span.bytes
    return [ReaderUse(*use, files=len(files[use]), bytes=moved[use]) for use in files]
