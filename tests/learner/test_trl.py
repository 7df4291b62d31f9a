"""Under TRL's trainer: replay's batches become its samples, one batch an update, through its two protocols."""

import inspect
import json
import queue
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import batch_of, random_step

from configs import Config, ConfigError, load
from examples.trl import protocols
from examples.trl.agreement import agreed, trl_arguments
from examples.trl.on_cpu import tree_attention
from examples.trl.processes import Events, LauncherBeside, Processes
from examples.trl.protocols import SlipstreamRolloutWorker, SlipstreamWeightTransfer
from examples.trl.run import RolloutsFailed, TrlRun
from examples.trl.samples import OutOfStep, Sample, SampleQueue, filler_of, samples_of
from learner.advantages import advantages_of, build_advantage
from learner.rows import BatchError
from learner.trainer import inputs_of
from replay.channel import ChannelError
from replay.messages import Batch

GROUPS, MEMBERS = 4, 4
SIZE = GROUPS * MEMBERS


@pytest.fixture(scope="module")
def trainer_module() -> Any:
    return pytest.importorskip(
        "trl.experimental.async_grpo.async_grpo_trainer", reason="the extra 'trl' is not installed"
    )


def samples_of_step(step: int) -> list[Sample]:
    batch = batch_of(random_step(step, num_groups=GROUPS, group_size=MEMBERS), step)
    advantages = advantages_of(build_advantage(config().algorithm), inputs_of(batch))
    return samples_of(batch, advantages, num_groups=GROUPS, size=SIZE)


def config(*overrides: str) -> Config:
    small = ["placement.split=1:1", "rollout.groups_per_step=4", "rollout.group_size=4", "learner.total_steps=10"]
    return load("quickstart", [*small, *overrides])


def arguments(**changed: Any) -> SimpleNamespace:
    given = trl_arguments(config(), per_device_train_batch_size=4)
    return SimpleNamespace(**{**given, "world_size": 1, "process_index": 0, **changed})


# ---- samples --------------------------------------------------------------------------------------------


def test_a_batch_becomes_samples_token_for_token() -> None:
    trajectories = random_step(3, num_groups=GROUPS, group_size=MEMBERS)
    batch = batch_of(trajectories, 3)
    advantages = np.linspace(-1, 1, SIZE, dtype=np.float32)
    samples = samples_of(batch, advantages, num_groups=GROUPS, size=SIZE)
    for number, (given_, sample) in enumerate(zip(trajectories, samples, strict=True)):
        prompt, mask = len(given_.prompt_ids), given_.loss_mask
        assert sample.input_ids.tolist() == given_.prompt_ids + given_.response_ids
        assert sample.completion_mask.tolist() == [0] * prompt + mask
        expected = [0.0] * prompt + [p if m else 0.0 for p, m in zip(given_.logprobs, mask, strict=True)]
        assert sample.old_log_probs.tolist() == pytest.approx(expected)
        oldest = min(v for v, m in zip(given_.versions, mask, strict=True) if m)
        assert (sample.model_version, sample.metrics["sample/lag_max"]) == (oldest + 1, 2 - oldest)
        assert sample.advantage == pytest.approx(advantages[number])
        assert sample.group_id == 2 * GROUPS + given_.group
        assert sample.metrics["reward"] == pytest.approx(given_.reward)


def test_answers_that_are_out_of_the_loss_are_a_token_that_teaches_nothing() -> None:
    """algorithm.overlong_filter and replay.on_stale=mask leave such; TRL has no row without a token in the loss."""
    drawn = random_step(3, num_groups=GROUPS, group_size=MEMBERS)
    masked = [replace(t, loss_mask=[0] * len(t.loss_mask)) if t.group else t for t in drawn]
    batch, advantages = batch_of(masked, 3), np.linspace(-1, 1, SIZE, dtype=np.float32)
    samples = samples_of(batch, advantages, num_groups=GROUPS, size=SIZE)
    for given_, sample in zip(masked, samples, strict=True):
        prompt = len(given_.prompt_ids)
        assert sample.completion_mask.any() and sample.metrics["reward"] == pytest.approx(given_.reward)
        if given_.group:
            assert sample.input_ids.tolist() == [*given_.prompt_ids, given_.response_ids[0]]
            assert sample.completion_mask.tolist() == [0] * prompt + [1]
            assert (sample.advantage, sample.model_version, sample.old_log_probs.any()) == (0.0, 3, False)
        else:
            assert sample.completion_mask.tolist() == [0] * prompt + given_.loss_mask and sample.advantage


def test_episodes_of_several_samples_are_refused() -> None:
    batch = batch_of(random_step(1, num_groups=GROUPS, group_size=MEMBERS), 1)
    with pytest.raises(BatchError, match=r"16 samples .* takes 12"):
        samples_of(batch, np.zeros(SIZE, np.float32), num_groups=GROUPS, size=12)


