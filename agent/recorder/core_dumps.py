"""Core dumps of GPUs that the node agent may request when it ends a hung rank.

The driver reads its variables when a CUDA context is created. They also let it write a core dump, and
abort the process, where a kernel raises an error, which Python otherwise sees as an exception: so they
are only set in jobs that want it, and that hangwatch may end.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from ..environment import run_dir
from ..environment.identity import is_switched_on
from . import faults

_SWITCH = "HANGWATCH_GPU_CORE"
_FLAGS = (
    *("skip_nonrelocated_elf_images", "skip_global_memory", "skip_shared_memory"),
    *("skip_local_memory", "skip_constbank_memory"),
)


def enable_gpu_core_dumps(env: MutableMapping[str, str] = os.environ) -> None:
    """Sets the driver's variables in ``env`` if the job wants it. Where the user has set one of them, all
    stay as they are. Raises OSError without a run dir.
    """
    may_be_ended = env.get("HANGWATCH_ON_HANG", "").strip().lower() == "abort"
    if not is_switched_on(env, _SWITCH) or not may_be_ended:
        return
    # %p is the pid of the process that reads the variable, which may be a child.
    path = f"{run_dir.ensure_run_dir(env['HANGWATCH_URL'])}/%p"
    settings = {
        "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1",
        "CUDA_COREDUMP_PIPE": f"{path}{run_dir.GPU_PIPE_SUFFIX}",
        "CUDA_COREDUMP_FILE": f"{path}{run_dir.GPU_CORE_SUFFIX}",
        "CUDA_COREDUMP_GENERATION_FLAGS": ",".join(_FLAGS),
    }
    names = [*settings, "CUDA_ENABLE_COREDUMP_ON_EXCEPTION"]
    taken = [name for name in names if env.get(name, settings.get(name)) != settings.get(name)]
    if taken:
        faults.record_message(f"{_SWITCH} has no effect: {taken[0]} is set already")
        return
    env.update(settings)
