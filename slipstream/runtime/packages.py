"""Packages of ours, where a project in the current folder has one of the same name. Standard library alone."""

import importlib.machinery
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("configs", "slipstream", "replay", "weight_bus", "rollout_server", "learner")
SAFE_PATH = "PYTHONSAFEPATH"


def require_ours() -> None:
    """Raises ImportError: one of the names would be imported from elsewhere."""
    for name in NAMES:
        found = importlib.machinery.PathFinder.find_spec(name)
        places = [] if found is None else [*(found.submodule_search_locations or [str(found.origin)])]
        if places and os.path.realpath(places[0]) != str(ROOT / name):
            raise ImportError(
                f"{name}: {places[0]} comes before Slipstream's own {ROOT / name}; start with `slipstream`, or from"
                " another folder, and take that project off PYTHONPATH, or rename its package"
            )


def environment() -> dict[str, str]:
    """Of a process of ours: ours come first, and the current folder last, for what the configuration names by module.

    Example: {"PYTHONSAFEPATH": "1", "PYTHONPATH": "/opt/slipstream:/home/me/project"}
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = dict.fromkeys(path for path in (str(ROOT), *given, os.getcwd()) if path)
    return {SAFE_PATH: "1", "PYTHONPATH": os.pathsep.join(paths)}
