"""The recorder of rank 2 fails to record one call, which the others record: its numbers differ from then on. Later it
prepares data for longer than the others have to wait otherwise.
"""

import time
from unittest import mock

import earlier_calls
import torch
import torch.distributed as dist

from hangwatch.agent.recorder.calls import CallReader


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(40):
        if step == 10 and rank == 2:
            with mock.patch.object(CallReader, "_intern_signature", side_effect=OSError("injected")):
                dist.all_reduce(torch.ones(7, 77))
        elif step == 10:
            dist.all_reduce(torch.ones(7, 77))
        dist.all_reduce(torch.ones(64))
        dist.broadcast(torch.ones(3), src=step % 4)
        if step % 4 == 0:
            dist.barrier()
        time.sleep(0.2)
        if step == 30 and rank == 2:
            time.sleep(2.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
