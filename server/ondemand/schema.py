"""What the API answers about recordings: where ranks spent their time."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime, ConfigDict, Field, model_validator

from hangwatch.protocol.live import MAX_RECORDING_HZ, MAX_RECORDING_S, MAX_RECORDING_SAMPLES

from ..core.schema import ApiModel, Frame

MAX_RECORDED_RANKS = 64  # of one recording


class RecordingRequest(ApiModel):
    """``job`` may be left out where only one is known."""

    model_config = ConfigDict(strict=True)

    job: str | None = None
    ranks: list[int] = Field(min_length=1, max_length=MAX_RECORDED_RANKS)
    seconds: int = Field(default=10, ge=1, le=MAX_RECORDING_S)
    rate: int = Field(default=100, ge=1, le=MAX_RECORDING_HZ, description="samples a second")
    native: bool = Field(
        default=False, description="C and C++ frames too; pauses the process for each sample"
    )
    gil: bool = Field(
        default=False,
        description="only what holds the GIL, instead of all that a thread does or waits for",
    )

    @model_validator(mode="after")
    def _check_sample_count(self) -> RecordingRequest:
        if self.seconds * self.rate > MAX_RECORDING_SAMPLES:
            raise ValueError(
                f"{self.seconds} s at {self.rate} Hz are more than {MAX_RECORDING_SAMPLES} samples:"
                " ask for less of either"
            )
        return self


class LineTime(ApiModel):
    line: int
    samples: int


class FunctionTime(ApiModel):
    """A function of the user's, or what the user's line above calls in a library, and what it calls
    in turn.
    """

    function: str
    file: str
    library: bool
    samples: int
    own: int  # of these, in its own lines
    lines: list[LineTime] = Field(default_factory=list)
    ends: Frame | None = None  # of a library: where its calls end most often
    children: list[FunctionTime] = Field(default_factory=list)


class HotFunction(ApiModel):
    function: str
    file: str
    line: int  # the most frequent one
    samples: int


class ThreadTime(ApiModel):
    """One thread: its samples as a tree with libraries' frames folded, and the user's functions in
    which it was most.
    """

    thread: str
    main: bool
    samples: int
    hottest: list[HotFunction] = Field(default_factory=list)
    tree: list[FunctionTime] = Field(default_factory=list)


class RecordedRank(ApiModel):
    rank: int
    status: Literal["waiting", "recording", "done", "failed"]
    error: str | None = None
    note: str = ""  # what is less than was asked for
    seconds: float = 0.0  # how long it was sampled
    threads: list[ThreadTime] = Field(default_factory=list)
    resting: int = 0  # other threads, that stood in one line of a library all the time


class Recording(ApiModel):
    id: str
    job: str
    attempt: int
    seconds: int
    rate: int
    native: bool
    gil: bool
    status: Literal["pending", "done"]
    created_at: AwareDatetime
    ranks: list[RecordedRank]
