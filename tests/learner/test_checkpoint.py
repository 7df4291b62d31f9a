"""Checkpoints of one process: what counts as complete, what is kept, what is refused."""

import json
import logging
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh

from configs import Config
from configs.learner import Mesh
from learner.beside.beside import build_beside
from learner.checkpoints import checkpointer, memory_plan
from learner.checkpoints.checkpointer import Checkpointer, CheckpointError
from learner.checkpoints.folders import latest_complete
from learner.policy.memory import GIB, OutOfMemory, Setup
from slipstream.runtime import disk
from tests.learner.recorded import batch_of, random_step, train_on
from tests.learner.tiny_models import CPU, SIZES, built, make_config, save_model, saved
from tests.support.disks import grow, small_disk
from tests.support.waiting import until


@pytest.fixture
def config(qwen3, tmp_path):
    sections = {"run": {"dir": str(tmp_path), "name": "run", "seed": 3}}
    return make_config(qwen3, checkpoint={"keep": 2}, **sections)


@pytest.fixture
def keeper(config, mesh):
    """Of a policy that has made a step."""
    policy, optimizer = built(config, mesh)
    train_on(batch_of(random_step(1), 1), policy, optimizer, config)
    return Checkpointer(config, policy, optimizer)


def fresh(config: Config, mesh: DeviceMesh) -> Checkpointer:
    return Checkpointer(config, *built(config, mesh))


def test_everything_comes_back(config, mesh):
    assert fresh(config, mesh).resume() is None
    policy, optimizer = built(config, mesh)
    for step in (1, 2):
        train_on(batch_of(random_step(step), step), policy, optimizer, config)
    folder = saved(Checkpointer(config, policy, optimizer), 2, replay={"leases": [[0, 1, 2]]}, scale=[65536.0])
    again, fresh_optimizer = built(config, mesh)
    state = Checkpointer(config, again, fresh_optimizer).resume()
    assert state == {"step": 2, "version": 2, "seed": 3, "replay": {"leases": [[0, 1, 2]]}, "scale": [65536.0]}
    assert again.parameter_digest() == policy.parameter_digest() and fresh_optimizer.num_steps == 2
    for kind in ("exp_avg", "exp_avg_sq"):
        pairs = zip(fresh_optimizer.moments(kind).values(), optimizer.moments(kind).values(), strict=True)
        assert all(torch.equal(mine, theirs) and mine.any() for mine, theirs in pairs)
    written = json.loads((folder / "state.json").read_text())
    assert written["parameter_digest"] == policy.parameter_digest()
    assert written["packages"]["transformers"] == transformers.__version__
    exported = load_file(folder / "hf" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in policy.named_full_tensors("float32"))
    sizes = json.loads((folder / "COMPLETE").read_text())["files"]
    on_disk = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    assert sizes == {name: size for name, size in on_disk.items() if name != "COMPLETE"}


def test_incomplete_folders_are_passed_over_and_named(config, keeper, caplog):
    first, second = saved(keeper, 1), saved(keeper, 2)
    run = Path(config.run_dir)
    cut = second / "hf" / "model.safetensors"
    whole = cut.read_bytes()
    cut.write_bytes(whole[:-1])
    with caplog.at_level(logging.WARNING):
        assert keeper.resume()["step"] == 1
    assert f"{len(whole) - 1} bytes, COMPLETE says {len(whole)}" in caplog.text
    cut.write_bytes(whole)
    assert latest_complete(run)[0] == second
    (second / "state.json").rename(second / "elsewhere")
    assert latest_complete(run)[0] == first
    (second / "elsewhere").rename(second / "state.json")
    (second / "COMPLETE").write_text("{")
    assert latest_complete(run)[0] == first
    (second / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match="is incomplete: no COMPLETE"):
        keeper.load(second)
    saved(keeper, 2, replay={"again": 1})  # a crashed save is written over
    assert latest_complete(run)[0] == second


