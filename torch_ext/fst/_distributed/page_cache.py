"""Which processes have a page cache in common."""

from pathlib import Path

from fst._checkpoint.checkpoint import OpenCheckpoint

# The kernel's own number of this start of the machine, which no container has for itself.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def page_cache(stored: OpenCheckpoint) -> str:
    """Names the files of a checkpoint in the page cache out of which a load to the CPU maps them.

    Processes get the same name where they map the same files on one machine, and not where each has a copy. It is empty
    where the files are read instead.
    """
    if stored.reader() != "mmap" or not _BOOT_ID.exists():
        return ""
    stats = [Path(path).stat() for path in stored.paths]
    return " ".join([_BOOT_ID.read_text().strip(), *(f"{stat.st_dev}:{stat.st_ino}" for stat in stats)])
