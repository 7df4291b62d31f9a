"""Judges each step by the rules of the `limits` section, before its update is applied. Pure.

All ranks see the same numbers, so all decide alike. What it remembers is part of a checkpoint, so that a resumed
learner, and a playback, decide about repeated steps as before.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from configs.limits import GUARDS, Action, Rule
from configs.schema import Config
from learner.guards.errors import BY_GUARD, SilentlyWrong
from learner.guards.signals import MADE_HERE, NAMES, SignalHistory, Signals
from learner.step import StepSums
from replay.messages import Batch

WILL: dict[Action, str] = {
    "warn": "it is trained on all the same",
    "skip": "the update is not applied",
    "lower_lag": "replay lowers the lag, one by one",
    "roll_back": "the update is not applied, and the run rolls back",
    "stop": "the run stops",
}
MISMATCH = (
    "the engine does not run the policy that is trained: kernels or dtypes of one side have changed, or weights are"
    " corrupt; look at weight_sync/digests_equal, start the rollout servers anew, and compare with the engine's last"
    " release"
)
REMEDIES = {
    "nonfinite": "lower learner.lr or look at the rewards",
    "ess": "the batch is far from the policy in training; lower replay.async_lag or learner.lr",
    "kl": "the batch is far from the policy in training; lower replay.async_lag or learner.lr",
    "entropy": "the policy collapses; lower learner.lr, or raise algorithm.entropy_coef or clip_high of algorithm.loss",
    "reward": "look at the reward function and at the newest answers (tracking.save_rollouts_every)",
    "same_length": "answers are cut at rollout.max_new_tokens, or all alike; look at the newest ones",
    "max_logprob_diff": MISMATCH,
    "mismatch": MISMATCH,
}

MEANINGS = {
    "flat_reward_steps": "every group's rewards are equal, so there is nothing to learn; look at the reward function"
    " {reward} and at the answers in the run folder",
    "zero_gradient_steps": "the gradient is exactly zero although advantages are not; is every token clipped or"
    " masked?",
    "nonfinite_steps": "loss or gradient is not finite; lower learner.lr or look at the rewards",
}


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule that was broken for long enough."""

    guard: str
    action: Action
    first_step: int
    """Since when it has been broken."""
    text: str

    def error(self) -> SilentlyWrong:
        """Of an alarm that stops the run."""
        return BY_GUARD.get(self.guard, SilentlyWrong)(self.text)


