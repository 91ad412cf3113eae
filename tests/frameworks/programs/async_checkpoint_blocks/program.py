"""An asynchronous distributed checkpoint, whose storage does not answer rank 1. At the end all wait for it."""

import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class Storage(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        if dist.get_rank() == 1:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            time.sleep(600)  # PLANTED
        return super().write_data(plan, planner)


def main():
    dist.init_process_group("cpu:gloo")
    model, group = torch.nn.Linear(8, 2), dist.new_group()
    future = None
    for step in range(20):
        if step == 5:
            future = dcp.async_save(
                model.state_dict(),
                checkpoint_id="checkpoint",
                process_group=group,
                storage_writer=Storage("checkpoint"),
            )
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
        time.sleep(0.1)
    future.result()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
