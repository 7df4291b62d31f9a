"""Commands of the product inside a test's own process: no interpreter to start, and no torch to import again."""

import contextlib
import importlib
import io
import runpy
import sys
import warnings
from collections.abc import Sequence
from unittest.mock import patch

from slipstream.command import main as slipstream


def run(words: Sequence[str]) -> tuple[int, str]:
    """Run `slipstream ...`, `python -m MODULE ...` or `python FILE ...` in the present folder.

    Returns:
        (exit code, standard output and error together).
    """
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        patch.object(sys, "argv", ["", *words[1:]]),
        patch.object(sys, "path", ["", *sys.path]),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*found in sys.modules.*")
        importlib.invalidate_caches()
        try:
            _run(list(words))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            return code, said.getvalue() + (end.code if isinstance(end.code, str) else "")
    return 0, said.getvalue()


def _run(words: list[str]) -> None:
    match words:
        case ["slipstream", *rest]:
            sys.exit(slipstream(rest))
        case ["python", "-m", module, *rest]:
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["python", file, *rest]:
            sys.argv = [file, *rest]
            runpy.run_path(file, run_name="__main__")
        case _:
            raise ValueError(f"no command of the product: {words}")
