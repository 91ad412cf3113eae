"""Threads in the background, as loggers have them: one writes now and then, one waits for its queue, one is stuck for good."""

import queue
import socket
import threading
import time

import earlier_calls
import torch
import torch.distributed as dist


def log_forever(queue):
    while True:
        queue.get()
        time.sleep(0.05)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    metrics, never = queue.Queue(), threading.Event()
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=log_forever, args=(metrics,), daemon=True).start()
    threading.Thread(target=never.wait, daemon=True).start()
    threading.Thread(target=server.accept, daemon=True).start()
    for _ in range(60):
        loss = torch.ones(1)
        dist.all_reduce(loss)
        metrics.put(loss.item())
        time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
