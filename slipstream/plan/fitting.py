"""From what was measured to `Costs`: simulated runs must take the time that the real ones took.

The engine's two constants are found with two measured numbers where there are two: what a step of rollouts takes, and
what a group takes. With one, their ratio is assumed.
"""

import math
from dataclasses import replace

from configs.errors import InputMissing
from slipstream.plan.costs import Costs, Fitted
from slipstream.plan.simulation import SimulatedRun, SimulationResult
from slipstream.plan.sources import Measured

MISSING = 0.04
"""Share of a step that may be chance: lengths are drawn, and one that waits for the learner says nothing about less."""
ALIKE = 64.0
"""Answers that double the time of a decode step, where only one number was measured; three models on an H200 had 39 to
140 (docs/benchmarks/pipeline.md)."""
SHARING = 2.0
"""Of two processes that take turns on a GPU each gets half: beside an engine updates took 1.5 to 2.1 times as long."""
RATIOS = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
ROUNDS, CLOSE, PASSES, STEPS = 9, 0.005, 3, 12


def fit(case: Measured) -> Fitted:
    """Costs of what was measured. Raises ConfigError."""
    known, sources = _learner(case)
    ratio, how = _ratio(case, known)
    costs = _shaped(known, ratio)
    costs = costs.slower(_scale(case, costs))
    sources |= {
        "decode_step_s": "simulated busy time of engines = measured",
        "decode_answer_s": how,
        "prefill_token_s": "assumed: as an answer of a decode step costs, over 4",
    }
    if case.config.placement.share_gpus:
        costs = _shared(case, costs)
        sources["sharing"] = f"assumed: {SHARING:g}, half of the GPU for each (uncertain by 0.3)"
    for _ in range(PASSES):  # what is missing changes how busy engines are, and the reverse
        costs, sources["group_s"] = _with_rest(case, costs)
        if costs.group_s:
            costs = costs.slower(_scale(case, costs))
    return Fitted(costs, case.workload, sources)


def _learner(case: Measured) -> tuple[Costs, dict[str, str]]:
    """Costs with unit engines, and the learner's and the bus's constants."""
    base = Costs(
        decode_step_s=1.0,
        decode_answer_s=0.0,
        train_token_s=1.0,
        update_s=case.update_fit[0] if case.update_fit is not None else 0.0,
        commit_s=case.commit_s,
        record_s=case.record_s,
        publish_s=max(0.0, case.publish_s - case.pause_s),
        pause_s=min(case.pause_s, case.publish_s),
        engine_gpus=case.config.placement.tensor_parallel,
        flat_share=case.flat_share,
    )
    read = {
        "commit_s": "timing_s/param_sync, less the gather",
        "record_s": "time between rows, less timing_s/step; and the gather",
        "publish_s": "weight_sync/seconds, less its apply",
        "pause_s": "apply of an update",
        "engine_gpus": "placement.tensor_parallel",
        "train_token_s": f"the update's time at {case.config.num_learner_ranks} ranks",
        **({"flat_share": "reward/flat_groups_ratio"} if case.flat_share else {}),
        **({"update_s": "timing_s/update_actor over trained tokens, step by step"} if case.update_fit else {}),
    }
    sources = {
        "sharing": "not shared: none",
        "tensor_exponent": "assumed (uncertain by 0.2)",
        "exchange_share": "docs/benchmarks/pipeline.md: 2 and 3 ranks of 0.6B and 1.7B had .08 to .10",
        "flat_share": "none are left out",
        **{name: f"{case.name}: {how}" for name, how in read.items()},
    }
    return replace(base, train_token_s=_token_s(case, base)), sources


def _shared(case: Measured, costs: Costs) -> Costs:
    """Costs of sides that share GPUs.

    The update was measured beside the engine, so costs are found for which the simulated one takes as long.
    """
    costs = replace(costs, sharing=SHARING)
    for _ in range(PASSES):
        costs = costs.slower(_scale(case, costs))
        slower = case.train_s / _run(case, costs).train_wall_s
        costs = replace(costs, update_s=costs.update_s * slower, train_token_s=costs.train_token_s * slower)
    return costs


def _simulated(case: Measured, costs: Costs) -> SimulatedRun:
    config = case.config
    return SimulatedRun(config, config.num_rollout_servers, config.num_learner_ranks, costs, case.workload)


def _run(case: Measured, costs: Costs) -> SimulationResult:
    return _simulated(case, costs).run(case.config.replay.async_lag + 3, STEPS)


def _token_s(case: Measured, base: Costs) -> float:
    """Seconds a token, so that the simulated update takes what the measured one took."""
    run, more = _simulated(case, base), case.workload.prompt_tokens
    size, count = case.config.rollout.group_size, base.kept_groups(case.config)
    drawn = [[case.workload.draw(1000 * step + i, size) + more for i in range(count)] for step in range(8)]
    unit = sum(run.update_s(groups) - base.update_s for groups in drawn) / len(drawn)
    if unit <= 0 or case.train_s <= base.update_s:
        raise InputMissing(f"{case.name}: an update of {case.train_s:g} s says nothing about tokens; train for longer")
    return (case.train_s - base.update_s) / unit


def _shaped(base: Costs, ratio: float) -> Costs:
    """Unit engines with `ratio` answers doubling the step."""
    return replace(base, decode_step_s=1.0, decode_answer_s=1 / ratio, prefill_token_s=1 / ratio / 4)


def _scale(case: Measured, unit: Costs) -> float:
    """Seconds of a decode step's fixed part, so that the simulated rollouts take what the measured ones took."""
    wanted = case.busy_s
    if not wanted:
        raise InputMissing(f"{case.name}: no rollout/idle_ratio, so nothing is known of its engines")

    scale = 0.0
    for _ in range(ROUNDS):  # it grows about as the scale does
        outcome = _run(case, unit.slower(scale or 1.0))
        got = (1 - outcome.rollout_idle) * outcome.step_s
        if scale and abs(got / wanted - 1) < CLOSE:
            break
        scale = (scale or 1.0) * wanted / max(1e-9, got)
    return scale


def _ratio(case: Measured, base: Costs) -> tuple[float, str]:
    """The ratio of the engine's constants at which a group takes its measured time; an assumed one without that."""
    measured = case.group_s
    if measured is None:
        return ALIKE, f"assumed: {ALIKE:g} answers double a decode step (uncertain by a factor of 2)"

    def off(ratio: float) -> float:
        unit = _shaped(base, ratio)
        outcome = _run(case, unit.slower(_scale(case, unit)))
        return abs(math.log(outcome.group_s / measured))

    how = f"the ratio at which a group takes its measured {measured:.3g} s (uncertain by a factor of 2)"
    return min(RATIOS, key=off), how


def _with_rest(case: Measured, costs: Costs) -> tuple[Costs, str]:
    """What of a step no constant explains, as a server's work on each finished group."""
    least = _run(case, replace(costs, group_s=0.0)).step_s
    if least >= case.step_s * (1 - MISSING):
        return costs, f"none is missing: simulated step {least:.3g} s, measured {case.step_s:.3g} s"
    low, high = 0.0, 2 * case.step_s * case.config.num_rollout_servers / case.config.rollout.groups_per_step
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        took = _run(case, replace(costs, group_s=middle)).step_s
        low, high = (middle, high) if took < case.step_s else (low, middle)
    said = f"what is missing of the measured step: {least:.3g} of {case.step_s:.3g} s are explained without"
    return replace(costs, group_s=(low + high) / 2), said
