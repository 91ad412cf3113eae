"""`hangwatch report` saves an incident as one HTML file, for a ticket or a colleague."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from ..client import open_client
from ..errors import OK, CliError
from ..terminal import print_json, print_message
from .incidents import find_incident

_STDOUT = "-"


def run_report(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Writes the file and prints its path. Raises CliError."""
    with open_client(args, env) as client:
        incident_id = str(find_incident(client, args.id, args.job)["id"])
        page = client.download_file(f"incidents/{quote(incident_id, safe='')}/report")
    if args.out == _STDOUT:
        sys.stdout.buffer.write(page)
        return OK
    path = Path(args.out)
    if path.is_dir():  # as "" is, which is the current one
        path /= f"hangwatch-{incident_id}.html"
    try:
        path.write_bytes(page)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from None
    if args.json:
        print_json({"id": incident_id, "path": str(path)})
    else:
        print(path)
        print_message(f"{len(page) / 1e3:.0f} kB; open it in a browser, or attach it to a ticket")
    return OK
