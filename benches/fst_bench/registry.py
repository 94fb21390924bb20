"""All suites, and all parts of reports in their order."""

from . import convert, dcp, files_page, ranks, remote, saves, simulation, small_calls, updates
from .convert import Convert
from .dcp import Dcp
from .files import Files
from .ranks import Ranks
from .remote import Remote
from .saves import Saves
from .simulation import Simulation
from .small_calls import SmallCalls
from .suite import Suite
from .updates import Updates

_SUITES = (Files, Ranks, Remote, SmallCalls, Updates, Saves, Dcp, Convert, Simulation)
SUITES: dict[str, type[Suite]] = {suite.name: suite for suite in _SUITES}
_MODULES = (files_page, small_calls, ranks, saves, dcp, remote, updates, convert, simulation)
_PARTS = {name: part for module in _MODULES for name, part in module.PARTS.items()}
_ORDER = (
    "cpu",
    "verified",
    "small_calls",
    "cuda",
    "ranks",
    "saves",
    "dcp",
    "remote",
    "updates",
    "convert",
    "simulation",
)
PARTS = {name: _PARTS[name] for name in _ORDER}
