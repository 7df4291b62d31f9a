"""LoRA: gradients, merged export, peft's format, exact resume, and the way of adapters to an engine and back."""

import asyncio
import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from configs import Config
from learner.checkpoints.checkpointer import Checkpointer, CheckpointError
from learner.objective import Objective
from learner.optimizer import Optimizer
from learner.policy.model import Policy
from learner.ranks import Ranks
from learner.step import accumulate_gradients
from learner.weights import WeightPublisher
from rollout_server.engines import Sampling, build_engine
from rollout_server.follower import WeightFollower
from slipstream.families.sizes import Sizes
from tests.learner.recorded import batch_of, random_step, rows_of, train_on
from tests.learner.tiny_models import CPU, built, logprobs, make_config, save_model
from tests.learner.tiny_models import saved as saved_folder
from tests.support.waiting import eventually
from weight_bus.adapters import PREFIX, SCALE, names_of

LORA = {"rank": 2, "alpha": 6.0}
SEQUENCES = [[3, 9, 17, 20, 41], [5, 60, 2]]
PROMPT = [3, 9, 17]


def configured(folder: Path, run: Path, lora: dict[str, Any] = LORA, **learner: Any) -> Config:
    return make_config(
        folder,
        run={"dir": str(run), "name": "run"},
        learner={"lora": lora, "lr": 5e-3, "adam_epsilon": 1e-6, **learner},
        weight_bus={"heartbeat_s": 0.4, "deadline_s": 20, "collective_timeout_s": 10},
    )


def trained(config: Config, mesh: DeviceMesh, steps: int = 2) -> tuple[Policy, Optimizer]:
    policy, optimizer = built(config, mesh)
    go_on(policy, optimizer, config, range(1, steps + 1))
    return policy, optimizer


def go_on(policy: Policy, optimizer: Optimizer, config: Config, steps: Sequence[int] | range) -> str:
    for step in steps:
        _, reason = train_on(batch_of(random_step(step), step, num_microbatches=2), policy, optimizer, config)
        assert not reason
    return policy.parameter_digest()


def hf_logprobs(model: Any, sequence: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([sequence])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]


def gradients_of(policy: Policy, config: Config) -> dict[str, torch.Tensor]:
    rows, tokens = rows_of(batch_of(random_step(3), 3), config)
    accumulate_gradients(policy, rows, Objective(config.algorithm), temperature=1.0, global_tokens=tokens)
    return dict(zip((name for name, _ in policy.named_parameters()), policy.local_gradients(), strict=True))


