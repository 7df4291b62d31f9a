"""Distillation through whole steps: scores that came with the batch, and a teacher inside the learner's ranks."""

import dataclasses
import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from configs import Config, ConfigError
from learner.beside.beside import build_beside
from learner.beside.folders import check_folders
from learner.guards import Guards
from learner.policy.memory import Setup, choose
from learner.step import StepSums
from learner.trainer import Trainer, Update
from replay.messages import Batch
from slipstream.families.sizes import Sizes
from tests.learner.recorded import batch_of, random_step
from tests.learner.reference import Recorded
from tests.learner.tiny_models import built, make_config, save_model, with_tokenizer

STEP = random_step(3)
TEMPERATURE = 0.9
ALONE: dict[str, Any] = {"task": 0.0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy, and teachers that are wider: one with a head of its own, one without."""
    root = tmp_path_factory.mktemp("models")
    wide = {"hidden_size": 96, "intermediate_size": 128, "seed": 5}
    return {
        "policy": with_tokenizer(save_model(root / "policy")),
        "untied": with_tokenizer(save_model(root / "untied", "llama", tied=False, **wide)),
        "tied": with_tokenizer(save_model(root / "tied", **wide)),
    }


def inside(models: dict[str, Path], name: str, options: dict[str, Any], **sections: Any) -> Config:
    """A run with a teacher in the learner's ranks."""
    teachers = {"big": {"path": str(models[name]), "where": "learner"}}
    algorithm = {"distillation": {"full": options}}
    learner = {"lr": 5e-3, "warmup_steps": 0}
    return configured(
        models["policy"], **{"algorithm": algorithm, "teachers": teachers, "learner": learner, **sections}
    )


def configured(folder: Path, **sections: Any) -> Config:
    return make_config(folder, **{"rollout": {"temperature": TEMPERATURE}, **sections})


@functools.cache
def in_transformers(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def dense(folder: Path, t: Recorded) -> torch.Tensor:
    """[n, V] float64 logprobs of a model before each token in the loss, by transformers."""
    with torch.no_grad():
        logits = in_transformers(folder)(input_ids=torch.tensor([t.prompt_ids + t.response_ids])).logits[0]
    places = [len(t.prompt_ids) + i - 1 for i, kept in enumerate(t.loss_mask) if kept]
    return torch.log_softmax(logits[places] / TEMPERATURE, -1)


def trained(config: Config, mesh: DeviceMesh, batch: Batch, steps: int = 1) -> list[Update]:
    policy, optimizer = built(config, mesh)
    trainer = Trainer(config, policy, optimizer, beside=build_beside(config, policy))
    return [trainer.train_step(batch) for _ in range(steps)]


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_a_teacher_in_the_learner_teaches_its_whole_vocabulary(
    models: dict[str, Path], mesh: DeviceMesh, name: str
) -> None:
    """Its first divergence is that of transformers in float64, and steps make it smaller; group 0 counts as well."""
    first, *_, last = trained(inside(models, name, ALONE), mesh, batch_of(STEP, 3, num_microbatches=2), steps=6)
    pairs = [(dense(models["policy"], t), dense(models[name], t)) for t in STEP]
    wanted = torch.cat([(ours.exp() * (ours - theirs)).sum(1) for ours, theirs in pairs])
    assert first.values["training/loss_tokens"] == len(wanted)
    assert first.values["distill/kl"] == pytest.approx(wanted.mean().item(), rel=1e-4)
    assert first.values["distill/coef"] == 1.0 and first.values["distill/masked"] == 0.0
    best = [theirs.argmax(1) for _, theirs in pairs]
    sampled = [torch.tensor([i for i, kept in zip(t.response_ids, t.loss_mask, strict=True) if kept]) for t in STEP]
    agrees = torch.cat([one == other for one, other in zip(best, sampled, strict=True)]).float().mean()
    assert first.values["distill/agreement"] == pytest.approx(agrees.item())
    assert last.values["distill/kl"] < 0.5 * first.values["distill/kl"]


def scored(batch: Batch, folder: Path, k: int) -> Batch:
    """The batch as it is when a teacher has scored its answers; every second one by another name."""
    tops, ids, own = [], [], []
    for t in STEP:
        logprobs = dense(folder, t)
        places = [i for i, kept in enumerate(t.loss_mask) if kept]
        top, where = (np.zeros((len(t.loss_mask), k)) for _ in range(2))
        values, indices = logprobs.sort(1, descending=True)
        top[places], where[places] = values[:, :k], indices[:, :k]
        mine = np.zeros(len(t.loss_mask))
        mine[places] = [float(logprobs[row, t.response_ids[i]]) for row, i in enumerate(places)]
        tops.append(top), ids.append(where), own.append(mine)
    return dataclasses.replace(
        batch,
        teachers=["big@0" if i % 2 else "small@0" for i in range(len(STEP))],
        teacher_logprobs=np.concatenate(own).astype(np.float32),
        teacher_top=np.concatenate(tops).ravel().astype(np.float32),
        teacher_ids=np.concatenate(ids).ravel().astype(np.int32),
    )


def test_scores_of_all_tokens_are_as_good_as_the_teacher_itself(models: dict[str, Path], mesh: DeviceMesh) -> None:
    """The top k of the whole vocabulary, as it came over the wire, makes the same step as the model in the ranks."""
    folder, batch = models["tied"], batch_of(STEP, 3, num_microbatches=2)
    teachers = {"small": {"path": str(folder), "rows": {"n": 0}}, "big": {"path": str(folder)}}
    top = {"distillation": {"top_k": {"k": 64, **ALONE}}}
    config = configured(models["policy"], algorithm=top, teachers=teachers)
    steps = trained(config, mesh, scored(batch, folder, 64))
    steps += trained(inside(models, "tied", ALONE, learner={}), mesh, batch)
    for name in ("distill/kl", "distill/agreement", "actor/grad_norm"):
        assert steps[0].values[name] == pytest.approx(steps[1].values[name], rel=1e-4), name
    kl = [steps[0].values[f"distill/kl/{name}"] for name in ("small", "big")]
    assert min(kl) < steps[0].values["distill/kl"] < max(kl)


@pytest.mark.parametrize("name", ["sampled", "sampled_advantage"])
def test_sampled_tokens_teach_beside_the_task(models: dict[str, Path], mesh: DeviceMesh, name: str) -> None:
    teachers = {"small": {"path": str(models["tied"]), "rows": {"n": 0}}, "big": {"path": str(models["tied"])}}
    config = configured(models["policy"], algorithm={"distillation": name}, teachers=teachers)
    batch = dataclasses.replace(scored(batch_of(STEP, 3), models["tied"], 1), teacher_top=None, teacher_ids=None)
    (update,) = trained(config, mesh, batch)
    (plain,) = trained(configured(models["policy"]), mesh, batch_of(STEP, 3))
    assert update.values["training/loss_tokens"] > plain.values["training/loss_tokens"], "group 0 has equal rewards"
    assert "distill/agreement" not in update.values and update.values["distill/kl"] != 0
    assert update.values["actor/grad_norm"] != pytest.approx(plain.values["actor/grad_norm"], rel=0.01)


@pytest.mark.parametrize("task", [0.0, 1.0])
def test_equal_rewards_stop_a_run_that_learns_by_them_alone(
    models: dict[str, Path], mesh: DeviceMesh, task: float
) -> None:
    """Where teachers give a gradient, one of zero is wrong although rewards are equal."""
    flat = [dataclasses.replace(t, reward=1.0) for t in STEP]
    config = inside(models, "tied", {"task": task}, limits={"flat_reward_steps": 1})
    idle = StepSums(Counter(), 0)
    signals, plain = (
        Guards(one).memory.signals(idle, batch_of(flat, 3)) for one in (config, configured(models["policy"]))
    )
    assert signals["flat_reward_steps"] == task and signals.get("zero_gradient_steps") == 1.0
    assert plain["flat_reward_steps"] == 1.0 and plain.get("zero_gradient_steps") is None


def test_a_teacher_of_other_tokens_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    for changes, tokenizer, said in (
        ({"vocab_size": 66}, {}, "teachers.big.path: .* vocabulary of 66 tokens, model.path one of 64"),
        ({}, {"added_tokens": [{"content": "b", "id": 1}]}, "teachers.big.path: .* has tokenizer .*, model.path "),
    ):
        folder = with_tokenizer(save_model(tmp_path / said[-9:].strip(), **changes), **tokenizer)
        with pytest.raises(ConfigError, match=said):
            check_folders(inside({**models, "other": folder}, "other", {}))
    check_folders(inside(models, "untied", {}))


def test_a_teacher_is_in_the_budget_of_memory(models: dict[str, Path]) -> None:
    """Its layers are sharded over the ranks, its head is whole on each, and there is one row of hidden states."""
    model = json.loads((models["policy"] / "config.json").read_text())
    teacher = Sizes.of(json.loads((models["tied"] / "config.json").read_text()))
    found = [
        choose(Setup.of(config, model), None).items
        for config in (configured(models["policy"]), inside(models, "tied", {}))
    ]
    more = {name: value - found[0].get(name, 0) for name, value in found[1].items()}
    head = 4 * (teacher.embedding_parameters + 96 * 256)
    assert more["teacher weights"] == 4 * teacher.parameters and more["teacher's output head"] == head
