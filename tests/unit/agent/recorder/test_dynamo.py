"""All code of hangwatch that runs in a training process is found, so that it can be marked for
Dynamo.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from hangwatch.agent.recorder import dynamo, installation
from hangwatch.agent.recorder.checks import inspection


def test_own_code_is_found() -> None:
    packages = tuple(module.__name__.rpartition(".")[0] for module in (installation, inspection))
    names = {name for name in sys.modules if name.rpartition(".")[0] in packages}
    found: set[CodeType] = set()
    for name in names:
        found.update(dynamo._iter_codes(vars(sys.modules[name]).values(), name))
    functions = [
        function
        for function in gc.get_objects()
        if type(function) is FunctionType and function.__globals__.get("__name__") in names
    ]
    assert len(functions) > 200
    assert [function for function in functions if function.__code__ not in found] == []

    folder = str(Path(installation.__file__).parents[1])
    own_files = (folder, "<string>")  # what dataclasses generate has no file
    assert [code for code in found if not code.co_filename.startswith(own_files)] == []


def test_function_is_called_with_the_callback_unset() -> None:
    from torch._C._dynamo.eval_frame import set_eval_frame

    seen = []

    def replace_callback() -> str:
        seen.append(set_eval_frame(None))
        return "result"

    set_eval_frame(False)  # what compiled code that must not compile anything else runs with
    try:
        result = dynamo.run_uncompiled(replace_callback)
    finally:
        callback = set_eval_frame(None)
    assert (result, seen, callback) == ("result", [None], False)


def test_attributes_that_are_read_are_hidden_from_modes_of_the_job() -> None:
    import torch
    from torch.overrides import TorchFunctionMode

    seen: list[object] = []

    class Log(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x = torch.ones(3)
    with Log():
        assert dynamo.run_uncompiled(lambda: x.shape) == (3,)
        assert not seen
        assert x.shape == (3,)
    assert seen
