"""Checkpoints of one process: what counts as complete, what is kept, what is refused."""

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from one_rank import built
from recorded import batch_of, random_step, train_on
from safetensors.torch import load_file
from tiny_models import make_config, save_model
from torch.distributed.device_mesh import DeviceMesh

from configs import Config
from learner import checkpoint
from learner.checkpoint import Checkpointer, CheckpointError
from learner.checkpoint_folders import latest_complete
from learner.model import Policy
from learner.optimizer import Optimizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Config:
    sections = {"run": {"dir": str(tmp_path), "name": "run", "seed": 3}, "replay": {"async_lag": 2}}
    return make_config(model, checkpoint={"keep": 2}, **sections)


def trained(config: Config, mesh: DeviceMesh, num_steps: int = 1) -> tuple[Policy, Optimizer]:
    policy, optimizer = built(config, mesh)
    for step in range(1, num_steps + 1):
        train_on(batch_of(random_step(step), step), policy, optimizer, config)
    return policy, optimizer


def test_everything_comes_back(config: Config, mesh: DeviceMesh) -> None:
    policy, optimizer = trained(config, mesh, 2)
    folder = Checkpointer(config, policy, optimizer).save(2, replay={"leases": [[0, 1, 2]]})
    fresh, fresh_optimizer = built(config, mesh)
    state = Checkpointer(config, fresh, fresh_optimizer).resume()
    assert state == {"step": 2, "version": 2, "seed": 3, "replay": {"leases": [[0, 1, 2]]}}
    assert fresh.parameter_digest() == policy.parameter_digest() and fresh_optimizer.num_steps == 2
    for kind in ("exp_avg", "exp_avg_sq"):
        pairs = zip(fresh_optimizer.moments(kind), optimizer.moments(kind), strict=True)
        assert all(torch.equal(mine.local, theirs.local) and mine.local.any() for mine, theirs in pairs)
    written = json.loads((folder / "state.json").read_text())
    assert written["parameter_digest"] == policy.parameter_digest()
    assert written["packages"]["transformers"] == transformers.__version__
    exported = load_file(folder / "hf" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in policy.named_full_tensors("float32"))
    sizes = json.loads((folder / "COMPLETE").read_text())["files"]
    on_disk = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    assert sizes == {name: size for name, size in on_disk.items() if name != "COMPLETE"}


def test_without_a_checkpoint_there_is_nothing_to_resume(config: Config, mesh: DeviceMesh) -> None:
    assert latest_complete(Path(config.run_dir))[0] is None
    assert Checkpointer(config, *built(config, mesh)).resume() is None


def test_the_newest_are_kept(config: Config, mesh: DeviceMesh) -> None:
    policy, optimizer = trained(config, mesh)
    keeper = Checkpointer(config, policy, optimizer)
    for step in (8, 9, 10):
        keeper.save(step, replay={})
    folder = Path(config.run_dir) / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["step_10", "step_9"]
    assert latest_complete(Path(config.run_dir))[0] == folder / "step_10"


