"""A training of SECONDS seconds that ends as ENDING says."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    end = time.monotonic() + float(os.environ.get("SECONDS_LONG", "1"))
    total, going, steps = torch.zeros(1), torch.ones(1), 0
    while going.item():
        total += 1
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        going = torch.tensor([float(time.monotonic() < end)])
        dist.all_reduce(going, op=dist.ReduceOp.MIN)
        time.sleep(0.02)
        steps += 1
    modules = sum(name.partition(".")[0] == "hangwatch" for name in sys.modules)
    sys.stdout.write(f"trained {total.item() == steps}\n")  # in one piece: two ranks share the pipe
    sys.stdout.flush()
    sys.stderr.write(f"hangwatch modules: {modules}\n")
    dist.destroy_process_group()
    ending = os.environ.get("ENDING", "well")
    if ending == "status":
        sys.exit(3)
    if ending == "exception":
        raise ValueError("as planned")
    if ending == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    if ending == "at once":
        os._exit(5)


if __name__ == "__main__":
    main()
