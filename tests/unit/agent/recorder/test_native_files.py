"""Which file of a native recorder a training process loads, and that a build provides that file."""

from __future__ import annotations

from pathlib import Path

import pytest

from hangwatch.agent.recorder.native import build, cache


class Files:
    """The recorders of a host, all of which work."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cached, self.wheels = folder / "cache" / "recorder.so", folder / "recorder.so"
        self.env = {"PATH": "/nowhere"}
        self._monkeypatch = monkeypatch
        self._has_tested_wheel: bool | None = None  # None: there is none
        monkeypatch.setattr(cache, "explain_unsupported", lambda: "")
        monkeypatch.setattr(cache, "get_library_path", lambda env: self.cached)
        monkeypatch.setattr(cache, "find_prebuilt", self._find_prebuilt)
        monkeypatch.setattr(build, "check_library", lambda path, env: None)

    def add_cached(self, content: bytes = b"cached") -> None:
        self.cached.parent.mkdir(mode=0o700, exist_ok=True)
        self.cached.write_bytes(content)
        cache.append_digest(self.cached)
        self.cached.chmod(0o700)

    def add_wheel(self, *, is_tested: bool) -> None:
        self.wheels.write_bytes(b"of the wheel")
        cache.append_digest(self.wheels)
        self.wheels.chmod(0o700)
        self._has_tested_wheel = is_tested

    def _find_prebuilt(self, *, only_tested: bool) -> Path | None:
        if self._has_tested_wheel is None or (only_tested and not self._has_tested_wheel):
            return None
        return self.wheels

    def find(self) -> Path | None:
        return cache.find_library(self.env)

    def build(self) -> Path:
        return build.build_recorder(self.env)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    return Files(tmp_path, monkeypatch)


def test_nothing_is_found_before_the_first_build(files: Files) -> None:
    assert files.find() is None
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        files.build()


def test_cached_recorder_comes_first(files: Files) -> None:
    files.add_cached()
    files.add_wheel(is_tested=True)
    assert files.find() == files.build() == files.cached


def test_wheels_recorder_needs_no_cache_where_it_was_tested(files: Files) -> None:
    files.add_wheel(is_tested=True)
    assert files.find() == files.build() == files.wheels
    assert not files.cached.parent.exists()


def test_wheels_recorder_is_copied_once_it_is_tried(files: Files) -> None:
    files.add_wheel(is_tested=False)
    assert files.find() is None
    assert files.build() == files.find() == files.cached
    assert files.cached.read_bytes() == files.wheels.read_bytes()


def test_incomplete_recorder_is_replaced_though_the_wheel_has_one(files: Files) -> None:
    files.add_cached()
    files.cached.write_bytes(files.cached.read_bytes()[:-1])
    files.add_wheel(is_tested=True)
    with pytest.raises(OSError, match="is incomplete"):
        files.find()
    assert files.build() == files.find() == files.cached


def test_recorder_that_others_can_write_is_reported(files: Files) -> None:
    files.add_cached()
    files.add_wheel(is_tested=True)
    files.cached.chmod(0o722)
    with pytest.raises(PermissionError, match="can be written by other users"):
        files.find()
    with pytest.raises(build.BuildError, match="can be written by other users"):
        files.build()
