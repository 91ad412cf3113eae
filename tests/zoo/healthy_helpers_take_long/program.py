"""Rank 0 waits for those that work for it, each time for longer than a stall: a pool, programs that are no Python, threads."""

import hashlib
import multiprocessing
import queue
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import earlier_calls
import torch
import torch.distributed as dist

LASTS = 9.0


def tokenize(seed):
    end, words = time.monotonic() + LASTS / 6, 0
    while time.monotonic() < end:
        words += len(f"word {seed} ".split())
    return words


def pack(seed):
    end, data = time.monotonic() + LASTS, bytes(1 << 16)
    while time.monotonic() < end:
        data += hashlib.sha256(data).digest()
    return len(data) + seed


def helped(work):
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def pool():
    with multiprocessing.get_context("fork").Pool(1) as workers:
        workers.map(tokenize, range(6))


def program():
    subprocess.run(["timeout", f"{LASTS:g}", "dd", "if=/dev/zero", "of=/dev/null", "bs=64k"], check=False, stderr=subprocess.DEVNULL)


def many_programs():
    end = time.monotonic() + LASTS
    while time.monotonic() < end:
        subprocess.run(["sleep", "0.2"], check=True)


def producer():
    packed = queue.Queue()
    threading.Thread(target=lambda: packed.put(pack(2))).start()
    packed.get()


def thread():
    with ThreadPoolExecutor(1) as executor:
        executor.submit(pack, 1).result()


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    for work in (pool, program, many_programs, producer, thread):
        dist.all_reduce(torch.ones(64))
        helped(work)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