# ---- the rhythm -----------------------------------------------------------------------------------------


def plain(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


def sample_of(step: int, number: int) -> Sample:
    return Sample(
        input_ids=np.array([7, 8, step, number]),
        completion_mask=np.array([0, 0, 1, 1]),
        old_log_probs=np.zeros(4, np.float32),
        advantage=1.0,
        model_version=step,
        group_id=step * 100 + number,
        metrics={"reward": 0.5},
    )


def queue_of(size: int, microbatch: int, taken: list[int]) -> SampleQueue:
    def take(step: int) -> list[Sample]:
        taken.append(step)
        return [sample_of(step, number) for number in range(size)]

    return SampleQueue(take, plain, size=size, microbatch=microbatch)


def read(samples: SampleQueue, microbatch: int) -> list[Any]:
    return [samples.get(timeout=5) for _ in range(microbatch)]


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_every_update_is_one_batch_while_trl_reads_ahead(full: int, microbatch: int, steps: int) -> None:
    """As accelerate and transformers read: all microbatches of an update before it, and one more."""
    size, taken = full * microbatch, list[int]()
    samples = queue_of(size, microbatch, taken)
    ahead = read(samples, microbatch)
    for step in range(1, steps + 1):
        rows = []
        for _ in range(full + 1):
            rows.append(ahead)
            ahead = read(samples, microbatch)
        update = [sample for row in rows for sample in row if sample.advantage]
        assert [s.group_id for s in update] == [step * 100 + n for n in range(size)]
        assert taken == list(range(1, step + 1))  # batch s+1 is never asked for before update s is made
        # TRL's mean over microbatches is that over the full ones alone
        assert [s.advantage / (full + 1) for s in update] == pytest.approx([1 / full] * len(update))
        samples.committed(step)


def test_another_rhythm_stops_the_run() -> None:
    samples = queue_of(4, 2, [])
    read(samples, 6)
    with pytest.raises(OutOfStep, match="read 6 samples, 8 are due"):
        samples.committed(1)
    read(samples, 2)
    with pytest.raises(OutOfStep, match="reads beyond batch 1"):
        samples.get()
    samples.committed(1)
    with pytest.raises(OutOfStep, match="made update 1 "):
        samples.committed(1)


def test_a_filler_is_short_and_teaches_nothing() -> None:
    longer = replace(sample_of(1, 0), completion_mask=np.array([0, 0, 0, 1]))
    filler = filler_of([longer, sample_of(2, 1)], 5)
    assert (filler.input_ids.tolist(), filler.completion_mask.tolist()) == ([7, 8, 2], [0, 0, 1])
    assert (filler.advantage, filler.metrics, filler.model_version, filler.group_id) == (0.0, {}, 5, 201)


# ---- agreement ------------------------------------------------------------------------------------------


def test_arguments_follow_from_the_configuration() -> None:
    given_ = trl_arguments(config("replay.async_lag=2"), per_device_train_batch_size=4, processes=2)
    assert given_["gradient_accumulation_steps"] == 2 + 1
    assert (given_["max_steps"], given_["max_staleness"], given_["num_generations"]) == (10, 2, 4)
    with pytest.raises(ConfigError, match=r"does not divide .* = 16 samples"):
        trl_arguments(config(), per_device_train_batch_size=5)
    settled = agreed(config(), arguments(max_staleness=9))
    assert settled.learner.total_steps == 10
    assert not settled.algorithm.drop_zero_advantage and not settled.evaluation.every_steps


@pytest.mark.parametrize(
    ("changed", "overrides", "message"),
    [
        ({"max_steps": -1}, [], "max_steps: -1"),
        ({"gradient_accumulation_steps": 4}, [], "gradient_accumulation_steps is 4, the configuration says 5"),
        ({"temperature": 0.5}, [], "temperature is 0.5, the configuration says 1.0"),
        ({"token_budget": 512}, [], "token_budget is 512"),
        ({"weight_sync_steps": 2}, [], "weight_sync_steps is 2"),
        ({"max_staleness": 0}, [], "max_staleness is 0, less than replay.async_lag 1"),
        ({}, ["placement.split=1:2"], "2 learner ranks"),
        ({}, ["learner.lora.rank=4"], "learner.lora.rank: 4, so that engines would wait for adapters"),
        ({}, ["algorithm.advantage=gae"], "follows from forwards over the tokens"),
    ],
)
def test_what_does_not_agree_is_refused(changed: dict[str, Any], overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agreed(config(*overrides), arguments(**changed))


def test_a_configuration_is_taken_in_every_form_and_left_as_it_is(tmp_path: Path) -> None:
    tree = {"model": {"path": "none"}, "data": {"train": "none.jsonl"}, "rollout": {"group_size": 4}}
    (tmp_path / "my.yaml").write_text(json.dumps(tree))
    for given_ in (tree, tmp_path / "my.yaml", Config.model_validate(tree)):
        assert protocols._loaded(given_, ["rollout.group_size=2"]).rollout.group_size == 2
    assert tree["rollout"] == {"group_size": 4}


# ---- the run --------------------------------------------------------------------------------------------


class Reader:
    """Replay's answers, from a list of batches."""

    def __init__(self, *batches: Batch, error: Exception | None = None) -> None:
        self.batches, self.error = list(batches), error

    def take(self, step: int, check: Callable[[Batch], None]) -> Batch:
        if self.error is not None:
            raise self.error
        check(self.batches[step - 1])
        return self.batches[step - 1]


def run_with(tmp_path: Path, reader: Any, *overrides: str) -> TrlRun:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64}))
    run = TrlRun(config(f"model.path={tmp_path}", *overrides), microbatch=4, make=plain)
    run._reader = reader
    return run


