"""Rank 0 waits for the processes of an executor, of which one reads from an empty pipe and the other has nothing left to do."""

import concurrent.futures
import multiprocessing
import os
import tempfile

import earlier_calls
import torch.distributed as dist


def read_shard(path):
    if path.endswith("shard"):
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    with open(path, "rb") as shard:
        return len(shard.read())


def tokenize(executor, paths):
    return list(executor.map(read_shard, paths))  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    if dist.get_rank() == 0:
        pipe = os.path.join(tempfile.mkdtemp(dir="."), "shard")
        os.mkfifo(pipe)
        context = multiprocessing.get_context("spawn")
        both_started = context.Barrier(2)  # Each imports torch, which is work.
        with concurrent.futures.ProcessPoolExecutor(2, context, both_started.wait) as executor:
            tokenize(executor, [__file__, pipe, __file__])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
