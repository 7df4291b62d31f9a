"""Random trajectories, and the Batch that replay would make of them for one rank."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from configs import Config
from learner.advantages import build_advantage
from learner.beside.beside import Beside
from learner.optimizer import Optimizer
from learner.policy.model import Policy
from learner.rows import Row
from learner.step import StepSums
from learner.trainer import Trainer, prepare
from replay.messages import Batch
from tests.learner.reference import Recorded


def random_step(
    step: int, *, num_groups: int = 4, group_size: int = 4, vocab: int = 64, seed: int = 0
) -> list[Recorded]:
    """Trajectories of one step: prompts of 2 to 7 tokens, answers of 1 to 9, lags 0 to 2, some tokens masked.

    Group 0 always has equal rewards, so that its trajectories have no advantage.
    """
    rng = random.Random(f"{seed}/{step}")
    trajectories = []
    for group in range(num_groups):
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(2, 7))]
        for member in range(group_size):
            length = rng.randint(1, 9)
            trajectories.append(
                Recorded(
                    prompt_ids=prompt,
                    response_ids=[rng.randrange(vocab) for _ in range(length)],
                    loss_mask=[1, *(int(rng.random() < 0.8) for _ in range(length - 1))],
                    logprobs=[float(np.float32(-4.2 + rng.gauss(0, 0.4))) for _ in range(length)],
                    versions=[max(0, step - 1 - rng.randint(0, 2)) for _ in range(length)],
                    reward=0.5 if group == 0 else float(member % 2 if member < 2 else rng.randint(0, 1)),
                    group=group,
                )
            )
    return trajectories


def batch_of(
    trajectories: Sequence[Recorded],
    step: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    num_microbatches: int = 1,
    minibatches: int = 1,
) -> Batch:
    """This rank's part of a batch: trajectories dealt out in turn to ranks, then to their mini-batch's microbatches."""
    mine = list(range(rank, len(trajectories), world_size))
    own = [trajectories[i] for i in mine]
    groups = sorted({t.group for t in trajectories})
    divided = np.array_split(np.array(groups), minibatches)
    part = np.array([next(k for k, some in enumerate(divided) if t.group in some) for t in own])

    def joined(lists: list[list[int]] | list[list[float]], dtype: type) -> np.ndarray:
        return np.array([value for values in lists for value in values], dtype)

    return Batch(
        step=step,
        rank=rank,
        num_microbatches=num_microbatches * minibatches,
        minibatches=[[len(some), num_microbatches] for some in divided],
        total_loss_tokens=sum(sum(t.loss_mask) for t in trajectories),
        group_ids=[[0, group] for group in groups],
        stats={},
        lag_histogram={},
        trajectory=np.array(mine, np.int32),
        microbatch=(np.arange(len(mine)) % num_microbatches + part * num_microbatches).astype(np.int32),
        prompt_lengths=np.array([len(t.prompt_ids) for t in own], np.int32),
        lengths=np.array([len(t.response_ids) for t in own], np.int32),
        token_ids=joined([t.prompt_ids + t.response_ids for t in own], np.int32),
        loss_mask=joined([t.loss_mask for t in own], np.uint8),
        logprobs=joined([t.logprobs for t in own], np.float32),
        versions=joined([t.versions for t in own], np.int32),
        all_rewards=np.array([t.reward for t in trajectories], np.float32),
        all_groups=np.array([t.group for t in trajectories], np.int32),
        all_loss_tokens=np.array([sum(t.loss_mask) for t in trajectories], np.int32),
    )


def scored(batch: Batch, name: str, k: int, vocab: int = 64) -> Batch:
    """The batch with made-up scores of a teacher, which a token has on whatever rank it is."""
    logprobs, ids, top = [], [], []
    for trajectory, length in zip(batch.trajectory.tolist(), batch.lengths.tolist(), strict=True):
        rng = np.random.default_rng([batch.step, trajectory])
        drawn = np.sort(rng.dirichlet(np.ones(vocab), length), 1)[:, ::-1]
        logprobs.append(-rng.exponential(3.0, length))
        ids.append(np.argsort(rng.random((length, vocab)), 1)[:, :k])
        top.append(np.log(drawn[:, :k]))
    return replace(
        batch,
        teachers=[f"{name}@0"] * len(batch.trajectory),
        teacher_logprobs=np.concatenate(logprobs).astype(np.float32),
        teacher_ids=np.concatenate(ids).ravel().astype(np.int32),
        teacher_top=np.concatenate(top).ravel().astype(np.float32),
    )


def train_on(
    batch: Batch, policy: Policy, optimizer: Optimizer, config: Config, beside: Beside | None = None
) -> tuple[StepSums, str]:
    """One whole step, and why it was not applied."""
    update = Trainer(config, policy, optimizer, beside=beside).train_step(batch)
    return update.sums, update.reason


def rows_of(batch: Batch, config: Config) -> tuple[list[Row], int]:
    """The rows of a batch, and the tokens in the loss of all ranks."""
    work = prepare(batch, build_advantage(config.algorithm), config)
    return work.rows, work.global_tokens
