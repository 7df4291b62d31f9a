"""The process of a teacher that the learner refreshes: it scores with proven weights, under their version, or not."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from examples.random_qwen3 import make
from tests.rollout_server.teacher_rig import ANSWERS, ask, asking, config_of, expected, standing, teaching
from tests.support.bus_receiver import HOST
from tests.support.waiting import eventually
from weight_bus import Publisher
from weight_bus.digest import combined, slice_digest

OLD = {"of": "lagged", "every": 5, "timeout_s": 10.0, "wait_s": 60.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """The policy as it began, and later."""
    path = tmp_path_factory.mktemp("models")
    for seed in range(3):
        make("tiny", path / str(seed), seed)
    yield [path / str(seed) for seed in range(3)]


def publish(publisher: Publisher, version: int, folder: Path) -> str:
    """The digest of what went out."""
    named = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    digests = {name: slice_digest(tensor) for name, tensor in named.items()}
    publisher.start_publish(version, named.items(), digests)
    return combined(digests)


async def test_it_scores_with_every_version_that_is_proven_and_with_no_other(folders: list[Path]) -> None:
    """Nothing before the first, each under its number, nothing while the engine holds something else; then healed."""
    run = config_of(folders[0], old=OLD)
    bus, teachers, wanted = run.weight_bus.of_teacher("old"), asking(run), list[tuple[int, str]]()
    with Publisher(bus, host=HOST, run_id="run", incarnation=1) as publisher:
        async with standing() as stand:
            stand.bus = publisher.address
            async with teaching(run, "old", stand) as process:
                await eventually(lambda: "teacher-old-0" in publisher.members(), "it follows")
                whole, spoilt = process.engine.digest, iter([1])

                async def digest() -> dict[str, int]:
                    changed = next(spoilt, 0) if process.version == 5 else 0
                    return {name: value + changed for name, value in (await whole()).items()}

                process.engine.digest = digest  # type: ignore[method-assign]
                for version, folder in zip((0, 5, 10), folders, strict=True):
                    wanted += [(version, publish(publisher, version, folder))]
                    await eventually(lambda now=wanted[-1]: stand.said[-1] == now, f"version {version}")
                    teachers.links.listed(stand.entries, "run")
                    found, expects = await ask(teachers), await expected(run, folder)
                    assert found["teachers"] == [f"old@{version}"] * len(ANSWERS)
                    assert np.array_equal(found["teacher_logprobs"], expects.logprobs)
        teachers.close()
    assert stand.said == [(0, ""), (0, ""), *wanted[:2], (5, ""), wanted[2]], "the second one says what it follows"
