"""``python -m hangwatch.agent.cli`` is the `hangwatch` command."""

import sys

from .entry import main

sys.exit(main())
