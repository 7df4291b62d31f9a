"""The loss on rows that are never trained, where learner.objective learns from answers in the data."""

import logging
from collections import Counter
from itertools import islice

import torch

from configs.errors import Contradiction, InputMissing
from configs.schema import Config
from learner.beside.beside import Beside
from learner.beside.pairs import PairReference
from learner.losses.taught import TaughtInputs, build_taught
from learner.policy.model import Policy
from learner.ranks import Ranks
from learner.step import over_ranks
from learner.trainer import nothing_expected, prepare
from replay.batches.build import build, trained
from replay.batches.sharing import assign_minibatches
from replay.data import Reading, read_rows
from replay.data.encoding import RowEncoder, Unusable
from replay.decisions.making import group_of
from replay.messages import Batch
from replay.state.leases import Slot

log = logging.getLogger(__name__)

NAMES = {
    "sft/loss": "eval/loss",
    "dpo/loss": "eval/loss",
    "dpo/accuracy": "eval/accuracy",
    "dpo/margin": "eval/margin",
}
"""What a loss measures, and the metric that it is here."""


class HeldOut:
    """Rows of data.held_out, encoded and divided among the ranks as replay does it with those of a batch."""

    def __init__(self, config: Config, policy: Policy, beside: Beside, ranks: Ranks) -> None:
        """A collective. Raises DataError, ConfigError: no row can be used, or ranks read different ones."""
        self._config, self._policy = config, policy
        path, self._every = config.data.held_out, config.evaluation.every_steps
        self._batch = _batch_of(config, path, ranks) if path is not None and self._every else None
        # of its own, for the sums of rows of data.train go into checkpoints
        self._pairs = PairReference(beside.pairs.reference, policy) if beside.pairs is not None else None

    def measure(self, step: int) -> dict[str, float]:
        """Metrics of the policy after a step; none where nothing is due. A collective."""
        if self._batch is None or (step % self._every and step != self._config.learner.total_steps):
            return {}
        rows, policy = prepare(self._batch, nothing_expected, self._config).rows, self._policy
        rows = rows if self._pairs is None else self._pairs.judge(self._batch, rows)
        sums, loss = Counter[str](), build_taught(self._config.learner.objective)
        for row, logprobs in zip(rows, policy.logprobs(rows, 1.0), strict=True):
            _, measured = loss(TaughtInputs(row=row, logprobs=logprobs))
            sums.update({NAMES[name]: float(value) for name, value in measured.items() if name in NAMES})
        own = {name: torch.tensor(value * policy.leads, dtype=torch.float64) for name, value in sums.items()}
        return over_ranks(policy, {name: value.to(policy.device) for name, value in own.items()})


def _batch_of(config: Config, path: str, ranks: Ranks) -> Batch:
    """The part of a rank."""
    learner, encoder, groups = config.learner, RowEncoder(config, config.learner.facts.answers), []
    reading = Reading(path, config.data.on_broken_row, encoder.answers)
    for index, row in enumerate(islice(read_rows(path, reading=reading), config.evaluation.num_prompts)):
        try:
            groups.append(group_of(Slot((0, index), row, 0), encoder.encode(row)))
        except Unusable as problem:
            log.warning("data.held_out: row %d of %s is left out: %s", index, path, problem)
    if not groups:
        raise InputMissing(f"data.held_out: {path}: none of its first rows can be used; its log says why")
    place = {"num_ranks": config.num_data_ranks, "max_tokens": learner.max_tokens_per_microbatch, "number": 1}
    counted, whole = trained(groups, flat=True), learner.facts.compares
    assignment, _ = assign_minibatches(groups, counted, learner.share_prefixes, whole=whole, **place)
    parts = build(1, groups, assignment, num_ranks=config.num_data_ranks, stats={}, sampled=False)
    read = [parts[0].num_microbatches, parts[0].total_loss_tokens]
    if (first := ranks.agree(*read)) != read:  # else some ranks would be alone in a collective
        raise Contradiction(f"data.held_out: {path} has {read} microbatches and tokens, and {first} on the first node")
    return parts[ranks.rank // learner.mesh.tensor]