@pytest.mark.parametrize(
    ("name", "share", "words"),
    [
        ("__0_0.distcp", 0.5, "dcp/__0_0.distcp is damaged at "),  # inside a tensor: the digest tells
        ("__0_0.distcp", 0.0, "dcp/__0_0.distcp is damaged at model.model.embed_tokens.weight"),  # unreadable
        (".metadata", 0.5, "dcp/.metadata is damaged"),
    ],
)
def test_flipped_bytes_are_named_by_file_with_a_remedy(config, mesh, keeper, name, share, words):
    saved(keeper, 1)
    newest = saved(keeper, 2)
    damaged = newest / "dcp" / name
    data = bytearray(damaged.read_bytes())
    data[int(share * len(data))] ^= 0xFF
    damaged.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        fresh(config, mesh).resume()
    said = str(caught.value)
    assert str(newest) in said and words in said and "\n" not in said, said
    assert "move step_2 away: then --resume goes on from step_1" in said
    newest.rename(newest.with_name("away"))
    assert fresh(config, mesh).resume()["step"] == 1, "the remedy helps"


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"intermediate_size": 96}, r"mlp.gate_proj.weight is \[192, 64\] there and \[96, 64\] in"),
        ({"tied": False}, "lm_head.weight is None there"),
    ],
)
def test_another_architecture_is_refused_by_name(tmp_path, mesh, keeper, change, difference):
    folder = saved(keeper, 1)
    other = make_config(save_model(tmp_path / "other", **change), run={"dir": str(tmp_path), "name": "run"})
    with pytest.raises(CheckpointError, match=difference):
        fresh(other, mesh).load(folder)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (r'"(parameter)_digest": "\w+"', r'"\1_digest": "00"', "parameter_digest is .* after loading, 00 was saved"),
        (r'"(optimizer)_digest": "\w+"', r'"\1_digest": "00"', "optimizer_digest is .* after loading, 00 was saved"),
        ('"format": 1', '"format": 2', "has format 2, this version reads 1"),
        ("{", "x", "could not be loaded"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(keeper, old, new, words):
    folder = saved(keeper, 1)
    path = folder / "state.json"
    text = path.read_text()
    path.write_text(re.sub(old, new, text).ljust(len(text)))
    with pytest.raises(CheckpointError, match=words):
        keeper.load(folder)


def test_a_half_written_folder_is_cleared(config, keeper, caplog):
    whole, half = saved(keeper, 1), saved(keeper, 2)
    (half / "COMPLETE").unlink()
    assert keeper.resume()["step"] == 1
    assert "checkpoint step_2 was half written: deleted" in caplog.text
    assert list(whole.parent.iterdir()) == [whole]


def test_a_reference_that_was_refreshed_is_not_forgotten_in_silence(config, keeper):
    """Without its refreshes a run does not look for reference/, and the model that it began with would come back."""
    folder = saved(keeper, 1)
    (folder / "reference").mkdir()
    assert keeper.load(folder), "no KL term, no reference model"
    keeper._config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl": "k3"})})
    with pytest.raises(CheckpointError, match=r"step_1 has reference/, .* algorithm.reference_refresh_steps 0 would"):
        keeper.load(folder)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"learner": {"lora": {"rank": 2}}}, r"adapters of weights in bfloat16, this run has them in float32"),
        (
            {"algorithm": {"kl": "k3", "reference_refresh_steps": 2}},
            r"reference/ has weights in torch.bfloat16, this run has them in torch.float32; set learner.compute_dtype",
        ),
    ],
)
def test_weights_in_another_dtype_are_not_called_another_model(qwen3, tmp_path, mesh, sections, words):
    def keeper_in(dtype: str) -> Checkpointer:
        run, learner = {"dir": str(tmp_path), "name": "run"}, {**sections.get("learner", {}), "compute_dtype": dtype}
        config = make_config(qwen3, **{**sections, "run": run, "learner": learner, "rollout": {"dtype": dtype}})
        policy, optimizer = built(config, mesh)
        return Checkpointer(config, policy, optimizer, build_beside(config, policy).parts)

    saved(keeper_in("bfloat16"), 1)
    assert keeper_in("bfloat16").resume()
    with pytest.raises(CheckpointError, match=words):
        keeper_in("float32").resume()


def test_a_copy_of_other_weights_than_were_committed_is_refused(keeper):
    with pytest.raises(CheckpointError, match=r"step_1: the copy has parameter_digest .* was committed with 00"):
        saved(keeper, 1, digest="00")


def test_a_disk_that_hangs_ends_the_run_at_the_deadline(qwen3, tmp_path, mesh, monkeypatch):
    limits = {"run": {"dir": str(tmp_path), "name": "run"}, "checkpoint": {"deadline_s": 1.5}}
    config, gate = make_config(qwen3, **limits), threading.Event()
    monkeypatch.setattr(checkpointer, "dcp_save", lambda *_, **__: gate.wait(60))
    monkeypatch.setattr(checkpointer, "TURN_S", 0.1)
    turns: list[float] = []
    keeper = Checkpointer(config, *built(config, mesh), meanwhile=lambda: turns.append(time.monotonic()))
    keeper.start(1, replay={})
    assert keeper.settle(wait=False) is None and not turns
    with pytest.raises(CheckpointError, match=r"step_1: rank 0 has not written it within 1.5 s .checkpoint.deadline_s"):
        keeper.settle(wait=True)
    assert len(turns) >= 2, "replay hears of a rank that waits"
    gate.set()


