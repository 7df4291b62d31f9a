"""DPO: loss and gradient against float64 written out, batches against TRL, the reference once a row."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh

from configs import Config, ConfigError
from configs.variants import Choice
from examples.sort6 import save_tokenizer
from learner.beside.beside import build_beside
from learner.beside.pairs import PairReference
from learner.held_out import HeldOut
from learner.losses.taught import TaughtInputs, build_taught
from learner.rows import BatchError, Row
from learner.trainer import Trainer, Update
from replay.data.dataset import Rows
from replay.data.encoding import RowEncoder
from replay.messages import Batch
from tests.learner.recorded import batch_of, random_step
from tests.learner.reference import Recorded
from tests.learner.tiny_models import built, logprobs, make_config, row_of, save_model

LENGTHS = [3, 1, 4, 7, 2, 2]
NUM_PAIRS = len(LENGTHS) // 2
PAIRS = [
    ("492013=", "012349", "492013"),
    ("312=", "123", "1"),
    ("51+7=", "58", "57 or 58"),
    ("0=", "0", "00000"),
]
"""Prompt, chosen and rejected answer, in the characters of examples.sort6."""
TRL = {
    "dpo, beta 0.1": (0.6744323968887329, 1.5352572202682495),
    "dpo, beta 0.5": (0.6363776922225952, 7.436943054199219),
    "sft": (4.36100435256958, 6.637202262878418),
}
"""Loss and gradient norm of one batch of PAIRS by TRL 1.16.0 with torch 2.13.0 on a CPU: what `by_trl` gives, whose
test runs with --all. The model is save_model's of seed 0, the reference that of seed 1, the tokenizer sort6's."""


def pairs() -> tuple[Row, torch.Tensor]:
    """A row of pairs, each of which counts alike, and logprobs of the policy; float64."""
    random = torch.Generator().manual_seed(0)
    weights = [torch.full((length,), 1 / (2 * NUM_PAIRS * length), dtype=torch.float64) for length in LENGTHS]
    sums = -5 * torch.rand(len(LENGTHS), dtype=torch.float64, generator=random)
    row = row_of([[1] * (length + 1) for length in LENGTHS])
    row = dataclasses.replace(row, weights=torch.cat(weights), reference_sums=sums)
    return row, -torch.rand(sum(LENGTHS), dtype=torch.float64, generator=random)


def written_out(logprobs: list[float], reference: list[float], beta: float, smoothing: float) -> float:
    """The mean over pairs."""
    ends = np.cumsum([0, *LENGTHS]).tolist()
    sums = [math.fsum(logprobs[start:end]) for start, end in itertools.pairwise(ends)]
    total = 0.0
    for chosen in range(0, len(sums), 2):
        ours, theirs = (beta * (sums[i] - reference[i]) for i in (chosen, chosen + 1))
        right = 1 / (1 + math.exp(theirs - ours))
        total -= (1 - smoothing) * math.log(right) + smoothing * math.log(1 - right)
    return total / NUM_PAIRS


@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (0.7, 0.2)])
def test_loss_and_gradient_are_those_written_out(beta: float, smoothing: float) -> None:
    row, given = pairs()
    loss_of = build_taught(Choice("dpo", {"beta": beta, "label_smoothing": smoothing}))
    loss, measured = loss_of(TaughtInputs(row=row, logprobs=given.requires_grad_()))
    loss.backward()
    assert loss.dtype == torch.float64 and given.grad is not None and row.reference_sums is not None
    values, arguments = given.tolist(), (row.reference_sums.tolist(), beta, smoothing)
    assert loss.item() == pytest.approx(written_out(values, *arguments), abs=1e-12)
    for i, found in enumerate(given.grad.tolist()):
        up, down = ([*values[:i], values[i] + step, *values[i + 1 :]] for step in (1e-5, -1e-5))
        assert found == pytest.approx((written_out(up, *arguments) - written_out(down, *arguments)) / 2e-5, abs=1e-9)
    assert measured["dpo/loss"] == loss and 0 < measured["dpo/accuracy"] < 1
    assert measured["dpo/margin"] == pytest.approx(measured["dpo/chosen"] - measured["dpo/rejected"])


def test_a_pair_that_is_sure_and_wrong_has_a_finite_loss_and_a_row_without_pairs_none() -> None:
    row, given = pairs()
    wrong = dataclasses.replace(row, reference_sums=torch.tensor([2e4, 0, 0, 0, 0, 0], dtype=torch.float64))
    loss, _ = build_taught(Choice("dpo"))(TaughtInputs(row=wrong, logprobs=given))
    assert loss.item() == pytest.approx(2e3 / NUM_PAIRS, rel=1e-2)
    none = torch.zeros(0, requires_grad=True)
    empty = dataclasses.replace(row, weights=none.detach(), lengths=row.lengths[:0], reference_sums=none.detach())
    loss, measured = build_taught(Choice("dpo"))(TaughtInputs(row=empty, logprobs=none))
    loss.backward()
    assert loss == 0 and measured["dpo/accuracy"] == 0


# ---- steps ------------------------------------------------------------------------------------------------


def config_of(folder: Path, objective: Any, rows: int, reference: Path | None = None) -> Config:
    algorithm = {} if reference is None else {"reference_path": str(reference)}
    learner, rollout = {"objective": objective}, {"groups_per_step": rows, "temperature": 0.5}
    return make_config(folder, learner=learner, rollout=rollout, algorithm=algorithm)


def trained_on(batch: Batch, config: Config, mesh: DeviceMesh) -> Update:
    policy, optimizer = built(config, mesh)
    return Trainer(config, policy, optimizer, beside=build_beside(config, policy)).train_step(batch)


def encoded(config: Config, folder: Path) -> Batch:
    """PAIRS as replay reads and encodes them, in a batch."""
    answers = config.learner.facts.answers
    names = ("prompt", "chosen", "rejected") if answers == 2 else ("prompt", "completion")
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(dict(zip(names, pair, strict=False))) + "\n" for pair in PAIRS))
    rows, encoder = Rows(file, answers=answers), RowEncoder(config, answers)
    made = [(group, one) for group, row in enumerate(rows) for one in encoder.encode(row)]
    return batch_of(
        [
            Recorded(
                prompt_ids=one.prompt_ids.tolist(),
                response_ids=one.token_ids.tolist(),
                loss_mask=one.loss_mask.tolist(),
                logprobs=[0.0] * len(one.token_ids),
                versions=[0] * len(one.token_ids),
                reward=0.0,
                group=group,
            )
            for group, one in made
        ],
        1,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of the policy and of the reference."""
    folders = [save_model(tmp_path_factory.mktemp("model"), seed=seed) for seed in (0, 1)]
    for folder in folders:
        save_tokenizer(folder)
    return folders[0], folders[1]