@pytest.fixture(scope="module")
def saved(qwen3: Path, mesh: DeviceMesh, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A policy after two steps, its configuration, optimizer and checkpoint."""
    config = configured(qwen3, tmp_path_factory.mktemp("saved"))
    policy, optimizer = trained(config, mesh)
    keeper = Checkpointer(config, policy, optimizer)
    return config, policy, optimizer, saved_folder(keeper, 2, replay={"cursor": 1})


def test_gradients_are_those_of_the_whole_weights_by_the_chain_rule(saved: Any, mesh: DeviceMesh) -> None:
    """With G of W + s B A: s G Aᵀ for B and s Bᵀ G for A."""
    config, policy, _, step = saved
    whole_config = make_config(step / "hf")
    whole = gradients_of(built(whole_config, mesh)[0], whole_config)
    found, held = gradients_of(policy, config), dict(policy.named_full_tensors("float32"))
    scale = LORA["alpha"] / LORA["rank"]
    checked = 0
    for weight, gradient in whole.items():
        a, b = names_of(weight)
        if a in held:
            for name, expected in ((b, gradient @ held[a].T), (a, held[b].T @ gradient)):
                difference = float((found[name] - scale * expected).abs().max())
                assert difference <= 1e-5 * max(1.0, float(expected.abs().max())), name
                checked += 1
    assert checked == len(found) == 2 * 7 * 2
    assert all(float(gradient.abs().max()) > 1e-6 for gradient in found.values())


def test_the_merged_export_answers_the_same_and_the_frozen_weights_stay(saved: Any, qwen3: Path) -> None:
    _, policy, _, step = saved
    model = AutoModelForCausalLM.from_pretrained(step / "hf", dtype=torch.float32)
    for sequence, mine in zip(SEQUENCES, logprobs(policy, SEQUENCES), strict=True):
        assert float((hf_logprobs(model, sequence) - mine).abs().max()) <= 1e-5
    start, merged = load_file(qwen3 / "model.safetensors"), load_file(step / "hf" / "model.safetensors")
    assert {name for name in merged if not torch.equal(merged[name], start[name])} == {
        name for name in merged if names_of(name)[0] in dict(policy.named_parameters())
    }
    assert (step / "hf" / "config.json").is_file() and merged.keys() <= start.keys()


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_peft_reads_the_adapter_and_answers_the_same(saved: Any, qwen3: Path) -> None:
    from peft import PeftModel

    _, policy, _, step = saved
    base = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, step / "adapter")
    for sequence, mine in zip(SEQUENCES, logprobs(policy, SEQUENCES), strict=True):
        assert float((hf_logprobs(model, sequence) - mine).abs().max()) <= 1e-5


def test_a_resumed_run_repeats_the_digests_from_a_checkpoint_of_adapters(saved: Any, mesh: DeviceMesh) -> None:
    config, policy, _, step = saved
    fresh, fresh_optimizer = built(config, mesh)
    assert Checkpointer(config, fresh, fresh_optimizer).resume()["replay"] == {"cursor": 1}
    assert fresh.parameter_digest() == json.loads((step / "state.json").read_text())["parameter_digest"]
    after = go_on(fresh, fresh_optimizer, config, range(3, 5))
    again, again_optimizer = trained(config, mesh)
    assert after == go_on(again, again_optimizer, config, range(3, 5))
    written = sum(file.stat().st_size for file in (step / "dcp").iterdir())
    adapters = sum(shard.numel * 4 for shard in policy.shards())
    # DCP adds about a KB of pickle to each of the tensors
    assert written < 3 * adapters + 3 * 2048 * len(policy.shards()), "adapters and their moments, and no weight"


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 0}, "was trained with learner.lora and this run is without"),
        ({"rank": 2, "alpha": 7.0}, "'alpha': 6.0.* this run has .*'alpha': 7.0"),
        (LORA, "has adapters of other frozen weights: digest .*; set model.path to the folder that they were trained"),
    ],
)
def test_adapters_of_another_model_or_scale_are_refused(
    lora: dict[str, Any], words: str, saved: Any, mesh: DeviceMesh, tmp_path: Path
) -> None:
    config, _, _, step = saved
    path = save_model(tmp_path / "other", seed=5) if lora is LORA else Path(config.model.path)
    other = configured(path, tmp_path, lora)
    with pytest.raises(CheckpointError, match=words):
        Checkpointer(other, *built(other, mesh)).load(step)


def test_a_target_alone_is_trained_and_a_bf16_base_is_held_in_bf16(
    qwen3: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    lora = {"rank": 3, "targets": ["v_proj", "q_proj"]}
    config = make_config(qwen3, rollout={"dtype": "bfloat16"}, learner={"lora": lora, "compute_dtype": "bfloat16"})
    policy, optimizer = built(config, mesh)
    assert {shard.local.dtype for shard in policy.frozen()} == {torch.bfloat16}
    assert {(shard.name.split(".")[-3], shard.local.dtype) for shard in policy.shards()} == {
        ("q_proj", torch.float32),
        ("v_proj", torch.float32),
    }
    assert {master.dtype for master in optimizer.masters} == {torch.float32}
    before = dict(policy.named_full_tensors("float32"))
    train_on(batch_of(random_step(1), 1), policy, optimizer, config)
    after = dict(policy.named_full_tensors("float32"))
    assert all(not torch.equal(after[name], before[name]) for name in after if "lora_B" in name)
    described = policy.model.transformer.config.to_dict()
    assert Sizes.of(described).adapter_parameters(config.learner.lora) == sum(s.numel for s in policy.shards())


# ---- to an engine and back ----------------------------------------------------------------------------------


class Chain:
    """A policy, its publisher, and followers with engines, in one process."""

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        self.config = config
        self.policy, self.optimizer = built(config, mesh)
        self.bus = WeightPublisher(config, self.policy, Ranks(0, 1, CPU, mesh), run_id="lora", incarnation=1)
        self.ends: list[tuple[Any, WeightFollower]] = []
        self.dark: list[str] = []

    async def join(self) -> Any:
        engine, name = build_engine(self.config), f"server-{len(self.ends)}"

        async def live(version: int, incarnation: int) -> None:
            pass

        async def dark(reason: str) -> None:
            self.dark.append(reason)

        follower = WeightFollower(self.config, engine, name, on_live=live, on_quarantine=dark)
        follower.follow(self.bus.address, "lora")
        self.ends.append((engine, follower))
        await eventually(lambda: name in self.bus._publisher.members(), "it joins")
        return engine

    async def publish(self, version: int) -> tuple[dict[str, int], Any]:
        digests = self.bus.digests()
        self.bus.start(version, digests, evaluate=False)
        report = await asyncio.to_thread(self.bus.wait, last=True)
        assert sorted(report.served) == sorted(f"server-{i}" for i in range(len(self.ends))), report
        return digests, report

    async def check(self, engine: Any, version: int, digests: dict[str, int]) -> float:
        """Largest difference of logprobs, sampled and trained; the engine holds what the learner has."""
        assert await engine.digest() == digests
        sampled = await engine.generate(PROMPT, Sampling(max_new_tokens=12, seed=version), 4, request_id=f"r{version}")
        assert {v for answer in sampled for v in answer.versions} == {version}
        mine = logprobs(self.policy, [PROMPT + answer.token_ids.tolist() for answer in sampled])
        pairs = zip(sampled, mine, strict=True)
        return max(float((torch.from_numpy(a.logprobs) - m[len(PROMPT) - 1 :]).abs().max()) for a, m in pairs)

    async def close(self) -> None:
        for engine, follower in self.ends:
            await asyncio.to_thread(follower.stop)
            await engine.close()
        self.bus.close()


@pytest.fixture
def chain(mesh: DeviceMesh, tmp_path: Path) -> Chain:
    """Of a model with an output head of its own."""
    return Chain(configured(save_model(tmp_path / "model", "llama", tied=False), tmp_path), mesh)


def test_adapters_alone_travel_and_engines_answer_as_the_learner_counts(chain: Chain) -> None:
    """Eight versions of a policy that learns; the second engine joins late, after the last update."""

    async def run() -> None:
        engine, losses, worst = await chain.join(), [], 0.0
        try:
            for version in range(8):
                digests, report = await chain.publish(version)
                worst = max(worst, await chain.check(engine, version, digests))
                batch = batch_of(random_step(1), version + 1)
                fresh = dataclasses.replace(batch, versions=batch.versions * 0 + version)
                sums, _ = train_on(fresh, chain.policy, chain.optimizer, chain.config)
                losses.append(sums.loss)
            digests, report = await chain.publish(8)
            late = await chain.join()
            await eventually(lambda: late.version == 8, "a late engine is filled")
            worst = max(worst, await chain.check(late, 8, digests))
            held = await late.digest()
        finally:
            await chain.close()
        assert worst <= 1e-5 and losses[-1] < losses[0] - 0.1 and chain.dark == []
        adapters = [name for name in digests if name.startswith(PREFIX)]
        assert held[SCALE] == digests[SCALE] and len(digests) == len(adapters) + len(chain.policy.frozen()) + 1
        full = 4 * sum(shard.numel for shard in chain.policy.frozen())
        assert 4 * sum(shard.numel for shard in chain.policy.shards()) <= report.num_bytes <= 0.15 * full
        print(
            f"{report.num_bytes} bytes on the bus of {full}: {report.num_bytes / full:.3f};"
            f" logprobs differ by {worst:.2g}; loss {losses[0]:.3f} to {losses[-1]:.3f}"
        )

    asyncio.run(run())
