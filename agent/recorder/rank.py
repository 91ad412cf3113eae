"""A training process as a rank: its identity, its lifecycle, and the parts that record it."""

from __future__ import annotations

import os
import platform
import sys
import threading
from typing import TYPE_CHECKING

from hangwatch.model.ranks import Lifecycle
from hangwatch.ring.layout import CHECK_SLOTS, CHECK_STRUCT, LiveWord

from ..environment import identity, run_dir
from . import faults
from .checks.settings import CheckSettings, load_check_settings
from .fault_dumps import StackDumper
from .group_setup import SetupRecorder
from .native.library import choose_recorder
from .poller import Poller
from .recorder import Recorder
from .ring_file import create_ring
from .supervisor import AgentSupervisor
from .worlds import get_master_address
from .writer import RingWriter

if TYPE_CHECKING:
    from .checks.inspection import CallChecker

_MAX_PROGRAM_CHARS = 300

_current_rank: RankProcess | None = None


class RankProcess:
    """This process's ring and everything that writes to it."""

    def __init__(self, launch: identity.LaunchInfo, rank: int, world_size: int) -> None:
        """Raises OSError if the ring cannot be created."""
        self.launch = launch
        self.rank, self.world_size = rank, world_size
        self.master_address = get_master_address()
        pid = os.getpid()
        start_ticks = run_dir.read_start_ticks(pid)
        self.key = run_dir.format_process_key(pid, start_ticks)
        check_settings = load_check_settings(os.environ)
        check_table_bytes = CHECK_STRUCT.size * CHECK_SLOTS if check_settings.any_enabled else 0
        self.folder, self.ring = create_ring(self.key, pid, start_ticks, check_table_bytes)
        self._stack_dumper = StackDumper(self.ring.path, self.ring)
        native, self._python_reason = choose_recorder(os.environ)
        self.recorder = Recorder(self.ring, native, _make_checker(self.ring, check_settings))
        self.write_identity()
        self.set_lifecycle(Lifecycle.STARTING)
        self.setup_recorder = SetupRecorder(self.recorder)
        self.poller = Poller(
            self.ring, self.recorder, AgentSupervisor(self.folder), self._stack_dumper
        )
        faults.add_listener(self._write_faults)
        self._write_faults()

    def write_identity(self) -> None:
        """Writes who this process is. Called again whenever any of it has changed."""
        torch = sys.modules.get("torch")
        self.ring.write_identity(
            {
                "job": self.launch.job,
                "restart": self.launch.restart,
                "rank": self.rank,
                "world_size": self.world_size,
                "local_rank": self.launch.local_rank,
                "python": platform.python_version(),
                "torch": str(getattr(torch, "__version__", "")),
                "program": _get_program(),
                "main_thread": threading.main_thread().ident,
                "recorder": "python" if self.recorder.native is None else "native",
                "without": self._python_reason,
                "master": self.master_address,
                "on_hang": self.launch.on_hang,
                **self._stack_dumper.registration,
            }
        )

    def set_lifecycle(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.ring.set_word(LiveWord.LIFECYCLE, lifecycle)

    def _write_faults(self) -> None:
        self.ring.set_word(LiveWord.ERRORS, faults.count_faults())
        self.ring.write_faults(faults.format_lines())


def get_current_rank() -> RankProcess | None:
    """The rank that this process is; None if it is not recorded."""
    return _current_rank


def set_current_rank(rank: RankProcess | None) -> None:
    global _current_rank
    _current_rank = rank


def _make_checker(ring: RingWriter, settings: CheckSettings) -> CallChecker | None:
    """Makes the checker of calls if the environment enables checks."""
    for problem in settings.problems:
        faults.record_message(problem)
    if not settings.any_enabled:
        return None
    # Imported only here: most jobs enable no checks.
    from .checks.inspection import CallChecker

    return CallChecker(ring, settings)


def _get_program() -> str:
    command_line: list[str] = getattr(sys, "argv", None) or []
    return " ".join(command_line)[:_MAX_PROGRAM_CHARS]