@pytest.mark.parametrize(
    ("case", "objective"),
    [("sft", "sft"), ("dpo, beta 0.1", "dpo"), ("dpo, beta 0.5", {"dpo": {"beta": 0.5}})],
)
def test_a_batch_has_the_loss_and_gradient_norm_of_trl(
    models: tuple[Path, Path], mesh: DeviceMesh, tmp_path: Path, case: str, objective: Any
) -> None:
    policy, reference = models
    name = case.partition(",")[0]
    config = config_of(policy, objective, len(PAIRS), None if name == "sft" else reference)
    values = trained_on(encoded(config, tmp_path), config, mesh).values
    assert (values[f"{name}/loss"], values["actor/grad_norm"]) == pytest.approx(TRL[case], abs=1e-4)


@pytest.mark.parametrize(("case", "objective"), [("sft", "sft"), ("dpo, beta 0.1", "dpo")])
def test_rows_that_are_held_out_have_their_loss_at_evaluations_and_change_nothing(
    models: tuple[Path, Path], mesh: DeviceMesh, tmp_path: Path, case: str, objective: Any
) -> None:
    """The same numbers as of a batch of them, to which the parts of ranks add up; what no pair has is left out."""
    policy_path, reference = models
    plain = config_of(policy_path, objective, len(PAIRS), None if case == "sft" else reference)
    encoded(plain, tmp_path)  # writes the file
    data = plain.data.model_dump() | {"held_out": str(tmp_path / "rows.jsonl")}
    config = Config.model_validate(plain.model_dump() | {"data": data, "evaluation": {"every_steps": 2}})
    apart = Config.model_validate(config.model_dump() | {"placement": {"split": "0:2"}})
    policy, _ = built(config, mesh)
    beside, before = build_beside(config, policy), policy.shard_digests("float32")

    def place(rank: int, first: int = 0) -> Any:
        return SimpleNamespace(rank=rank, agree=lambda *own: [own[0] + first, own[1]])

    held_out = HeldOut(config, policy, beside, place(0))
    assert held_out.measure(1) == HeldOut(plain, policy, beside, place(0)).measure(2) == {}
    found = held_out.measure(2)
    assert found["eval/loss"] == pytest.approx(TRL[case][0], abs=1e-4)
    assert ("eval/accuracy" in found) == (case != "sft") and policy.shard_digests("float32") == before
    assert held_out.measure(config.learner.total_steps) == found and not beside.state().get("pairs")
    parts = [HeldOut(apart, policy, beside, place(rank)).measure(2) for rank in (0, 1)]
    assert {name: sum(part[name] for part in parts) for name in found} == pytest.approx(found, rel=1e-5)
    with pytest.raises(ConfigError, match=r"data\.held_out: .* on the first node"):
        HeldOut(config, policy, beside, place(1, first=1))


