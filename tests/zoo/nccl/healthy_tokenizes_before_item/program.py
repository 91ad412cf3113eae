"""Rank 1 computes on its CPU in one native call of some 10 seconds, and then reads a value, while the others wait for it."""

import hashlib
import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def tokenize(loss):
    began_at = time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"text", b"salt", 100_000)
    count = int(100_000 * 10 / (time.monotonic() - began_at))
    hashlib.pbkdf2_hmac("sha256", b"text", b"salt", count)
    return loss[0].item()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    earlier_calls.make()
    rank = dist.get_rank()
    loss = torch.ones(64).to("cuda")
    for step in range(20):
        if rank == 1 and step == 10:
            tokenize(loss)
        dist.all_reduce(loss)
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
