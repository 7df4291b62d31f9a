"""Before any process starts: whether pictures can be trained on as configured, and can be read. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.errors import Contradiction, InputMissing, NoRoom
from configs.schema import Config
from learner.advantages import facts_of
from replay.data.pictures import inline_bytes
from replay.data.rows import Row
from slipstream.families.pictures import PictureError, decode, grid_of, opened, pixel_bytes, vision_of
from slipstream.runtime.fingerprint import read_json

MIB, GIB = 1024**2, 1024**3


def problem_with_pictures(config: Config, model: Mapping[str, Any]) -> str:
    """What of the configuration does not go with a model that takes pictures (by its config.json), or nothing."""
    if vision_of(model) is None:
        return ""
    kind, mesh, engine = model["model_type"], config.learner.mesh, config.rollout.engine
    for key, value, instead, why in (
        ("learner.mesh.tensor", mesh.tensor, 1, "pictures are not divided over tensor ranks"),
        ("algorithm.kl", config.algorithm.kl, "none", "a reference model sees no pictures"),
    ):
        if value != instead:
            said = "null" if instead is None else instead
            return f"{key}: {value!r} with a {kind} model: {why}; take {key}={said}"
    if config.learner.lora.rank and not config.rollout.facts.adapts_with_pictures:
        return (
            f"learner.lora.rank: {config.learner.lora.rank} with a {kind} model and rollout.engine {engine!r}: updates"
            " of adapters there are made for models of text; take learner.lora.rank=0, or rollout.engine=torch"
        )
    values = pixel_bytes((1, 1, 1), model.get("vision_config") or {}) // 4
    if (wanted := config.rollout.facts.patch_values.get(kind, values)) != values:
        return (
            f"rollout.engine: {engine!r} with a {kind} model whose patches have {values} values: it takes patches of"
            f" other than {wanted} for features, unseen by the tower; take rollout.engine=torch"
        )
    if facts_of(config.algorithm).needs_critic:
        name = config.algorithm.advantage.name
        return f"algorithm.advantage: {name!r} with a {kind} model: a critic sees no pictures; take one such as grpo"
    return ""


class PictureCheck:
    """Looks at the pictures of rows, and adds up what a step with such rows takes."""

    def __init__(self, config: Config, model: Mapping[str, Any]) -> None:
        """`model` is the config.json of model.path. Raises FingerprintError: preprocessor_config.json is broken."""
        self._config, self._model, self._vision = config, model, vision_of(model)
        file = Path(config.model.path) / "preprocessor_config.json"
        self._processor = read_json(file) if self._vision is not None else {}
        self._tokens: list[int] = []
        self._largest = self._heaviest = 0
        """Bytes of a row's pictures: as pixels, and as what travels with it."""

    def tokens(self, row: Row) -> int:
        """Of the row's pictures. Raises ConfigError: the model takes none, or one cannot be read or not be used."""
        images = row.get("images", [])
        if not images:
            return 0
        if self._vision is None:
            raise Contradiction(
                f"the row has {len(images)} pictures, and model.path is a {self._model.get('model_type')!r} model,"
                " which takes none; take one of the Qwen2-VL family, or drop the column"
            )
        if self._config.environment.name == "agent":
            raise Contradiction(
                "environment.function: 'agent', and the row has pictures, which the endpoint does not take: requests of"
                " agents are text; take a function of your own, `async def rollout(row, client)`, or drop the column"
            )
        try:
            decoded = [decode(opened(image)) for image in images]
            grids = [grid_of(image.width, image.height, self._processor) for image in decoded]
        except PictureError as error:
            raise InputMissing(str(error)) from error
        found = [self._vision.tokens(grid) for grid in grids]
        self._tokens += found
        self._largest = max(self._largest, sum(pixel_bytes(grid, self._processor) for grid in grids))
        self._heaviest = max(self._heaviest, inline_bytes(row))
        return sum(found)

    def report(self, path: str, memory_bytes: int) -> str:
        """What the rows have shown, for the user; nothing without pictures.

        A learner rank holds the pixels of the groups that it has answers of, at most those of the whole step.

        Raises ConfigError: pixels of a step do not fit into `memory_bytes`, those of a node with learner ranks.
        """
        if not self._tokens:
            return ""
        groups = self._config.rollout.groups_per_step
        ranks = max(len(share.learner) for share in self._config.shares)
        pixels = groups * self._largest
        said = f"pictures of {min(self._tokens)} to {max(self._tokens)} tokens; the largest row's are"
        said += f" {self._largest / MIB:.1f} MiB of pixels, so those of a step up to {pixels / GIB:.1f} GiB on each"
        said += f" learner rank (rollout.groups_per_step {groups})"
        if pixels * ranks > memory_bytes:
            raise NoRoom(
                f"{path}: {said}, and {memory_bytes / GIB:.1f} GiB of memory for {ranks} of them are here;"
                " lower size.longest_edge in the model's preprocessor_config.json, or rollout.groups_per_step"
            )
        if self._heaviest:
            sent = groups * self._heaviest / MIB
            said += f"; up to {sent:.0f} MiB of a step's pictures travel in messages and the journal, files would not"
        return f"{path}: {said}"
