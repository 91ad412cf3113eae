"""The recorder of rank 2 fails to record one call, which the others record. Later rank 2 goes off into code of its own:
counts of calls cannot tell, but its stack can.
"""

import os
import time
from unittest import mock

import earlier_calls
import torch
import torch.distributed as dist

from hangwatch.agent.recorder.calls import CallReader


def upload_samples():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(20):
        if step == 10 and rank == 2:
            with mock.patch.object(CallReader, "_intern_signature", side_effect=OSError("injected")):
                dist.all_reduce(torch.ones(7, 77))
        elif step == 10:
            dist.all_reduce(torch.ones(7, 77))
        if step == 19 and rank == 2:
            upload_samples()
        dist.all_reduce(torch.ones(64))


if __name__ == "__main__":
    main()
