"""An asynchronous distributed checkpoint beside the training."""

import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def main():
    dist.init_process_group("cpu:gloo")
    model, group = torch.nn.Linear(8, 2), dist.new_group()
    future = None
    for step in range(20):
        if step == 5:
            future = dcp.async_save(
                model.state_dict(), checkpoint_id="checkpoint", process_group=group
            )
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
        time.sleep(0.1)
    future.result()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
