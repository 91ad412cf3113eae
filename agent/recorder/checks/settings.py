"""The checks that the environment of the job enables. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CHECK_NAMES = ("replicas", "nonfinite", "values")
DEFAULT_SAMPLE_EVERY = 16  # one in so many calls is sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """The valid settings; ``problems`` are messages about the invalid ones, which are ignored."""

    replicas: bool = False
    nonfinite: bool = False
    values: bool = False
    sample_every: int = DEFAULT_SAMPLE_EVERY
    problems: tuple[str, ...] = ()

    @property
    def any_enabled(self) -> bool:
        return bool(self.enabled_names)

    @property
    def enabled_names(self) -> str:
        return ", ".join(name for name in CHECK_NAMES if getattr(self, name))


def load_check_settings(env: Mapping[str, str]) -> CheckSettings:
    """Reads HANGWATCH_CHECKS and HANGWATCH_CHECK_EVERY."""
    names = [name.strip().lower() for name in env.get("HANGWATCH_CHECKS", "").split(",")]
    problems = [
        f"HANGWATCH_CHECKS has no check {name!r}: the checks are {', '.join(CHECK_NAMES)}"
        for name in names
        if name and name not in CHECK_NAMES
    ]
    interval = env.get("HANGWATCH_CHECK_EVERY", "").strip()
    every = int(interval) if interval.isascii() and interval.isdigit() else 0
    if interval and not every:
        problems.append(
            f"HANGWATCH_CHECK_EVERY={interval} is not a number of calls: the default of"
            f" {DEFAULT_SAMPLE_EVERY} is used"
        )
    return CheckSettings(
        **{name: name in names for name in CHECK_NAMES},
        sample_every=every or DEFAULT_SAMPLE_EVERY,
        problems=tuple(problems),
    )
