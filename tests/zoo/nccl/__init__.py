"""The zoo's programs for NCCL, and what runs them: a CUDA build of torch on the stand-ins of tests/fakegpu, or a
machine's own GPUs.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.fakegpu.environment import environment_folder
from tests.fakegpu.launch import stand_in_variables
from tests.harness.environments import python_of
from tests.harness.job import TorchRuntime

# `import device_faults` in the programs.
SUPPORT_DIR = Path(__file__).with_name("support")
OWN_GPUS = "installed"


def nccl_runtime(torch_version: str) -> TorchRuntime:
    """Where the programs run: on the stand-ins with an installed CUDA build of torch, or for OWN_GPUS on this interpreter's
    torch and this machine's GPUs. If there is only one, all ranks have it.
    """
    if torch_version == OWN_GPUS:
        import torch  # the others are run by another interpreter, and this one may have none

        is_alone = torch.cuda.device_count() == 1
        return TorchRuntime(env={"PYTHONPATH": str(SUPPORT_DIR)}, shares_gpu=is_alone)
    env = stand_in_variables(torch_version)
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(SUPPORT_DIR)])
    return TorchRuntime(python=str(python_of(environment_folder(torch_version))), env=env)
