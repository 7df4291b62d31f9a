"""Weight files of a Hugging Face folder."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from configs.errors import SlipstreamError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def weight_files(folder: Path, failed: type[SlipstreamError]) -> dict[str, Path]:
    """File of each tensor, by name: what else lies beside them, such as adapters, is not the model's.

    Raises `failed`: there are no safetensors, or a file that the index names is missing or not readable.
    """
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file() and not single.is_file():
        raise failed(f"model.path: {folder} has neither {SINGLE} nor {INDEX}; only safetensors load")
    try:
        if index.is_file():
            located = {str(name): str(file) for name, file in json.loads(index.read_bytes())["weight_map"].items()}
        else:
            with safe_open(single, framework="np") as opened:
                return dict.fromkeys(opened.keys(), single)
    except (ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise failed(f"model.path: {index if index.is_file() else single} is not readable: {error!r}") from error
    for name in sorted(set(located.values())):
        if Path(name).name != name or not (folder / name).is_file():
            raise failed(f"model.path: {index}: weight_map names {name!r}, which is not a file in this folder")
    return {name: folder / file for name, file in located.items()}