@pytest.mark.slow
def test_trl_gives_the_numbers_that_are_written_here(models: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="the extra `trl` is not installed")
    assert by_trl(*models, tmp_path) == {case: pytest.approx(numbers, abs=1e-5) for case, numbers in TRL.items()}


def by_trl(policy: Path, reference: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """TRL: loss and gradient norm of its first step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    def loaded(which: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(which, dtype=torch.float32)

    def first(trainer: Any) -> tuple[float, float]:
        trainer.train()
        return tuple(trainer.state.log_history[0][key] for key in ("loss", "grad_norm"))  # type: ignore[return-value]

    names = ("prompt", "chosen", "rejected")
    rows = Dataset.from_list([dict(zip(names, pair, strict=True)) for pair in PAIRS])
    shown = rows.remove_columns("rejected").rename_column("chosen", "completion")
    once = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    common = {**once, "output_dir": str(folder), "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    common |= {"per_device_train_batch_size": len(PAIRS), "max_grad_norm": 1e9, "max_length": None}
    tokenizer = {"processing_class": AutoTokenizer.from_pretrained(policy)}
    sft = SFTTrainer(loaded(policy), args=SFTConfig(**common), train_dataset=shown, **tokenizer)
    found = {"sft": first(sft)}
    for beta in (0.1, 0.5):
        args = DPOConfig(**common, beta=beta)
        dpo = DPOTrainer(loaded(policy), loaded(reference), args=args, train_dataset=rows, **tokenizer)
        found[f"dpo, beta {beta}"] = first(dpo)
    return found


def test_neither_microbatches_nor_another_temperature_change_a_step(qwen3: Path, mesh: DeviceMesh) -> None:
    whole = [dataclasses.replace(t, reward=0.0) for t in random_step(1, num_groups=6, group_size=2)]
    config = config_of(qwen3, "dpo", 6)
    found = []
    for number in (1, 3):
        batch = batch_of(whole, 1)
        microbatch = (batch.all_groups % number).astype(np.int32)  # pairs stay together
        batch = dataclasses.replace(batch, microbatch=microbatch, num_microbatches=number, minibatches=[[6, number]])
        values = trained_on(batch, config, mesh).values
        found.append((values["dpo/loss"], values["actor/grad_norm"]))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0][0] == pytest.approx(math.log(2), rel=1e-6), "policy and reference are one model at first"


def test_the_reference_is_computed_once_a_row_also_over_a_checkpoint(
    models: tuple[Path, Path], mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(models[0], "dpo", 4, models[1])
    drawn = random_step(1, group_size=2)
    batch = batch_of(drawn, 1)
    policy, optimizer = built(config, mesh)
    beside = build_beside(config, policy)
    first = Trainer(config, policy, optimizer, beside=beside).train_step(batch).values["dpo/loss"]
    reference, of_reference = built(config_of(models[1], "dpo", 4), mesh)[0], dict[int, float]()
    for number, t in enumerate(drawn):
        (values,) = logprobs(reference, [t.prompt_ids + t.response_ids])
        of_reference[number] = values[len(t.prompt_ids) - 1 :][torch.tensor(t.loss_mask) > 0].sum().item()
    state = json.loads(json.dumps(beside.state()))
    for index, chosen, rejected in state["pairs"]:
        wanted = of_reference[2 * int(index)], of_reference[2 * int(index) + 1]
        assert (chosen, rejected) == pytest.approx(wanted, abs=1e-4)
    monkeypatch.setattr("learner.beside.reference.Reference.logprobs", lambda *_: pytest.fail("computed again"))
    policy, optimizer = built(config, mesh)
    later = build_beside(config, policy)
    later.restore(state)
    again = Trainer(config, policy, optimizer, beside=later).train_step(batch).values["dpo/loss"]
    assert again == first and isinstance(later.pairs, PairReference) and later.pairs.state() == beside.pairs.state()


def test_pairs_that_lie_apart_are_refused(qwen3: Path, mesh: DeviceMesh) -> None:
    batch = batch_of(random_step(1, group_size=2), 1, num_microbatches=2)  # dealt out by turns
    with pytest.raises(BatchError, match="batch 1, rank 0, microbatch 0: has one answer of a pair"):
        trained_on(batch, config_of(qwen3, "dpo", 4), mesh)


def test_adapters_have_the_policy_without_them_as_reference(qwen3: Path, mesh: DeviceMesh) -> None:
    config = make_config(qwen3, learner={"objective": "dpo", "lora": {"rank": 4}}, rollout={"groups_per_step": 4})
    policy, optimizer = built(config, mesh)
    trainer = Trainer(config, policy, optimizer, beside=build_beside(config, policy))
    batch = batch_of(random_step(1, group_size=2), 1)
    losses = [trainer.train_step(batch).values["dpo/loss"] for _ in range(4)]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6) and losses[-1] < losses[0] - 1e-3


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"learner": {"objective": {"dpo": {"beta": 0}}}}, "beta"),
        ({"learner": {"objective": "sft"}, "algorithm": {"reference_path": "x"}}, "algorithm.reference_path"),
        ({"algorithm": {"reference_refresh_steps": 5}}, "algorithm.reference_refresh_steps"),
        ({"learner": {"objective": "dpo", "mesh": {"replicate": 2}}, "placement": {"split": "1:2"}}, "learner.mesh"),
    ],
)
def test_what_dpo_cannot_do_is_refused_by_name(qwen3: Path, sections: dict[str, Any], said: str) -> None:
    from learner.trainer import objective_of

    with pytest.raises(ConfigError, match=said):
        objective_of(make_config(qwen3, **({"learner": {"objective": "dpo"}} | sections)))


def test_a_step_moves_the_policy(models: tuple[Path, Path], mesh: DeviceMesh, tmp_path: Path) -> None:
    config = config_of(models[0], "dpo", 4, models[1])
    policy, optimizer = built(config, mesh)
    trainer = Trainer(config, policy, optimizer, beside=build_beside(config, policy))
    batch = encoded(config, tmp_path)
    steps = [trainer.train_step(batch).values for _ in range(8)]
    assert steps[-1]["dpo/margin"] > steps[0]["dpo/margin"] + 0.05
    before = load_file(models[0] / "model.safetensors")
    assert max(float((p - before[n]).abs().max()) for n, p in policy.named_full_tensors("float32")) > 1e-4
