"""Losses, corrections, advantages and KL written out a second time: plain loops over floats, from the papers' formulas.

`held` are the logprobs at which everything without a gradient is taken; a derivative moves `logprobs` and not `held`.
"""

import math
from collections.abc import Sequence

Floats = Sequence[float]


def split(values: Floats, lengths: Sequence[int]) -> list[list[float]]:
    parts, at = [], 0
    for length in lengths:
        parts.append(list(values[at : at + length]))
        at += length
    return parts


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def ppo_clip(logp: Floats, held: Floats, prox: Floats, adv: Floats, lengths: Sequence[int], dual: float) -> list[float]:
    result = []
    for new, old, advantage in zip(logp, prox, adv, strict=True):
        loss = clipped(math.exp(new - old), advantage, 0.2, 0.28)
        result.append(min(loss, -advantage * dual) if dual and advantage < 0 else loss)
    return result


def gspo(logp: Floats, held: Floats, prox: Floats, adv: Floats, lengths: Sequence[int]) -> list[float]:
    """The objective over answers: each token has an equal share of its answer's."""
    result = []
    for new, old, advantage in zip(split(logp, lengths), split(prox, lengths), split(adv, lengths), strict=True):
        ratio = math.exp(sum(n - o for n, o in zip(new, old, strict=True)) / len(new))
        result += [clipped(ratio, advantage[0], 3e-4, 4e-4)] * len(new)
    return result


def cispo(logp: Floats, held: Floats, prox: Floats, adv: Floats, lengths: Sequence[int]) -> list[float]:
    weights = [min(math.exp(now - old), 5.0) for now, old in zip(held, prox, strict=True)]
    return [-w * a * new for w, a, new in zip(weights, adv, logp, strict=True)]


def sapo(logp: Floats, held: Floats, prox: Floats, adv: Floats, lengths: Sequence[int]) -> list[float]:
    result = []
    for new, old, advantage in zip(logp, prox, adv, strict=True):
        tau = 1.0 if advantage > 0 else 1.05
        result.append(-advantage * 4 / tau / (1 + math.exp(-tau * (math.exp(new - old) - 1))))
    return result


def dppo_tv(logp: Floats, held: Floats, prox: Floats, adv: Floats, lengths: Sequence[int]) -> list[float]:
    result = []
    for new, now, old, advantage in zip(logp, held, prox, adv, strict=True):
        moved = math.exp(now) - math.exp(old)
        far = (advantage > 0 and moved > 0.2) or (advantage < 0 and moved < -0.2)
        weight = min(math.exp(now - old), 20.0)
        result.append((0.0 if far else -advantage * weight * (1 + new - now)) + 1e-3 * (new - old) ** 2)
    return result


def policy_gradient(logp: Floats, held: Floats, prox: Floats, adv: Floats, lengths: Sequence[int]) -> list[float]:
    return [-a * new for a, new in zip(adv, logp, strict=True)]


def correction(kind: str, log_rho: Floats, lengths: Sequence[int]) -> list[float]:
    result: list[float] = []
    for part in split(log_rho, lengths):
        ratios = [math.exp(value) for value in part]
        product = math.exp(sum(part))
        mean = math.exp(sum(part) / len(part))
        match kind:
            case "none":
                result += [1.0] * len(part)
            case "token_tis":
                result += [min(ratio, 2.0) for ratio in ratios]
            case "icepop":
                result += [ratio if 0.5 <= ratio <= 2.0 else 0.0 for ratio in ratios]
            case "sequence_tis":
                result += [min(product, 5.0)] * len(part)
            case "sequence_mis":
                result += [product if product <= 3.0 else 0.0] * len(part)
            case "geometric_mis":
                result += [1.0 if 0.99 <= mean <= 1.01 else 0.0] * len(part)
    return result


def kl(kind: str, logp: float, reference: float) -> float:
    ratio = math.exp(logp - reference)
    return {"k1": math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": 1 / ratio - 1 + math.log(ratio)}[kind]


def advantage(kind: str, rewards: Floats, groups: Sequence[int], tokens: Sequence[int]) -> list[float]:
    def of_group(number: int) -> list[float]:
        return [r for r, g in zip(rewards, groups, strict=True) if g == number]

    def whitened(values: Floats) -> list[float]:
        every = [value for value, count in zip(values, tokens, strict=True) for _ in range(count)]
        mean = sum(every) / len(every)
        std = math.sqrt(sum((value - mean) ** 2 for value in every) / (len(every) - 1))
        return [(value - mean) / (std + 1e-4) for value in values]

    centred, result = [], []
    for reward, group in zip(rewards, groups, strict=True):
        members = of_group(group)
        mean = sum(members) / len(members)
        std = math.sqrt(sum((r - mean) ** 2 for r in members) / max(len(members) - 1, 1))
        others = (sum(members) - reward) / max(len(members) - 1, 1)
        centred.append(reward - mean)
        match kind:
            case "grpo":
                result.append((reward - mean) / (std + 1e-4))
            case "dr_grpo":
                result.append(reward - mean)
            case "rloo":
                result.append(reward - others if len(members) > 1 else 0.0)
            case "maxrl":
                result.append((reward - mean) / (mean + 1e-4) if mean > 0 else 0.0)
    if kind == "reinforce++":
        return whitened(rewards)
    return whitened(centred) if kind == "reinforce++_baseline" else result


def gae(rewards: Floats, values: Floats, lengths: Sequence[int], gamma: float, lam: float) -> list[float]:
    """Equation 16 written out: the sum over all later steps, not the recursion."""
    result = []
    for r, v in zip(split(rewards, lengths), split(values, lengths), strict=True):
        following = [*v[1:], 0.0]
        deltas = [reward + gamma * after - value for reward, after, value in zip(r, following, v, strict=True)]
        result += [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]
    return result


def aggregate(kind: str, losses: Floats, lengths: Sequence[int], constant: int) -> float:
    parts = split(losses, lengths)
    match kind:
        case "token":
            return sum(losses) / len(losses)
        case "sequence":
            return sum(sum(part) / len(part) for part in parts) / len(parts)
        case _:
            return sum(sum(part) / constant for part in parts) / len(parts)
