"""Callbacks for frameworks, with light stand-ins where the framework is not installed."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

import hangwatch
from hangwatch.integrations.accelerate import declare_phases
from hangwatch.integrations.ray import make_runtime_env


class _Watcher:
    """A stand-in for the recorder."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self._open_phases: list[str] = []

    def enter_phase(self, name: str, limit: float | None) -> None:
        self.events.append((name, limit))
        self._open_phases.append(name)

    def leave_phase(self) -> None:
        self.events.append(f"end of {self._open_phases.pop()}")

    def step(self, number: int) -> None:
        self.events.append(number)

    def enter_collective(self, *arguments: Any) -> Any:
        raise AssertionError

    def leave_collective(self, *arguments: Any) -> None:
        raise AssertionError


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> _Watcher:
    watcher = _Watcher()
    monkeypatch.setattr(hangwatch, "_watcher", watcher)
    return watcher


@pytest.fixture
def frameworks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules with nothing but the base classes of the callbacks."""
    for name, base in (
        ("lightning", None),
        ("lightning.pytorch", "Callback"),
        ("transformers", "TrainerCallback"),
    ):
        module = types.ModuleType(name)
        if base is not None:
            setattr(module, base, type(base, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("hangwatch.integrations.lightning", "hangwatch.integrations.transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in ("hangwatch.integrations.lightning", "hangwatch.integrations.transformers"):
        sys.modules.pop(name, None)


class _Trainer:
    sanity_checking = False
    global_step = 7

    def save_checkpoint(self, path: str) -> str:
        return path


@pytest.mark.usefixtures("frameworks")
def test_lightning_callback(watcher: _Watcher) -> None:
    from hangwatch.integrations.lightning import HangwatchCallback

    callback, trainer = HangwatchCallback(validation_limit=600, checkpoint_limit=60), _Trainer()
    for _ in range(2):  # fit calls it again
        callback.setup(trainer, None, "fit")
    trainer.sanity_checking = True
    callback.on_sanity_check_start(trainer, None)
    callback.on_validation_start(trainer, None)
    callback.on_validation_end(trainer, None)
    callback.on_sanity_check_end(trainer, None)
    trainer.sanity_checking = False
    callback.on_train_batch_end(trainer, None, None, None, 0)
    callback.on_validation_start(trainer, None)
    callback.on_validation_end(trainer, None)
    assert trainer.save_checkpoint("a.ckpt") == "a.ckpt"
    callback.on_test_start(trainer, None)
    callback.on_exception(trainer, None, ValueError())
    assert watcher.events == [
        ("sanity check", 600),
        "end of sanity check",
        7,
        ("validation", 600),
        "end of validation",
        ("checkpoint", 60),
        "end of checkpoint",
        ("test", 600),
        "end of test",
    ]


@pytest.mark.usefixtures("frameworks")
def test_transformers_callback(watcher: _Watcher) -> None:
    from hangwatch.integrations.transformers import HangwatchCallback

    callback = HangwatchCallback(evaluation_limit=600)
    state = types.SimpleNamespace(global_step=3)
    control = types.SimpleNamespace(should_evaluate=True, should_save=True)
    callback.on_step_end(None, state, control)
    callback.on_evaluate(None, state, control)
    callback.on_save(None, state, control)
    callback.on_step_begin(None, state, control)
    control = types.SimpleNamespace(should_evaluate=False, should_save=False)
    callback.on_epoch_end(None, state, control)
    callback.on_train_end(None, state, control)
    assert watcher.events == [
        3,
        ("evaluation", 600),
        "end of evaluation",
        ("checkpoint", None),
        "end of checkpoint",
    ]


def test_accelerate_phases(watcher: _Watcher) -> None:
    class Accelerator:
        def save_state(self, path: str) -> str:
            return path

    accelerator = Accelerator()
    declare_phases(accelerator, checkpoint_limit=60)
    assert accelerator.save_state("here") == "here"
    assert watcher.events == [("checkpoint", 60), "end of checkpoint"]


def test_ray_runtime_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANGWATCH_URL", "http://master:8642")
    monkeypatch.setenv("HANGWATCH_JOB", "of the shell")
    runtime_env = make_runtime_env(
        {"pip": ["x"], "env_vars": {"HANGWATCH_TIMING": "0"}}, job="run7"
    )
    assert runtime_env["pip"] == ["x"]
    variables = runtime_env["env_vars"]
    assert variables["HANGWATCH_URL"] == "http://master:8642"
    assert (variables["HANGWATCH_JOB"], variables["HANGWATCH_TIMING"]) == ("run7", "0")


def test_callbacks_do_nothing_without_a_recorder() -> None:
    class Accelerator:
        def save_state(self) -> int:
            return 1

    accelerator = Accelerator()
    declare_phases(accelerator)
    assert accelerator.save_state() == 1
