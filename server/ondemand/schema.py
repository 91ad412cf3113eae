"""The API's documents about recordings: where ranks spent their time."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AwareDatetime, ConfigDict, Field, model_validator

from hangwatch.protocol.live import MAX_RECORDING_HZ, MAX_RECORDING_S, MAX_RECORDING_SAMPLES

from ..core.api_model import ApiModel, Frame

MAX_RECORDED_RANKS = 64  # of one recording

RecordingStatus = Literal["waiting", "recording", "done", "failed"]  # of one rank


class RecordingRequest(ApiModel):
    """``job`` may be omitted if only one is known."""

    model_config = ConfigDict(strict=True)

    job: str | None = None
    ranks: list[int] = Field(min_length=1, max_length=MAX_RECORDED_RANKS)
    seconds: int = Field(default=10, ge=1, le=MAX_RECORDING_S)
    rate: int = Field(default=100, ge=1, le=MAX_RECORDING_HZ, description="samples a second")
    native: bool = Field(
        default=False, description="include C and C++ frames; pauses the process for each sample"
    )
    gil: bool = Field(
        default=False,
        description="sample only threads that hold the GIL, instead of all threads",
    )

    @property
    def options(self) -> dict[str, Any]:
        """How to record: seconds, rate, native, gil."""
        return self.model_dump(exclude={"job", "ranks"})

    @model_validator(mode="after")
    def _check_sample_count(self) -> RecordingRequest:
        if self.seconds * self.rate > MAX_RECORDING_SAMPLES:
            raise ValueError(
                f"{self.seconds} s at {self.rate} Hz are more than {MAX_RECORDING_SAMPLES} samples:"
                " reduce either of them"
            )
        return self


class LineTime(ApiModel):
    line: int
    samples: int


class FunctionTime(ApiModel):
    """A function of user code, or of a library that user code calls, with the functions that it
    calls.
    """

    function: str
    file: str
    library: bool
    samples: int
    own: int  # of these, in its own lines
    lines: list[LineTime] = Field(default_factory=list)
    ends: Frame | None = None  # of a library: the most frequent innermost frame
    children: list[FunctionTime] = Field(default_factory=list)


class HotFunction(ApiModel):
    function: str
    file: str
    line: int  # the most frequent one
    samples: int


class ThreadTime(ApiModel):
    """One thread: its samples as a tree in which library frames are folded, and the user functions
    with the most samples.
    """

    thread: str
    main: bool
    samples: int
    hottest: list[HotFunction] = Field(default_factory=list)
    tree: list[FunctionTime] = Field(default_factory=list)


class RecordedRank(ApiModel):
    rank: int
    status: RecordingStatus
    error: str | None = None
    note: str = ""  # in what way the recording falls short of the request
    seconds: float = 0.0  # how long it was sampled
    threads: list[ThreadTime] = Field(default_factory=list)
    resting: int = 0  # other threads, which stayed at one line of a library


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
