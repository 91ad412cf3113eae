"""The folders of tests/unit mirror the packages."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).parents[2]
UNIT_TESTS = Path(__file__).parent
PACKAGES = ("hangwatch", "agent", "server")
# Folders for tests of the documentation and of the zoo.
OTHER_FOLDERS = {"docs", "zoo"}
# Packages that only a real compiler or database tries, and where that is done.
TESTED_ELSEWHERE = {
    "agent/recorder/native": "tests/integration/test_recorder_choice.py",
    "server/storage/migrations": "tests/integration/test_upgrade.py",
    "server/storage/migrations/versions": "tests/integration/test_upgrade.py",
}


def test_each_package_has_a_folder_of_tests_and_each_folder_a_package() -> None:
    packages = {
        path.parent.relative_to(PROJECT).as_posix()
        for name in PACKAGES
        for path in (PROJECT / name).rglob("[!_]*.py")
    }
    folders = {
        path.parent.relative_to(UNIT_TESTS).as_posix() for path in UNIT_TESTS.rglob("test_*.py")
    }
    assert folders - {".", *OTHER_FOLDERS} == packages - set(TESTED_ELSEWHERE)


def test_packages_that_are_tested_elsewhere_exist_with_their_tests() -> None:
    for package, path in TESTED_ELSEWHERE.items():
        assert (PROJECT / package).is_dir() and (PROJECT / path).is_file(), package
