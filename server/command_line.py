"""The command line of ``hangwatch-server``: flags and ``--help`` from the settings model, and
messages for invalid settings.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from hangwatch import __version__

from .settings import CONFIG_FILE_NAME, Settings

TEST_ALERT_FLAG = "--test-alert"

_METAVARS_BY_NAME = {
    "alert": "URL",
    "database": "URL",
    "public_url": "URL",
    "data_dir": "DIR",
    "retention_days": "DAYS",
    "retention_mb": "MB",
    "on_hang": "{report,abort}",
    "abort_kinds": "KINDS",
}
_METAVARS_BY_TYPE: dict[object, str] = {int: "N", float: "SECONDS", Path | None: "FILE"}


class SettingsError(Exception):
    """A setting that cannot be used. The message names it and the remedy."""


def load_settings(argv: Sequence[str]) -> Settings:
    """Returns the settings for a command line. Raises SettingsError for an invalid value, and
    SystemExit after ``--help`` and for an unknown flag.
    """
    flag_values = vars(build_parser().parse_args(argv))
    flag_values.pop("test_alert")
    try:
        return Settings(**flag_values)
    except ValidationError as error:
        problems = error.errors(include_input=False)
        explanations = [_explain_error(problem["loc"], problem["msg"]) for problem in problems]
        raise SettingsError("\n".join(explanations)) from None
    except ValueError as error:  # TOMLDecodeError, whose module came with Python 3.11
        raise SettingsError(f"{CONFIG_FILE_NAME} is not valid TOML: {error}") from None
    except OSError as error:
        raise SettingsError(
            f"{CONFIG_FILE_NAME} cannot be read: {error.strerror}; make it readable or move it away"
        ) from None


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser: one flag for each field of the model."""
    parser = argparse.ArgumentParser(
        prog="hangwatch-server",
        allow_abbrev=False,
        description="The central server: collects the reports of all ranks, and names the cause of a hang.",
        epilog=(
            "Each setting is also an environment variable (HANGWATCH_PORT) and a key of"
            f" {CONFIG_FILE_NAME} in the working directory (port = 8642). A flag overrides the environment, the"
            " environment overrides the file."
        ),
    )
    parser.add_argument("--version", action="version", version=f"hangwatch {__version__}")
    parser.add_argument(
        TEST_ALERT_FLAG,
        action="store_true",
        help="send a test message to every alert channel, print the results, and exit",
    )
    for name, field in Settings.model_fields.items():
        description = " ".join((field.description or "").split())
        help_text = f"{description}{_describe_default(field)} [HANGWATCH_{name.upper()}]"
        metavar = _METAVARS_BY_NAME.get(name) or _METAVARS_BY_TYPE.get(field.annotation)
        parser.add_argument(
            format_flag(name),
            metavar=metavar or name.upper(),
            action="append" if name == "alert" else "store",
            default=argparse.SUPPRESS,
            help=help_text.replace("%", "%%"),
        )
    return parser


def format_flag(name: str) -> str:
    """
    >>> format_flag("stall_after")
    '--stall-after'
    """
    return "--" + name.replace("_", "-")


def _describe_default(field: FieldInfo) -> str:
    default = field.default
    if field.default_factory is not None:
        return ""  # the description says it
    if isinstance(default, (int, float)):
        default = f"{default:g}"
    elif isinstance(default, tuple):
        default = ",".join(part.value for part in default)
    return f" (default: {default})" if default else ""


def _explain_error(loc: tuple[int | str, ...], message: str) -> str:
    message = message.removeprefix("Value error, ").replace("Input should", "should")
    if not loc:
        return message
    name = str(loc[0])
    if name not in Settings.model_fields:
        names = ", ".join(Settings.model_fields)
        return f"{CONFIG_FILE_NAME} has an unknown setting {name!r}; known settings: {names}"
    return f"{format_flag(name)} (or HANGWATCH_{name.upper()}, or {name} in {CONFIG_FILE_NAME}) {message}"
