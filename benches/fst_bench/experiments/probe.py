"""Properties of the machine that decide how staging memory is made."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ..machine import field
from .context import Context, Rows, row
from .driver import DriverError

FILES = {
    "order of free pages that go back to the host": "/sys/module/page_reporting/parameters/page_reporting_order",
    "huge pages set aside": "/proc/sys/vm/nr_hugepages",
    "NUMA nodes": "/sys/devices/system/node/online",
    "threads of the first core": "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list",
}
CHOICES = {
    "transparent huge pages": "/sys/kernel/mm/transparent_hugepage/enabled",
    "transparent huge pages of tmpfs": "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
}
# CUdevice_attribute.
ATTRIBUTES = {
    "integrated GPU": 18,
    "copy engines": 40,
    "reads pageable memory": 88,
    "reads it through the page tables of the host": 100,
    "registers memory that is only read": 113,
}


def probe(context: Context) -> Rows:
    """Reads the settings of the kernel, the versions of libraries and the attributes of the GPU."""
    for what, text in _texts(context):
        yield row(f"{what}: {text}", [])


def _texts(context: Context) -> Iterator[tuple[str, str]]:
    for what, path in FILES.items():
        yield what, _read(Path(path))
    for what, path in CHOICES.items():
        _, _, chosen = _read(Path(path)).partition("[")
        yield what, chosen.partition("]")[0] or "not known"
    yield "processor", field("/proc/cpuinfo", "model name")
    for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index[23]")):
        yield f"L{_read(cache / 'level')} cache", f"{_read(cache / 'size')} for CPUs {_read(cache / 'shared_cpu_list')}"
    yield from _libraries()
    try:
        driver = context.driver
    except DriverError as error:
        yield "without a driver", str(error)
        return
    address = driver.pci_address()
    yield "PCI address", address
    for what, name in {"link": "current_link_speed", "lanes": "current_link_width", "NUMA node": "numa_node"}.items():
        yield what, _read(Path("/sys/bus/pci/devices") / address / name)
    for what, attribute in ATTRIBUTES.items():
        try:
            yield what, str(driver.integer("cuDeviceGetAttribute", attribute, 0))
        except DriverError as error:
            yield what, str(error)


def _libraries() -> Iterator[tuple[str, str]]:
    """Imports what the next steps import, which takes long the first time on a new machine."""
    try:
        import torch

        yield "PyTorch", f"{torch.__version__}, CUDA {torch.cuda.is_available()}"

        import fst

        yield "fst", f"{fst.__version__} of {Path(fst.__file__).parent}"
    except (ImportError, OSError) as error:
        yield "cannot be imported", str(error)
    wanted = ("pytest", "xdist", "hypothesis", "numpy", "safetensors", "instanttensor")
    yield "missing libraries", ", ".join(name for name in wanted if find_spec(name) is None) or "none"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "not known"
