"""How a process was started, for its usage lines."""

import sys

NAME = "slipstream"


def program(module: str) -> str:
    """Such as `slipstream train`, or `python -m learner.main`."""
    return sys.argv[0] if sys.argv[0].startswith(f"{NAME} ") else f"python -m {module}"