def test_the_lag_of_every_token_is_checked_again(tmp_path: Path) -> None:
    batch = batch_of(random_step(1, num_groups=GROUPS, group_size=MEMBERS), 1)
    old = replace(batch, versions=batch.versions - 2)
    run = run_with(tmp_path, Reader(batch))
    assert run.samples.get().advantage == 0 and run.rewards == [pytest.approx(float(batch.all_rewards.mean()))]
    with pytest.raises(BatchError, match="has lag 2, allowed are 0 to 1"):
        run_with(tmp_path, Reader(old)).samples.get()
    with pytest.raises(BatchError, match="token"):
        run_with(tmp_path, Reader(replace(batch, token_ids=batch.token_ids + 64))).samples.get()


def test_a_wait_that_ends_in_vain_has_its_root_cause(tmp_path: Path) -> None:
    run = run_with(tmp_path, Reader(error=ChannelError("replay was last heard 30 s ago", "silent")))
    with pytest.raises(RolloutsFailed, match="last heard 30 s ago"):
        run.samples.get()
    run.processes.failure = "replay did not start: exit code 2"
    with pytest.raises(RolloutsFailed, match=r"^replay did not start: exit code 2 \[SLIP-TRL-01\]$"):
        run.samples.get()


# ---- processes ------------------------------------------------------------------------------------------


