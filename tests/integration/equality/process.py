"""The process as a whole: threads, files, signals, modules, children."""

import atexit
import gc
import locale
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings

import torch
import torch.distributed as dist
from registry import register_aspect


def list_threads():
    """The names of the process's threads, as the kernel knows them."""
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except FileNotFoundError:  # it has ended
            pass
    return sorted(names)


@register_aspect
def threads():
    """hangwatch has one of its own."""
    return {
        "python": sorted(thread.name for thread in threading.enumerate()),
        "kernel": list_threads(),
        "main": threading.main_thread().name,
    }


@register_aspect
def threads_after_groups():
    for _ in range(3):
        group = dist.new_group([0, 1])
        dist.barrier(group)
        dist.destroy_process_group(group)
        del group
    gc.collect()
    time.sleep(0.2)
    return len(list_threads())


def list_files():
    """What the process has open: the kind of each file, or its name."""
    files = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the folder itself
            continue
        files.append(target.partition(":")[0] if ":" in target else os.path.basename(target))
    return sorted(files)


@register_aspect
def open_files():
    return list_files()


@register_aspect
def files_of_children():
    """What a program inherits that the job starts, with all descriptors that are inheritable."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import os; print(len(os.listdir('/proc/self/fd')))"],
        close_fds=False,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@register_aspect
def signal_handlers():
    handlers = {}
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        handlers[number] = str(getattr(handler, "__name__", handler))
    with open("/proc/self/status") as file:
        masks = dict(line.strip().split(":\t") for line in file if line.startswith("Sig"))
    return {
        "python": handlers,
        "caught": list_signals(masks["SigCgt"]),
        "ignored": list_signals(masks["SigIgn"]),
        "blocked": list_signals(masks["SigBlk"]),
        "wakeup": signal.set_wakeup_fd(-1),
    }


def list_signals(mask):
    return [number for number in range(1, 65) if int(mask, 16) >> (number - 1) & 1]


@register_aspect
def interpreter():
    """Settings that a library might change under its user."""
    return {
        "gc": [gc.isenabled(), gc.get_threshold(), len(gc.callbacks), gc.get_debug()],
        "recursion": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "trace": [sys.gettrace() is None, sys.getprofile() is None],
        "hooks": [sys.displayhook.__name__, sys.unraisablehook.__name__],
        "path": [entry for entry in sys.path if "hangwatch" in entry.partition("site-packages")[2]],
        "finders": [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path],
        "filters": [str(f) for f in warnings.filters],
        "environment": sorted(k for k in os.environ if not k.startswith("HANGWATCH_")),
        "umask": read_umask(),
        "nice": os.nice(0),
        "limits": [resource.getrlimit(k) for k in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "locale": locale.setlocale(locale.LC_ALL),
        "loggers": sorted(name for name in logging.root.manager.loggerDict if "hangwatch" in name),
        "handlers": [type(handler).__name__ for handler in logging.root.handlers],
        "log level": logging.root.level,
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch dtype": str(torch.get_default_dtype()),
        "torch flags": [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        "asyncio": "asyncio" in sys.modules,
        "affinity": len(os.sched_getaffinity(0)),
        "children": len(read_children()),
        "dumpable": os.access("/proc/self/mem", os.R_OK),
        "random": hash(random.Random(1).random()),
    }


def read_umask():
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def read_children():
    children = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            children += file.read().split()
    return children


@register_aspect
def modules():
    """hangwatch's own are expected; no others come with them."""
    names = {name.partition(".")[0] for name in sys.modules}
    return {name: "loaded" for name in names if not name.startswith("__editable__")}


@register_aspect
def forked_child():
    """What a child has that is forked without an exec: the descriptors and the caller's thread."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        names = sorted(thread.name for thread in threading.enumerate())
        os.write(writing, str([names, dist.is_initialized(), list_threads()]).encode())
        os._exit(7)
    os.close(writing)
    with open(reading) as file:
        report = file.read()
    return report, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@register_aspect
def exit_functions():
    """hangwatch has one."""
    return {"count": atexit._ncallbacks() - ("hangwatch" in sys.modules)}