def test_incomplete_folders_are_passed_over_and_named(
    config: Config, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    policy, optimizer = trained(config, mesh)
    keeper = Checkpointer(config, policy, optimizer)
    first, second = keeper.save(1, replay={}), keeper.save(2, replay={})
    run = Path(config.run_dir)
    cut = second / "hf" / "model.safetensors"
    whole = cut.read_bytes()
    cut.write_bytes(whole[:-1])
    with caplog.at_level(logging.WARNING):
        state = keeper.resume()
    assert state is not None and state["step"] == 1
    assert f"{len(whole) - 1} bytes, COMPLETE says {len(whole)}" in caplog.text
    cut.write_bytes(whole)
    assert latest_complete(run)[0] == second
    (second / "state.json").rename(second / "elsewhere")
    assert latest_complete(run)[0] == first
    (second / "elsewhere").rename(second / "state.json")
    (second / "COMPLETE").write_text("{")
    assert latest_complete(run)[0] == first
    (second / "COMPLETE").unlink()
    assert latest_complete(run)[0] == first
    with pytest.raises(CheckpointError, match="is incomplete: no COMPLETE"):
        keeper.load(second)
    keeper.save(2, replay={"again": 1})  # a crashed save is written over
    assert latest_complete(run)[0] == second


def test_a_crash_before_the_mark_leaves_the_older_one(
    config: Config, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, optimizer = trained(config, mesh)
    keeper = Checkpointer(config, policy, optimizer)
    older = keeper.save(1, replay={})

    class Killed(BaseException):
        """Stands for kill -9."""

    def killed(folder: Path) -> None:
        raise Killed

    monkeypatch.setattr(checkpoint, "_complete", killed)
    with pytest.raises(Killed):
        keeper.save(2, replay={})
    assert latest_complete(Path(config.run_dir))[0] == older


def flip_a_byte(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 0xFF
    file.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("name", "share", "words"),
    [
        ("__0_0.distcp", 0.5, "dcp/__0_0.distcp is damaged at "),  # inside a tensor: the digest tells
        ("__0_0.distcp", 0.0, "dcp/__0_0.distcp is damaged at model.model.embed_tokens.weight"),  # unreadable
        (".metadata", 0.5, "dcp/.metadata is damaged"),
    ],
)
def test_flipped_bytes_are_named_by_file_with_a_remedy(
    config: Config, mesh: DeviceMesh, name: str, share: float, words: str
) -> None:
    keeper = Checkpointer(config, *trained(config, mesh))
    keeper.save(1, replay={})
    newest = keeper.save(2, replay={})
    damaged = newest / "dcp" / name
    flip_a_byte(damaged, int(share * damaged.stat().st_size))
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(config, *built(config, mesh)).resume()
    said = str(caught.value)
    assert str(newest) in said and words in said and "\n" not in said, said
    assert "move step_2 away: then --resume goes on from step_1" in said
    newest.rename(newest.with_name("away"))
    state = Checkpointer(config, *built(config, mesh)).resume()
    assert state is not None and state["step"] == 1, "the remedy helps"


def test_another_architecture_is_refused_by_name(config: Config, mesh: DeviceMesh, tmp_path: Path) -> None:
    folder = Checkpointer(config, *trained(config, mesh)).save(1, replay={})
    wider = make_config(save_model(tmp_path / "wider", intermediate_size=96), run={"dir": str(tmp_path), "name": "run"})
    with pytest.raises(CheckpointError, match=r"mlp.gate_proj.weight is \[192, 64\] there and \[96, 64\] in"):
        Checkpointer(config, *built(wider, mesh)).load(folder)
    untied = make_config(save_model(tmp_path / "untied", tied=False), run={"dir": str(tmp_path), "name": "run"})
    with pytest.raises(CheckpointError, match=r"lm_head.weight is None there"):
        Checkpointer(config, *built(untied, mesh)).load(folder)


@pytest.mark.parametrize("key", ["parameter_digest", "optimizer_digest"])
def test_what_was_loaded_must_have_the_digest_that_was_saved(config: Config, mesh: DeviceMesh, key: str) -> None:
    folder = Checkpointer(config, *trained(config, mesh)).save(1, replay={})
    path = folder / "state.json"
    state = json.loads(path.read_text())
    state[key] = "0" * len(state[key])
    path.write_text(json.dumps(state, indent=2, ensure_ascii=False) + "\n")
    with pytest.raises(CheckpointError, match=f"{key} is .* after loading, 0+ was saved"):
        Checkpointer(config, *built(config, mesh)).load(folder)


def test_a_format_from_the_future_is_refused(config: Config, mesh: DeviceMesh) -> None:
    folder = Checkpointer(config, *trained(config, mesh)).save(1, replay={})
    path = folder / "state.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="has format 2, this version reads 1"):
        Checkpointer(config, *built(config, mesh)).load(folder)


def test_a_state_that_is_not_json_is_refused(config: Config, mesh: DeviceMesh) -> None:
    folder = Checkpointer(config, *trained(config, mesh)).save(1, replay={})
    path = folder / "state.json"
    path.write_text("x" * path.stat().st_size)
    with pytest.raises(CheckpointError, match="could not be loaded"):
        Checkpointer(config, *built(config, mesh)).load(folder)
