"""What can be compared between a job without hangwatch and the same job with it: functions that return
a JSON document, by name.
"""

import re
import threading

ASPECTS = {}


def register_aspect(function):
    ASPECTS[function.__name__] = function
    return function


def measure(value, tolerance):
    """A number that may be larger by `tolerance` in the watched job."""
    return {"measured": value, "tolerance": tolerance}


def describe_tensor(tensor):
    return {
        "type": type(tensor).__name__,
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "values": [round(float(x), 4) for x in tensor.detach().flatten().abs()[:8]],
        "version": None if tensor.is_inference() else tensor._version,
        "requires_grad": tensor.requires_grad,
        "grad_fn": type(tensor.grad_fn).__name__,
    }


def describe_exception(error):
    """The type, text and traceback of an exception: functions and files, from the outermost. It has
    functions of ours that call torch's, where they are Python.
    """
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_name not in ("recorded_function", "c10d_kernel"):
            frames.append(f"{code.co_filename.rpartition('/')[2]}:{code.co_name}")
        traceback = traceback.tb_next
    text = re.sub(r"0x[0-9a-f]+", "ADDRESS", str(error))
    # torch lists all kernels of an operator that has none for a backend.
    text = text.partition("is only available for these backends")[0]
    return {"type": type(error).__name__, "text": text, "frames": frames}


def run_in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
