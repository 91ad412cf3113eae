"""Captures CUDA graphs on one device, with calls in between that a capture allows or does not: `breaks_captures.py`.

Prints {case: error} with the first line of the first error, "" if there is none.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import torch

ELEMENTS = 10
SOURCE, TARGET = (torch.zeros(ELEMENTS).to("cuda") for _ in range(2))
# Recorded outside of any capture.
BEFORE = torch.cuda.Event()  # type: ignore[no-untyped-call]


def copy() -> None:
    TARGET.copy_(SOURCE)


def copy_on_joined_stream() -> None:
    other = copy_on_other_stream()
    torch.cuda.current_stream().wait_stream(other)


def copy_on_other_stream() -> torch.cuda.Stream:
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        TARGET.copy_(SOURCE)
    return other


def synchronize_device() -> None:
    torch.cuda.synchronize()


def synchronize_stream() -> None:
    torch.cuda.current_stream().synchronize()


def wait_for_earlier_event() -> None:
    torch.cuda.current_stream().wait_event(BEFORE)


def synchronize_captured_event() -> None:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    event.synchronize()


def query_in_another_thread() -> None:
    def query() -> None:
        try:
            BEFORE.query()  # type: ignore[no-untyped-call]
        except RuntimeError:
            return  # the capture's thread learns of it in the end

    thread = threading.Thread(target=query)
    thread.start()
    thread.join()


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "copy": (copy, "global"),
    "joined stream": (copy_on_joined_stream, "global"),
    "unjoined stream": (copy_on_other_stream, "global"),
    "device": (synchronize_device, "global"),
    "stream": (synchronize_stream, "global"),
    "earlier event": (wait_for_earlier_event, "global"),
    "captured event": (synchronize_captured_event, "global"),
    "another thread": (query_in_another_thread, "global"),
    "another thread, thread_local": (query_in_another_thread, "thread_local"),
}


def first_error(error: BaseException) -> str:
    while error.__context__ is not None:
        error = error.__context__
    return str(error).splitlines()[0]


def try_capture(function: Callable[[], object], mode: str) -> str:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            TARGET.copy_(SOURCE)
            function()
    except RuntimeError as error:
        return first_error(error)
    value = float(SOURCE[0].cpu()) + 1
    SOURCE.copy_(torch.full((ELEMENTS,), value))
    graph.replay()
    assert float(TARGET[0].cpu()) == value
    return ""


def main() -> None:
    BEFORE.record()
    print(json.dumps({name: try_capture(*case) for name, case in CASES.items()}), flush=True)


if __name__ == "__main__":
    main()