def test_children_do_not_inherit_the_process_group_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "7")
    launcher = LauncherBeside(config(f"run.dir={tmp_path}"), False, Events(config()))
    program = "import os; print(sorted({'RANK', 'MASTER_ADDR', 'MINE'} & set(os.environ)))"
    child = launcher._start("server", [sys.executable, "-S", "-c", program], {"MINE": "1"})
    assert child.process.wait(20) == 0
    assert child.log_path.read_text() == "['MINE']\n"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watch_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Processes(config(f"run.dir={tmp_path}"))
    monkeypatch.setattr(LauncherBeside, "start", lambda launcher: launcher._start_learner())
    monkeypatch.setattr(LauncherBeside, "watch", lambda launcher: 1 // 0)
    watched.start()
    watched._thread.join(10)
    assert watched.failure.startswith("the thread that watches over replay and rollout servers has failed")
    watched.stop()


# ---- TRL's side -----------------------------------------------------------------------------------------


class FakeRun:
    """What both objects see of a run."""

    def __init__(self) -> None:
        self.samples, self.version, self.outbox = queue_of(4, 2, []), -1, [{"slipstream/a": 1.0}]
        self.finished: list[str] = []

    def check(self) -> None:
        raise RolloutsFailed("rollout-0 (pid 7) died: killed by SIGKILL")

    def finish(self, *, failure: str = "") -> None:
        self.finished.append(failure)


def test_both_objects_fit_trls_protocols(trainer_module: Any) -> None:
    run: Any = FakeRun()
    for protocol, given_ in (
        (trainer_module.RolloutWorkerProtocol, SlipstreamRolloutWorker(run)),
        (trainer_module.WeightTransferProtocol, SlipstreamWeightTransfer(run)),
    ):
        methods = {name: f for name, f in vars(protocol).items() if inspect.isfunction(f) and name[0] != "_"}
        assert len(methods) >= 4
        for name, wanted in methods.items():
            own = inspect.signature(getattr(type(given_), name))
            assert list(own.parameters) == list(inspect.signature(wanted).parameters), name
        for name in set(vars(protocol).get("__annotations__", ())):
            assert isinstance(getattr(given_, name), queue.Queue)


def test_a_worker_without_its_transfer_stops_trl() -> None:
    run: Any = FakeRun()
    worker = SlipstreamRolloutWorker(run)
    for call in (worker.start, lambda: worker.update_model_version(1)):
        with pytest.raises(OutOfStep, match="give the trainer both objects"):
            call()
    run.version = 3
    worker.update_model_version(4)
    with pytest.raises(OutOfStep, match="TRL is at version 4"):
        worker.update_model_version(5)
    with pytest.raises(RolloutsFailed, match="killed by SIGKILL"):
        worker.check_health(300.0)
    assert worker.metrics_queue.get_nowait() == {"slipstream/a": 1.0}
    with pytest.raises(queue.Empty):
        worker.metrics_queue.get_nowait()


def test_an_error_of_trls_fails_the_run() -> None:
    run: Any = FakeRun()
    worker = SlipstreamRolloutWorker(run)
    worker.stop()
    with pytest.raises(ValueError, match="nan"):
        try:
            raise ValueError("loss is nan")
        finally:
            worker.stop()
    assert run.finished == ["", "ValueError: loss is nan"]


def test_trl_packs_one_batch_into_an_update(trainer_module: Any) -> None:
    """TRL's own dataset, batcher and collator over the queue, with its RolloutSample."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    samples = SampleQueue(samples_of_step, RolloutSample, size=SIZE, microbatch=8)
    metrics: Any = trainer_module.defaultdict(list)
    version = [1]
    dataset = trainer_module.RolloutQueueDataset(samples, lambda: version[0], lambda _: None, 300.0, metrics, 2)
    batcher = iter(trainer_module.FixedCountBatcher(dataset, 2, 8))
    collate = trainer_module.DataCollatorForRollout(0, 2)
    ahead = next(batcher)
    for step in (1, 2, 3):
        update = []
        for _ in range(3):
            update.append(collate([ahead]))
            ahead = next(batcher)
        trained = sum(int((batch["token_index"] >= 0).sum()) for batch in update)
        stated = sum(int(sample.completion_mask.sum()) for sample in samples_of_step(step))
        assert trained == stated + 2 * (4 + 4) // 2  # and a token of each filler, 4 on each of 2 processes
        assert not update[0]["advantages"].any()
        samples.committed(step)
        version[0] += 1
    assert "sample/dropped_stale_total" not in metrics


def test_attention_on_a_cpu_is_that_of_each_sample(trainer_module: Any) -> None:
    """A packed row against every sample by itself, causal."""
    from trl.experimental.async_grpo.packing import TreeRow

    row, samples = TreeRow(), samples_of_step(1)[:6]
    for sample in samples:
        row.add({"input_ids": sample.input_ids, "completion_mask": sample.completion_mask, "group_id": 0,
                 "old_log_probs": sample.old_log_probs, "advantage": 0.0})  # fmt: skip
    packed = row.pack()
    ids, positions = packed["input_ids"], packed["position_ids"]
    table = torch.randn(3, 64, 16, 4, 8, generator=torch.Generator().manual_seed(0))
    heads = [table[i][ids, positions].transpose(0, 1)[None] for i in range(3)]
    query, key, value = heads[0], heads[1][:, :2], heads[2][:, :2]  # grouped heads
    names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    out, _ = tree_attention(
        torch.nn.Module(), query, key, value, None, **{name: packed[name] for name in names},
        tree_max_seqlen_q=0, tree_max_seqlen_k=0, scaling=0.5,
    )  # fmt: skip
    order = {tuple(row[:end]): at for at, row, end in _paths(packed)}
    for sample in samples:
        own, at = torch.tensor(sample.input_ids), torch.arange(len(sample.input_ids))
        q, k, v = (table[i][own, at].transpose(0, 1)[None] for i in range(3))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k[:, :2], v[:, :2], is_causal=True, scale=0.5, enable_gqa=True
        )
        for end in range(1, len(own) + 1):
            found = out[0, order[tuple(sample.input_ids[:end].tolist())]]
            torch.testing.assert_close(found, expected[0, :, end - 1], atol=1e-5, rtol=1e-5)


def _paths(packed: Any) -> list[tuple[int, list[int], int]]:
    """(packed position, tokens of its path, how many lead to it) of every position of a row."""
    found, ids = [], packed["input_ids"]
    q, k, index = packed["tree_cu_seqlens_q"], packed["tree_cu_seqlens_k"], packed["tree_kv_index"]
    for segment in range(len(q) - 1):
        path = index[k[segment] : k[segment + 1]]
        tokens, length = ids[path].tolist(), int(q[segment + 1] - q[segment])
        for place in range(length):
            found.append((int(q[segment]) + place, tokens, len(tokens) - length + place + 1))
    return found
