"""Fixtures of the rollout server's tests."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Any, Any]:
    """A folder with version 0, version 0 and version 1."""
    # Here and not above: tests of tasks and rewards must not pay for torch and transformers.
    from torch_oracle import load_model, make_model, save_folder

    save_folder(tmp_path)
    return tmp_path, load_model(tmp_path), make_model(seed=1)
