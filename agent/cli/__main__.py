"""``python -m hangwatch.agent.cli`` is the `hangwatch` command."""

import sys

from .main import main

sys.exit(main())
