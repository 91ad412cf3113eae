"""A library with NVML's name, for machines without a GPU: two GPUs, or FAKE_NVML_GPUS, of which the
second one is throttled, spins, and has errors.

With FAKE_NVML_BLOCKS set, it blocks for that many seconds, as a driver does whose GPU is sick; with
FAKE_NVML_ERRORS, that is the number of uncorrected memory errors, read from the file of that name.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = r"""
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

extern "C" {
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned pid; unsigned long long memory; unsigned instance, compute; } Process;

static long number_of(const void *device) { return (long)device; }

int nvmlInitWithFlags(unsigned) { return 0; }
const char *nvmlErrorString(int) { return "an error of the shim"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "570.86.15");
    return 0;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
    if (const char *seconds = getenv("FAKE_NVML_BLOCKS")) sleep(atoi(seconds));
    const char *gpus = getenv("FAKE_NVML_GPUS");
    *count = gpus ? atoi(gpus) : 2;
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(long)(index + 1);
    return 0;
}
int nvmlDeviceGetTotalEccErrors(void *device, int, int, unsigned long long *count) {
    *count = 0;
    const char *path = getenv("FAKE_NVML_ERRORS");
    if (number_of(device) == 2 && path) {
        if (FILE *file = fopen(path, "r")) {
            if (fscanf(file, "%llu", count) != 1) *count = 0;
            fclose(file);
        }
    }
    return 0;
}
int nvmlDeviceGetRemappedRows(void *device, unsigned *correctable, unsigned *uncorrectable,
                              unsigned *pending, unsigned *failed) {
    *correctable = *uncorrectable = *failed = 0;
    *pending = number_of(device) == 2;
    return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    *reasons = number_of(device) == 2 ? 0x48 : 0x1;
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, Utilization *rates) {
    rates->gpu = number_of(device) == 2 ? 100 : 57;
    rates->memory = 0;
    return 0;
}
int nvmlDeviceGetPowerUsage(void *, unsigned *milliwatts) { *milliwatts = 110000; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *, unsigned *milliwatts) { *milliwatts = 700000; return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *width) {
    *width = number_of(device) == 2 ? 8 : 16;
    return 0;
}
int nvmlDeviceGetMaxPcieLinkWidth(void *, unsigned *width) { *width = 16; return 0; }
int nvmlDeviceGetNvLinkErrorCounter(void *, unsigned link, unsigned, unsigned long long *count) {
    *count = 0;
    return link < 18 ? 0 : 2; /* NVML_ERROR_INVALID_ARGUMENT: it has 18 links */
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *, unsigned *count, Process *processes) {
    unsigned room = *count;
    *count = 2;
    if (room < 2) return 7; /* NVML_ERROR_INSUFFICIENT_SIZE */
    memset(processes, 0, 2 * sizeof *processes);
    processes[0].pid = 4711;
    processes[1].pid = 99;
    return 0;
}
}
"""


def build_nvml_shim(folder: Path) -> Path:
    """Compiles it into the folder, which has to be in LD_LIBRARY_PATH, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        ["g++", "-x", "c++", "-shared", "-fPIC", "-o", library, "-"],
        input=_SOURCE,
        text=True,
        check=True,
    )
    return folder


def write_driver(root: Path) -> None:
    """What /sys has where NVIDIA's driver is loaded."""
    driver = root / "sys/module/nvidia"
    driver.mkdir(parents=True)
    (driver / "version").write_text("570.86.15\n")
