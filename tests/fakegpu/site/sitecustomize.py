"""Python runs this at its start where this folder is on PYTHONPATH: `import hangwatch` finds this checkout's."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[3]
_PACKAGES = {
    "hangwatch": _REPOSITORY / "hangwatch",
    "hangwatch.agent": _REPOSITORY / "agent",
    "hangwatch.server": _REPOSITORY / "server",
}


class CheckoutFinder:
    """Comes before the folders of the path and what is installed, as these may hold another checkout's."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        folder = _PACKAGES.get(name)
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


sys.meta_path.insert(0, CheckoutFinder)
