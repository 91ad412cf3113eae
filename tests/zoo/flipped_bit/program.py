"""The network gives rank 1 one bit of an all-reduce wrong: from then on its gradients, and its replica, are not the others'."""

import os
import time

os.environ["HANGWATCH_CHECKS"] = "replicas"
os.environ["HANGWATCH_CHECK_EVERY"] = "1"

import earlier_calls
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

AT = 25
calls = 0


def faulty(tensors, group, reduce_op, sparse_indices, async_op=True, timeout=-1):
    """Gloo's all-reduce, whose result is damaged once on its way into rank 1's memory."""
    global calls
    calls += 1
    work = dist.ProcessGroup.unbox(group)._get_backend(torch.device("cpu")).allreduce(tensors, dist.AllreduceOptions())
    if calls == AT:
        work.wait()
        if dist.get_rank() == 1:
            tensors[0].view(torch.int32)[7] ^= 1 << 3
            open(os.environ["PLANTED_AT"], "w").close()
    return tensors, work.boxed()


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    torch.manual_seed(dist.get_rank())
    library = torch.library.Library("c10d", "IMPL")
    library.impl("allreduce_", faulty, "CPU")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()  # PLANTED
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.03)


if __name__ == "__main__":
    main()
