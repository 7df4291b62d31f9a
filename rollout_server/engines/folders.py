"""Weight files of a Hugging Face folder, as the learner reads them."""

import json
from pathlib import Path

from rollout_server.engines.base import EngineError


def weight_files(folder: Path) -> list[Path]:
    """Those that the index names, or `model.safetensors`: others beside them, such as adapters, are not the model's.

    Raises EngineError where there are none, or one that the index names is absent.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        if single.is_file():
            return [single]
        raise EngineError(f"{folder}: neither {single.name} nor {index.name}; only safetensors load")
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise EngineError(f"{index}: weight_map names {name!r}, which is not a file in this folder")
    return [folder / name for name in names]
