"""Rank 2 waits for the end of a child before rpc.shutdown, in which its peers wait. No rank is in a recorded call."""

import os
import subprocess

import earlier_calls
import torch.distributed as dist
import torch.distributed.rpc as rpc


def upload_logs():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    subprocess.run(["sleep", "600"])  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, size = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(init_method="env://", _transports=["uv"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    if rank == 2:
        upload_logs()
    rpc.shutdown()


if __name__ == "__main__":
    main()