@dataclass(frozen=True, slots=True)
class GuardVerdict:
    """What the guards say of one step; nothing by default."""

    alarms: tuple[Alarm, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    """Numbers for metrics.jsonl: firings so far by guard, and what only guards compute."""
    async_lag: int | None = None
    """New bound of the lag, where it is lowered."""

    def and_then(self, other: "GuardVerdict") -> "GuardVerdict":
        """Of both updates of a step: what a guard said of the first of them, it need not say again."""
        said = {(alarm.guard, alarm.action) for alarm in self.alarms}
        new = tuple(alarm for alarm in other.alarms if (alarm.guard, alarm.action) not in said)
        lag = other.async_lag if self.async_lag is None else self.async_lag
        return GuardVerdict(self.alarms + new, {**self.values, **other.values}, lag)

    def first(self, *actions: Action) -> Alarm | None:
        """The first alarm that asks for one of these actions."""
        return next((alarm for alarm in self.alarms if alarm.action in actions), None)

    @property
    def refusal(self) -> str:
        """Why the update is left out, as `guard_ess`; empty where it is applied."""
        alarm = self.first("skip", "roll_back", "stop")
        return f"guard_{alarm.guard}" if alarm is not None else ""


class Guards:
    """The rules of a run and how long each has been broken."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.memory = SignalHistory(config)
        limits = config.limits
        diff = "max_logprob_diff_16bit" if self.memory.is_16bit else "max_logprob_diff"
        self._keys = {"max_logprob_diff": diff}
        counted = ("flat_reward_steps", "zero_gradient_steps", "nonfinite_steps")
        self.rules: dict[str, tuple[Rule, ...]] = {
            name: (Rule("stop", True, 0.5, steps),) for name in counted if (steps := getattr(limits, name))
        }
        self.rules |= {"max_logprob_diff": (Rule("stop", True, self.memory.max_diff),)}
        self.rules |= {name: rules for name in GUARDS if (rules := limits.rules(name))}
        self.broken: dict[str, tuple[int, int]] = {}
        """By guard, number and bound of the rule: steps in a row, and the first of them. A run may be resumed with
        another bound, which these steps did not break."""
        self._step, self._counted = 0, set[str]()
        """The step that is judged, and what of it is counted: one of several updates counts once."""
        self._kept = set[str]()
        """Rules that an update of this step has kept: their streaks end with it, unless another one breaks them."""
        self.fired: Counter[str] = Counter()
        self.skipped = 0
        """Steps in a row whose updates were skipped."""
        self.unchanged = 0
        """Applied updates in a row that left every weight as it was."""
        self.async_lag = config.replay.async_lag
        self.lowered_at = 0
        """Step that lowered the lag last."""

    def judge(self, sums: StepSums, batch: Batch, *, is_first: bool = True) -> GuardVerdict:
        """Look at an update of a step, which is not applied yet."""
        signals, step = self.memory.signals(sums, batch, is_first=is_first), batch.step
        if step != self._step:
            self._end_streaks()
            self._step, self._counted = step, set()
        alarms = [alarm for guard in self.rules for alarm in self._alarms(step, guard, signals)]
        lowered = self._lower(step, alarms)
        skips = next((alarm for alarm in alarms if alarm.action == "skip"), None)
        if sums.global_tokens:
            if skips is None:
                self.skipped = 0
                self._counted.discard("skipped")
            elif "skipped" not in self._counted:
                self.skipped += 1
                self._counted.add("skipped")
        limit = self.config.limits.skipped_steps
        if skips is not None and limit and self.skipped >= limit:
            text = (
                f"step {step}: updates of {self.skipped} steps in a row were skipped (limits.skipped_steps); the last: "
            )
            alarms.append(Alarm("skipped_steps", "stop", step - self.skipped + 1, text + skips.text))
        fired = {alarm.guard for alarm in alarms} - self._counted
        self.fired.update(fired)
        self._counted |= fired
        values = {f"guards/{guard}": float(count) for guard, count in self.fired.items()}
        values |= {NAMES[guard]: found for guard in MADE_HERE if (found := signals[guard]) is not None}
        return GuardVerdict(tuple(alarms), values, lowered)

    def said(self, alarm: Alarm) -> str:
        """What the log says of an alarm: its text the first time and every tenth power of times, else nothing.

        What changes the course of the run is always said.
        """
        count = self.fired[alarm.guard]
        if count <= 1 or alarm.action in ("stop", "roll_back"):
            return alarm.text
        return f"{alarm.text} ({count} times so far)" if count == 10 ** (len(str(count)) - 1) else ""

    def weigh(self, step: int, *, was_applied: bool, has_changed: bool, lr: float) -> Alarm | None:
        """Look at the weights of a step whose update had a gradient; an alarm stops the run."""
        if was_applied:
            self.unchanged = 0 if has_changed else self.unchanged + 1
        limit = self.config.limits.zero_gradient_steps
        if not limit or self.unchanged < limit:
            return None
        text = (
            f"step {step}: for {self.unchanged} steps in a row (limits.zero_gradient_steps) updates were applied and no"
            f" weight has changed (actor/lr {lr:g}), so nothing is learned; raise learner.lr, which is"
            f" {self.config.learner.lr:g}"
        )
        return Alarm("unchanged", "stop", step - self.unchanged + 1, text)

    def _alarms(self, step: int, guard: str, signals: Signals) -> list[Alarm]:
        value, alarms = signals.get(guard), list[Alarm]()
        if value is None:
            return alarms
        for number, rule in enumerate(self.rules[guard]):
            place = f"{guard}/{number} {'above' if rule.is_above else 'below'} {rule.bound:g}"
            if not rule.is_broken_by(value):
                self._kept.add(place)
                continue
            before, first = self.broken.get(place, (0, step))
            self.broken[place] = count, first = before + (place not in self._counted), first
            self._counted.add(place)
            if count >= rule.steps:
                text = self._say(step, guard, rule, value, count)
                alarms.append(Alarm(guard, rule.action, first, text))
        return alarms

    def _end_streaks(self) -> None:
        """Once all updates of a step are judged."""
        for place in self._kept - self._counted:
            self.broken.pop(place, None)
        self._kept.clear()

    def _say(self, step: int, guard: str, rule: Rule, value: float, count: int) -> str:
        row = f"for {count} steps in a row " if count > 1 else ""
        said = f"step {step}: {row}(limits.{self._keys.get(guard, guard)}) "
        if guard in MEANINGS:
            return said + MEANINGS[guard].format(reward=repr(self.config.reward.shown))
        side = "above" if rule.is_above else "below"
        found = f"{NAMES[guard]} is {value:.3g}, {side} {rule.bound:g}" if guard != "nonfinite" else NAMES[guard]
        return f"{said}{found}: {WILL[rule.action]}; {REMEDIES[guard]}"

    def _lower(self, step: int, alarms: list[Alarm]) -> int | None:
        """The new bound of the lag. After a change it takes as many steps as the lag until younger batches come."""
        asked = any(alarm.action == "lower_lag" for alarm in alarms)
        waits = self.lowered_at and step <= self.lowered_at + self.async_lag + 1
        if not asked or waits or self.async_lag == 0:
            return None
        self.async_lag, self.lowered_at = self.async_lag - 1, step
        return self.async_lag

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as plain data."""
        self._end_streaks()
        return {
            "memory": self.memory.state(),
            "broken": {place: list(since) for place, since in self.broken.items()},
            "fired": dict(self.fired),
            "skipped": self.skipped,
            "unchanged": self.unchanged,
            "async_lag": [self.async_lag, self.config.replay.async_lag],
            "lowered_at": self.lowered_at,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. Resumed with another replay.async_lag, the run begins with that."""
        self.memory.restore(state["memory"])
        self.broken = {place: (count, first) for place, (count, first) in state["broken"].items()}
        self.fired = Counter(state["fired"])
        self.skipped, self.lowered_at = state["skipped"], state["lowered_at"]
        self.unchanged = state["unchanged"]
        lowered, configured = state["async_lag"]
        if configured == self.config.replay.async_lag:
            self.async_lag = lowered
