"""Reference model and critic, against plain arithmetic in float64, and what a step makes of them."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from configs import Config, ConfigError
from learner.beside.advantages import judge
from learner.beside.beside import build_beside
from learner.beside.critic import HEAD, Critic, ValueLoss
from learner.beside.folders import check_folders
from learner.beside.reference import AdapterReference, Reference
from learner.guards import Guards
from learner.policy.memory import GIB, Setup, choose
from learner.rows import Row, lay_out
from learner.trainer import CRITIC_WARMUP, Trainer
from slipstream.families.sizes import Sizes
from tests.learner import algorithm_reference as oracle
from tests.learner.recorded import batch_of, random_step, rows_of
from tests.learner.reference import Recorded
from tests.learner.tiny_models import built, make_config, row_of, save_model

STEP = random_step(3)
GAE: dict[str, Any] = {"advantage": "gae", "kl": "k1", "kl_in": "reward", "kl_coef": 0.1}
CRITIC = {"lr": 2e-3, "lam": 0.9, "gamma": 0.97}
TEMPERATURE = 0.9


def configured(folder: Path, **sections: Any) -> Config:
    rollout = {"temperature": TEMPERATURE}
    learner = {"adam_epsilon": 1e-6, "warmup_steps": 0}
    return make_config(folder, **{"rollout": rollout, "learner": learner, **sections})


@functools.cache
def in_transformers(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def in_float64(folder: Path, t: Recorded, head: torch.Tensor | None) -> tuple[list[float], list[float]]:
    """Logprobs of the tokens in the loss by transformers, and values by a head."""
    model = in_transformers(folder)
    ids = torch.tensor([t.prompt_ids + t.response_ids])
    with torch.no_grad():
        out = model(input_ids=ids, output_hidden_states=True)
    logprobs = torch.log_softmax(out.logits[0] / TEMPERATURE, dim=-1)
    places = [len(t.prompt_ids) + i - 1 for i, kept in enumerate(t.loss_mask) if kept]
    values = out.hidden_states[-1][0] @ head.double()[0] if head is not None else torch.zeros(ids.shape[1])
    return [float(logprobs[p, ids[0, p + 1]]) for p in places], [float(values[p]) for p in places]


def kept(t: Recorded) -> list[float]:
    return [value for value, mask in zip(t.logprobs, t.loss_mask, strict=True) if mask]


def by_trajectory(rows: list[Row], name: str) -> dict[int, list[float]]:
    """A [n] field of rows, by trajectory."""
    found = {}
    for row in rows:
        parts = getattr(row, name).split(row.lengths.tolist())
        found |= {int(i): part.tolist() for i, part in zip(row.trajectories, parts, strict=True)}
    return found


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_a_kl_penalty_in_the_reward_of_groups(qwen3: Path, mesh: DeviceMesh, kind: str) -> None:
    config = configured(qwen3, algorithm={"advantage": "dr_grpo", "kl": kind, "kl_in": "reward", "kl_coef": 0.1})
    policy, optimizer = built(config, mesh)
    update = Trainer(config, policy, optimizer, beside=build_beside(config, policy)).train_step(batch_of(STEP, 3))
    kl = []
    for t in STEP:
        reference, _ = in_float64(qwen3, t, None)
        kl.append(sum(min(oracle.kl(kind, now, old), 10.0) for now, old in zip(kept(t), reference, strict=True)))
    rewards = [t.reward - 0.1 * one for t, one in zip(STEP, kl, strict=True)]
    tokens = [sum(t.loss_mask) for t in STEP]
    wanted = oracle.advantage("dr_grpo", rewards, [t.group for t in STEP], tokens)
    assert update.advantages.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert all(wanted[i] for i, t in enumerate(STEP) if t.group == 0), "equal rewards, and not equally far"
    assert update.values["training/loss_tokens"] == sum(tokens)
    assert update.values["actor/reward_kl_penalty"] == pytest.approx(sum(kl) / sum(tokens), rel=1e-4)
    assert update.values["critic/rewards/mean"] == pytest.approx(np.mean(rewards), rel=1e-4)


@pytest.mark.parametrize("whiten", [True, False])
def test_gae_over_the_tokens_of_a_batch(qwen3: Path, mesh: DeviceMesh, whiten: bool) -> None:
    config = configured(qwen3, algorithm=GAE, critic=CRITIC | {"whiten": whiten})
    policy, _ = built(config, mesh)
    beside = build_beside(config, policy)
    assert isinstance(beside.critic, Critic)
    (head,) = (shard.local for shard in beside.critic.model.shards() if shard.name == HEAD)
    torch.manual_seed(0)
    head.normal_(std=0.1)
    batch = batch_of(STEP, 3, num_microbatches=2)
    rows, tokens = rows_of(batch, config)
    judged = beside.judge(batch, rows, np.zeros(len(STEP), np.float32), global_tokens=tokens)
    found, returned = by_trajectory(judged.rows, "advantages"), by_trajectory(judged.rows, "returns")
    every, returns, values = {}, {}, {}
    for i, t in enumerate(STEP):
        reference, values[i] = in_float64(qwen3, t, head)
        rewards = [-0.1 * min(oracle.kl("k1", now, old), 10.0) for now, old in zip(kept(t), reference, strict=True)]
        rewards[-1] += t.reward
        every[i] = oracle.gae(rewards, values[i], [len(rewards)], 0.97, 0.9)
        returns[i] = [a + v for a, v in zip(every[i], values[i], strict=True)]
    flat = [value for part in every.values() for value in part]
    mean, scale = (float(np.mean(flat)), 1 / np.sqrt(np.var(flat, ddof=1) + 1e-8)) if whiten else (0.0, 1.0)
    assert found.keys() == every.keys() and len({len(part) for part in every.values()}) > 3
    for i, part in every.items():
        assert found[i] == pytest.approx([(value - mean) * scale for value in part], rel=1e-4, abs=1e-5)
        assert returned[i] == pytest.approx(returns[i], rel=1e-4, abs=1e-5)
    v, r = np.concatenate(list(values.values())), np.concatenate(list(returns.values()))
    explained = 1 - np.var(r - v, ddof=1) / (np.var(r, ddof=1) + 1e-5)
    assert judged.values["critic/vf_explained_var"] == pytest.approx(explained, rel=1e-4)
    assert judged.values["critic/values/mean"] == pytest.approx(v.mean(), rel=1e-4)


def test_a_value_loss_and_its_gradient() -> None:
    now, old, returns = [0.2, 1.4, -0.9, 0.1], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, -2.0]
    row = dataclasses.replace(row_of([[1] * 5]), values=torch.tensor(old), returns=torch.tensor(returns))
    moving = torch.tensor(now, requires_grad=True)
    loss, measured = ValueLoss(0.5, 8)(row, moving)
    loss.backward()
    wanted = [max((v - r) ** 2, (min(max(v, -0.5), 0.5) - r) ** 2) / 2 for v, r in zip(now, returns, strict=True)]
    assert loss.item() == pytest.approx(sum(wanted) / 8)
    assert moving.grad is not None and moving.grad.tolist() == pytest.approx([-0.8 / 8, 0.0, -1.9 / 8, 2.1 / 8])
    assert (measured["clipped"].item(), measured["tokens"].item()) == (1, 4)


def test_the_critic_learns_and_in_its_warm_up_alone(qwen3: Path, mesh: DeviceMesh) -> None:
    critic = CRITIC | {"warmup_steps": 4, "updates": 3, "clip": 5.0}
    config = configured(qwen3, algorithm={"advantage": "gae"}, critic=critic)
    policy, optimizer = built(config, mesh)
    beside = build_beside(config, policy)
    guards, before = Guards(config), policy.parameter_digest()
    trainer = Trainer(config, policy, optimizer, beside=beside, guards=guards)
    seen = [trainer.train_step(batch_of(STEP, step, num_microbatches=2)) for step in range(3, 6)]
    assert [update.reason for update in seen] == [CRITIC_WARMUP, CRITIC_WARMUP, ""]
    assert seen[0].values["critic/values/mean"] == 0.0, "a head of zeros"
    explained = [update.values["critic/vf_explained_var"] for update in seen]
    assert explained[0] < 0.05 < 0.3 < explained[2], explained
    assert seen[2].values["critic/vf_loss"] < seen[0].values["critic/vf_loss"]
    assert policy.parameter_digest() != before and optimizer.num_steps == 1, "at step 5 alone"
    assert "flat_reward_steps/0 above 0.5" not in guards.broken
    trainer.train_step(batch_of([dataclasses.replace(t, reward=1.0) for t in STEP], 6))
    assert "flat_reward_steps/0 above 0.5" in guards.broken, "equal rewards teach a critic's policy nothing either"


def test_the_policys_warm_up_begins_after_that_of_its_critic(qwen3: Path, mesh: DeviceMesh) -> None:
    learner = {"warmup_steps": 2, "lr": 1e-4, "total_steps": 6, "schedule": "linear"}
    config = configured(qwen3, algorithm={"advantage": "gae"}, critic=CRITIC | {"warmup_steps": 2}, learner=learner)
    policy, optimizer = built(config, mesh)
    trainer = Trainer(config, policy, optimizer, beside=build_beside(config, policy))
    seen = [trainer.train_step(batch_of(STEP, step)).values for step in range(1, 7)]
    assert [row["actor/lr"] for row in seen] == pytest.approx([0, 0, 5e-5, 1e-4, 5.5e-5, 1e-5])
    assert [row["critic/lr"] for row in seen[:2]] == pytest.approx([1e-3, 2e-3])


def test_what_a_guard_skips_teaches_the_critic_nothing_either(qwen3: Path, mesh: DeviceMesh) -> None:
    limits = {"same_length": "skip above 0"}
    config = configured(qwen3, algorithm={"advantage": "gae"}, critic=CRITIC, limits=limits)
    policy, optimizer = built(config, mesh)
    beside = build_beside(config, policy)
    before = beside.digests()
    trainer = Trainer(config, policy, optimizer, beside=beside, guards=Guards(config))
    update = trainer.train_step(batch_of(STEP, 3))
    assert update.reason == "guard_same_length" and beside.digests() == before
    assert "critic/vf_loss" not in update.values and "critic/values/mean" in update.values


def test_a_reference_starts_as_the_policy_and_is_refreshed(qwen3: Path, mesh: DeviceMesh) -> None:
    config = configured(qwen3, algorithm={"kl": "k3", "reference_refresh_steps": 3})
    policy, optimizer = built(config, mesh)
    trainer = Trainer(config, policy, optimizer, beside=build_beside(config, policy))
    kl = [trainer.train_step(batch_of(STEP, step)).values["actor/kl_loss"] for step in range(1, 5)]
    assert kl[0] == kl[3] == 0.0 and min(kl[1:3]) > 0.0, "the same weights give the same bits"


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_adapters_off_are_the_reference_model(mesh: DeviceMesh, tmp_path: Path, family: str) -> None:
    """Of a policy that has learnt, which comes out unharmed; a refresh takes its adapters, by either kind."""
    folder = save_model(tmp_path, family, tied=family == "qwen3")
    kl = {"kl": "k3", "kl_coef": 0.2, "reference_refresh_steps": 3}
    sections: dict[str, Any] = {"learner": {"lora": {"rank": 3}, "lr": 5e-2, "warmup_steps": 0}}
    config = configured(folder, algorithm=kl, **sections)
    policy, optimizer = built(config, mesh)
    beside = build_beside(config, policy)
    own, whole = beside.reference, Reference(configured(folder, algorithm=kl | {"reference_path": str(folder)}), policy)
    trainer = Trainer(config, policy, optimizer, beside=beside)
    losses = [trainer.train_step(batch_of(STEP, step)).values["actor/kl_loss"] for step in (1, 2)]
    assert isinstance(own, AdapterReference) and losses[0] == 0.0 < losses[1]
    rows, digest = rows_of(batch_of(STEP, 3, num_microbatches=2), config)[0], policy.parameter_digest()

    def furthest(others: list[torch.Tensor]) -> list[float]:
        found = own.logprobs(rows)
        return [float((one - other).abs().max()) for one, other in zip(found, others, strict=True)]

    off = max(furthest(whole.logprobs(rows)))
    print(f"{family}: adapters off differ from the reference model by {off:.2g}")
    assert off <= 1e-6
    now = policy.logprobs(rows, TEMPERATURE)
    assert min(furthest(now)) > 1e-3 and policy.parameter_digest() == digest
    for reference in (own, whole):
        reference.refresh(policy)
    assert max(furthest(now)) == 0.0 and max(furthest(whole.logprobs(rows))) <= 1e-5


def test_a_critic_of_adapters_learns_with_its_weights_frozen(qwen3: Path, mesh: DeviceMesh) -> None:
    critic = CRITIC | {"updates": 3, "clip": 5.0, "lr": 5e-3}
    learner = {"lora": {"rank": 3}, "adam_epsilon": 1e-6, "warmup_steps": 0}
    config = configured(qwen3, algorithm={"advantage": "gae"}, critic=critic, learner=learner)
    policy, optimizer = built(config, mesh)
    beside = build_beside(config, policy)
    assert beside.critic is not None
    model = beside.critic.model
    start = load_file(qwen3 / "model.safetensors")
    trainer = Trainer(config, policy, optimizer, beside=beside)
    explained = [trainer.train_step(batch_of(STEP, 3)).values["critic/vf_explained_var"] for _ in range(3)]
    assert explained[0] < 0.05 < 0.3 < explained[2], explained
    assert all(torch.equal(shard.local, start[shard.name]) for shard in model.frozen())
    trained = {shard.name: float(shard.local.abs().max()) for shard in model.shards()}
    assert len(trained) == 2 * 7 * 2 + 1 and min(trained.values()) > 0, "every adapter, and the head"


def test_a_critic_takes_the_head_of_its_folder(qwen3: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "value", tied=False, seed=1)
    tensors = load_file(folder / "model.safetensors")
    head = torch.randn(1, 64)
    save_file(tensors | {"score.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    config = configured(qwen3, algorithm={"advantage": "gae"}, critic={"path": str(folder)})
    loaded = dict(Critic(config, built(config, mesh)[0]).model.named_full_tensors("float32"))
    assert torch.equal(loaded[HEAD], head) and torch.equal(loaded["model.norm.weight"], tensors["model.norm.weight"])


def test_folders_that_do_not_suit_the_policy_are_refused(qwen3: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", vocab_size=66, intermediate_size=128)
    thin = save_model(tmp_path / "thin", intermediate_size=128)
    short = save_model(tmp_path / "short", max_position_embeddings=7)
    kl: dict[str, Any] = {"kl": "k3"}
    for sections, said in (
        ({"algorithm": kl | {"reference_path": str(tmp_path / "none")}}, "algorithm.reference_path: .*is no folder"),
        ({"algorithm": kl | {"reference_path": str(other)}}, "vocabulary of 66 tokens, model.path one of 64"),
        ({"algorithm": {"advantage": "gae"}, "critic": {"path": str(other)}}, "critic.path: .*vocabulary of 66"),
        ({"algorithm": kl | {"reference_path": str(short)}}, "reference_path: .*embeddings 7, and a trajectory"),
        (
            {"algorithm": kl | {"reference_path": str(thin), "reference_refresh_steps": 1}},
            "reference_refresh_steps: 1, but .*intermediate_size 128 and model.path 192",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            check_folders(configured(qwen3, **sections))
    check_folders(configured(qwen3, algorithm=kl | {"reference_path": str(thin)}))


def test_a_reference_whose_ids_are_other_tokens_is_refused(tmp_path: Path) -> None:
    folders = [save_model(tmp_path / name) for name in ("policy", "reference")]
    for folder, tokens in zip(folders, ("ab", "abc"), strict=True):  # tokens that only one has are no matter
        vocabulary = {token: number for number, token in enumerate(tokens)}
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    config = configured(folders[0], algorithm={"kl": "k3", "reference_path": str(folders[1])})
    check_folders(config)
    (folders[1] / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 2, "c": 1}}}))
    with pytest.raises(ConfigError, match=r"reference_path: .* the id 2 for the token 'b', model\.path 1: ids mean"):
        check_folders(config)


def test_what_lies_on_the_policys_ranks_is_in_its_budget() -> None:
    model: dict[str, Any] = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 8, "head_dim": 64}
    model |= {"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072}
    model |= {"vocab_size": 32_000, "tie_word_embeddings": True}
    parameters = Sizes.of(model).parameters
    both: dict[str, Any] = {"algorithm": {"advantage": "gae", "kl": "k3"}}
    totals = [
        choose(Setup.of(make_config(Path("unused"), **sections), model), 80 * GIB).total for sections in ({}, both)
    ]
    assert totals[1] - totals[0] == pytest.approx((4 + 12) * parameters, rel=1e-6)


def test_judging_needs_no_token_of_this_rank(qwen3: Path, mesh: DeviceMesh) -> None:
    config = configured(qwen3, algorithm={"advantage": "gae"})
    policy, _ = built(config, mesh)
    batch, nothing = batch_of(STEP, 3), np.zeros(len(STEP), np.float32)
    rows = [dataclasses.replace(row, values=torch.zeros(0)) for row in lay_out(batch, nothing, nothing)]
    judged = judge(batch, rows, lambda inputs: inputs.values, config, policy)
    assert len(judged.rows[0].advantages) == 0 and not judged.advantages.any()
