"""Pressure stall information: the share of time in which tasks waited for CPU, memory or storage. See
Documentation/accounting/psi.rst of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

from hangwatch.model.hardware import Observation

from .host import Host, SourceUnavailableError, read_text

SOURCE = "pressure"

# By resource: the line, and the lowest percentage of the last ten seconds that is abnormal.
_LIMITS = {"cpu": ("some", 80.0), "memory": ("full", 10.0), "io": ("full", 25.0)}


def probe(host: Host) -> tuple[Observation, ...]:
    """The resources under pressure. Raises SourceUnavailableError if the kernel does not count it."""
    folder = host.proc / "pressure"
    texts = {resource: read_text(folder / resource) for resource in _LIMITS}
    if not any(texts.values()):
        raise SourceUnavailableError(
            "the kernel does not count pressure", "start the kernel with psi=1"
        )
    return tuple(
        observation
        for resource, text in texts.items()
        for observation in _read_resource(resource, text or "")
    )


def _read_resource(resource: str, text: str) -> Iterator[Observation]:
    kind, limit = _LIMITS[resource]
    for line in text.splitlines():
        name, _, fields = line.partition(" ")
        values = dict(field.partition("=")[::2] for field in fields.split())
        if name == kind and "avg10" in values:
            share = float(values["avg10"])
            yield Observation(
                source=SOURCE,
                about=resource,
                what="waiting_share",
                now=share,
                is_abnormal=share >= limit,
            )