@pytest.mark.parametrize("known", [True, False])
def test_a_disk_that_is_full_is_waited_for_and_has_the_checkpoint_then(keeper, config, monkeypatch, caplog, known):
    """Where its room is known beforehand nothing is written; a quota shows while it is."""
    monkeypatch.setattr(disk, "RETRY_S", 0.01)
    monkeypatch.setattr(checkpointer, "TURN_S", 0.02)
    if not known:
        monkeypatch.setattr(checkpointer, "check_room", lambda *_: None)
    parent = Path(config.run_dir) / "checkpoints"
    parent.mkdir(parents=True)
    with small_disk(parent, "size=16k"):
        turns: list[int] = []
        monkeypatch.setattr(keeper, "_meanwhile", lambda: turns.append(1) or (len(turns) == 4 and grow(parent)))
        keeper.start(1, replay={})
        until(lambda: "[full]" in caplog.text, "the disk is full")
        assert keeper.settle(wait=False) is None and keeper.is_writing
        folder = keeper.settle(wait=True).folder
        assert latest_complete(Path(config.run_dir))[0] == folder and len(turns) > 3
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and str(folder) in said[0] and "No space left on device" in said[0]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_folder_for_others_may_have_another_dtype_than_the_state(qwen3, tmp_path, mesh, asynchronous):
    sections = {"run": {"dir": str(tmp_path), "name": "run"}}
    config = make_config(qwen3, checkpoint={"asynchronous": asynchronous, "hf_dtype": "bfloat16"}, **sections)
    policy, optimizer = built(config, mesh)
    train_on(batch_of(random_step(1), 1), policy, optimizer, config)
    folder = saved(Checkpointer(config, policy, optimizer), 1)
    again, resumed = built(config, mesh)
    state = Checkpointer(config, again, resumed).load(folder)
    assert state == {"step": 1, "version": 1, "seed": 0, "replay": {}}
    assert again.parameter_digest() == policy.parameter_digest() and resumed.num_steps == 1
    exported = load_file(folder / "hf" / "model.safetensors")
    expected = dict(policy.named_full_tensors("bfloat16"))
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
    assert json.loads((folder / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


# ---- the memory plan ----------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_its_memory_plan_whatever_is_free(config, mesh, keeper, monkeypatch):
    """Otherwise half a GiB less at the next start would recompute other products, and make other digests."""
    room, shape = {"free": 80 * GIB}, {"model_type": "qwen3", **SIZES}
    monkeypatch.setattr(memory_plan, "least_free", lambda *_: room["free"])
    first = memory_plan.plan_memory(config, mesh, CPU)
    assert first.recompute == "none"
    folder = saved(keeper, 1, memory_plan=memory_plan.described(config, first))
    assert json.loads((folder / "state.json").read_text())["memory_plan"]["way"]["recompute"] == "none"
    room["free"] = first.total + 1  # too little for the reserve of a plan that is made anew
    assert memory_plan.choose(Setup.of(config, shape), memory_plan.usable(room["free"])).recompute != "none"
    plan = Path(config.run_dir) / memory_plan.FILE
    for lost in (False, True):
        plan.unlink() if lost else None
        assert memory_plan.plan_memory(config, mesh, CPU) == first and plan.exists()
    room["free"] = first.total - 1
    with pytest.raises(OutOfMemory, match=r"memory_plan\.json"):
        memory_plan.plan_memory(config, mesh, CPU)
    split = config.model_copy(update={"placement": config.placement.model_copy(update={"split": "1:2"})})
    other = [{"recompute": "full"}, {"offload_activations": True}, {"mesh": Mesh(tensor=2)}]
    learners = [config.learner.model_copy(update=change) for change in other]
    made_for = [split, *(config.model_copy(update={"learner": learner}) for learner in learners), config]
    assert len({json.dumps(memory_plan.facts_of(one)) for one in made_for}) == 5, "each is planned for itself"
    smaller = config.learner.model_copy(update={"max_tokens_per_microbatch": 128})
    changed = memory_plan.plan_memory(config.model_copy(update={"learner": smaller}), mesh, CPU)
    assert changed.recompute == memory_plan.choose(Setup.of(config, shape), 0).recompute, "planned anew"
