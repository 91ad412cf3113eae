"""What the environment of the job asks for. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CHECK_NAMES = ("replicas", "nonfinite", "values")
DEFAULT_SAMPLE_EVERY = 16  # calls, of which one is sampled
PYTHON_ONLY_REASON = "what HANGWATCH_CHECKS asks for is examined in Python"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """``problems`` are what is not understood, each with its remedy; the rest holds all the same."""

    replicas: bool = False
    nonfinite: bool = False
    values: bool = False
    sample_every: int = DEFAULT_SAMPLE_EVERY
    problems: tuple[str, ...] = ()

    @property
    def any_enabled(self) -> bool:
        return self.replicas or self.nonfinite or self.values

    @property
    def enabled_names(self) -> str:
        return ", ".join(name for name in CHECK_NAMES if getattr(self, name))


def load_check_settings(env: Mapping[str, str]) -> CheckSettings:
    """HANGWATCH_CHECKS and HANGWATCH_CHECK_EVERY."""
    names = [name.strip().lower() for name in env.get("HANGWATCH_CHECKS", "").split(",")]
    problems = [
        f"HANGWATCH_CHECKS knows no {name!r}: it takes {', '.join(CHECK_NAMES)}"
        for name in names
        if name and name not in CHECK_NAMES
    ]
    told = env.get("HANGWATCH_CHECK_EVERY", "").strip()
    every = int(told) if told.isascii() and told.isdigit() else 0
    if told and not every:
        problems.append(
            f"HANGWATCH_CHECK_EVERY={told} is no number of calls: {DEFAULT_SAMPLE_EVERY} is taken"
        )
    return CheckSettings(
        **{name: name in names for name in CHECK_NAMES},
        sample_every=every or DEFAULT_SAMPLE_EVERY,
        problems=tuple(problems),
    )
