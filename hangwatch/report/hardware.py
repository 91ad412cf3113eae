"""What hosts report of their hardware, as text."""

from __future__ import annotations

from collections.abc import Iterator

from hangwatch.model.hardware import Observation

from .document_parsing import Document, parse_host_observation
from .text import clean_text, wrap_text

_MAX_HOSTS_NAMED = 3
# By what was observed; the fields are those of the observation.
_CLAUSES = {
    "link_downed": "the link of {about} went down ({before} to {now} times)",
    "carrier_down_count": "{about} lost its carrier ({before} to {now} times)",
    "state": "{about} went from {before} to {now}",
    "phys_state": "{about} went from {before} to {now}",
    "link_down": "the link of {about} went down",
    "xid": "{about} reported Xid {now}{meaning}",
    "lost": "{about} cannot be reached ({now})",
    "hung_task": "{about} ({now}) is blocked in the kernel",
    "nfs_not_responding": "the NFS server {about} does not respond",
    "io_error": "{about} has I/O errors",
    "throttled": "{about} is throttled ({now})",
    "spins": "{about} spins, as NCCL's kernels do while they wait ({now})",
    "idle": "{about} is idle ({now})",
    "does_not_answer": "{now} does not answer in NCCL's {about}",
    "considered_dead": "NCCL considers {now} dead ({about})",
    "async_error": "NCCL reports an error of {now} ({about})",
    "lags": "{now} ({about})",
    "waiting_share": "tasks waited for {about} in {now} % of the last ten seconds",
    "does_not_return": "{about} did not answer within {now}",
    "dead": "{now}",
    "incomplete": "{now} ({about})",
    "mismatch": "{now} ({about})",
    "timeout": "{now}",
    "nfs_requests_without_reply": "{now} requests to {about} have no reply",
}
_KILLED = {
    "kernel log": "the kernel killed {about} ({now}) for lack of memory",
    "cgroup": "processes in {about} were killed for lack of memory ({before} to {now})",
}
# NVIDIA's Xid catalogue, for the ones that stop a job.
_XID_MEANINGS = {
    "31": "memory page fault, often the program's",
    "48": "double-bit memory error",
    "63": "row remapping recorded",
    "64": "row remapping failed",
    "74": "NVLink error",
    "79": "the GPU has fallen off the bus",
    "94": "contained memory error",
    "95": "uncontained memory error",
    "119": "the GPU's system processor does not answer",
    "120": "error of the GPU's system processor",
}


def describe_observation(observation: Observation) -> str:
    """A clause such as "the link of mlx5_0/1 went down (2 to 3 times)"."""
    what, about = observation.what, observation.about
    template = _KILLED.get(observation.source) if what == "oom_kill" else _CLAUSES.get(what)
    if template is not None:
        meaning = _XID_MEANINGS.get(str(observation.now), "")
        return template.format(
            about=about,
            before=observation.before,
            now=observation.now,
            meaning=f" ({meaning})" if meaning else "",
        )
    name = what.replace("_", " ")
    if observation.before is None:
        return f"{about}: {name} ({observation.now})"
    return f"{name} of {about} went from {observation.before} to {observation.now}"


def format_hardware(document: Document) -> Iterator[str]:
    """What the hosts of an incident report: one line for each observation, and one for each source
    that could not be read.
    """
    for item in document.get("hardware") or []:
        entry = parse_host_observation(item)
        text = f"{entry.host}: {describe_observation(entry.observation)}"
        yield from wrap_text(clean_text(text))
    for gap in document.get("hardware_missing") or []:
        hosts = ", ".join(clean_text(host) for host in (gap.get("hosts") or [])[:_MAX_HOSTS_NAMED])
        more = len(gap.get("hosts") or []) - _MAX_HOSTS_NAMED
        others = f" and {more} more" if more > 0 else ""
        yield from wrap_text(
            clean_text(
                f"not read on {hosts}{others}: {gap.get('source')}, {gap.get('reason')};"
                f" {gap.get('remedy')}"
            )
        )
