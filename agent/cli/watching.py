"""Shows a view of the server again and again, as `--watch` does."""

from __future__ import annotations

import time
from collections.abc import Callable

from hangwatch.report.text import Paint

from .errors import OK, NotFoundError, UnreachableError
from .terminal import print_message

_REFRESH_S = 1.0
_CLEAR_SCREEN = "\x1b[H\x1b[2J"


def watch_view(print_view: Callable[[], int], paint: Paint) -> int:
    """Prints the view each second until Ctrl-C, and returns its last exit code. A server that cannot be
    reached, and something that does not exist yet, are waited for.
    """
    code = OK
    try:
        while True:
            if paint.colour:
                print(_CLEAR_SCREEN, end="")
            try:
                code = print_view()
            except (UnreachableError, NotFoundError) as error:
                print_message(str(error))
                code = error.exit_code
            print(flush=True)
            time.sleep(_REFRESH_S)
    except KeyboardInterrupt:
        return code
