"""Every loss, correction, advantage, KL estimator and aggregation against its reference and finite differences."""

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import ConfigError, load
from configs.algorithm import Algorithm
from configs.errors import BadValue
from configs.loading import inline
from configs.variants import Choice
from learner import rules
from learner.advantages import ADVANTAGES, AdvantageInputs, advantages_of, build_advantage
from learner.advantages.gae import gae
from learner.corrections import CORRECTIONS, Rho, build_correction, within
from learner.losses import LOSSES, Loss, LossFacts, LossInputs, LossOutput, build_loss
from learner.objective.aggregation import token_weights
from learner.objective.kl import ESTIMATORS, estimate
from learner.trainer import objective_of
from slipstream.check import checks
from tests.learner import algorithm_reference as reference

LENGTHS = (5, 1, 9, 3, 7)
LOSS_REFERENCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ppo_clip": (functools.partial(reference.ppo_clip, dual=0.0), {}),
    "ppo_clip, dual": (functools.partial(reference.ppo_clip, dual=3.0), {"clip_dual": 3.0}),
    "gspo": (reference.gspo, {}),
    "cispo": (reference.cispo, {}),
    "sapo": (reference.sapo, {}),
    "dppo_tv": (reference.dppo_tv, {}),
    "policy_gradient": (reference.policy_gradient, {}),
}
STEP = 1e-6


def row(seed: int, spread: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprobs in training, proximal logprobs and advantages of a row, float64."""
    random = np.random.default_rng(seed)
    logprobs = -random.exponential(1.0, sum(LENGTHS))
    proximal = np.minimum(logprobs + random.normal(0, spread, sum(LENGTHS)), -1e-3)
    advantages = np.repeat(random.normal(0, 1, len(LENGTHS)), LENGTHS)
    return torch.tensor(logprobs), torch.tensor(proximal), torch.tensor(advantages)


def loss_of(value: Any) -> Loss:
    return build_loss(Choice.of(value))[0]


def run(name: str, logprobs: torch.Tensor, proximal: torch.Tensor, advantages: torch.Tensor, **also: Any) -> LossOutput:
    """The loss of LOSS_REFERENCES with its options over a row of LENGTHS."""
    loss = loss_of({name.partition(",")[0]: LOSS_REFERENCES[name][1] | also})
    lengths, groups = torch.tensor(LENGTHS), torch.arange(len(LENGTHS))
    return loss(
        LossInputs(logprobs=logprobs, proximal_logprobs=proximal, advantages=advantages, lengths=lengths, groups=groups)
    )


def test_every_loss_has_a_reference() -> None:
    assert {name.partition(",")[0] for name in LOSS_REFERENCES} == set(LOSSES.built_in)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", LOSS_REFERENCES)
@pytest.mark.parametrize("spread", [2e-4, 0.3, 3.0])
def test_a_loss_and_its_gradient(name: str, aggregation: str, spread: float) -> None:
    of_reference, _ = LOSS_REFERENCES[name]
    weights = torch.tensor(np.repeat(token_weights(aggregation, np.array(LENGTHS, np.int32), constant=16), LENGTHS))
    for seed in range(3):
        logprobs, proximal, advantages = row(seed, spread)
        moving = logprobs.clone().requires_grad_()
        output = run(name, moving, proximal, advantages)

        def total(at: list[float]) -> float:
            held, prox, adv = logprobs.tolist(), proximal.tolist(), advantages.tolist()  # noqa: B023
            return reference.aggregate(aggregation, of_reference(at, held, prox, adv, LENGTHS), LENGTHS, 16)

        value = (output.loss * weights).sum()
        value.backward()
        assert value.item() == pytest.approx(total(logprobs.tolist()), rel=1e-6, abs=1e-7)
        assert moving.grad is not None
        if name == "gspo" and aggregation != "sequence":
            continue  # the token form has the gradient of the objective over answers only where answers are averaged
        for index in range(sum(LENGTHS)):
            up, down = logprobs.tolist(), logprobs.tolist()
            up[index] += STEP
            down[index] -= STEP
            slope = (total(up) - total(down)) / (2 * STEP)
            assert moving.grad[index].item() == pytest.approx(slope, rel=1e-4, abs=1e-7), (seed, index)


@pytest.mark.parametrize("name", sorted(LOSS_REFERENCES.keys() - {"cispo", "sapo", "policy_gradient"}))
@pytest.mark.parametrize("spread", [2e-4, 0.3, 3.0])
def test_clipped_are_the_tokens_whose_gradient_the_loss_takes_away(name: str, spread: float) -> None:
    logprobs, proximal, advantages = row(1, spread)
    moving = logprobs.requires_grad_()
    output = run(name, moving, proximal, advantages, **({"kl": 0.0} if name == "dppo_tv" else {}))
    output.loss.sum().backward()
    assert moving.grad is not None and output.clipped is not None
    assert output.clipped.tolist() == (moving.grad == 0).tolist()


def test_a_rare_token_weighs_no_more_than_the_cap_of_dppo_tv() -> None:
    """Sampled at 1e-6, now at .15: within delta, at a ratio of 1.5e5."""
    moving = torch.tensor([math.log(0.15)], requires_grad=True)
    one = torch.ones(1, dtype=torch.int64)
    proximal = torch.tensor([math.log(1e-6)])
    inputs = LossInputs(logprobs=moving, proximal_logprobs=proximal, advantages=torch.ones(1), lengths=one, groups=one)
    loss_of({"dppo_tv": {"kl": 0.0}})(inputs).loss.sum().backward()
    assert moving.grad is not None and moving.grad.item() == pytest.approx(-20.0)


def test_cispo_counts_the_tokens_whose_weight_it_bounds() -> None:
    logprobs, proximal, advantages = row(1, 3.0)
    output = run("cispo", logprobs, proximal, advantages)
    assert output.clipped is not None and 0 < output.clipped.sum() < sum(LENGTHS)
    assert output.clipped.tolist() == ((logprobs - proximal).exp() > 5.0).tolist()


@pytest.mark.parametrize("name", sorted(LOSS_REFERENCES.keys() - {"policy_gradient"}))
def test_a_ratio_ends_where_it_has_no_meaning_any_more(name: str) -> None:
    """e^20, and e^10 for that of an answer; in float32, where e^100 is infinite."""
    ends = 10.0 if name == "gspo" else 20.0
    proximal, advantages = torch.full((sum(LENGTHS),), -1000.0), torch.full((sum(LENGTHS),), -1.0)
    clip: dict[str, Any] = {"clip_high": 1e12} if name == "cispo" else {}
    at_end, beyond = (run(name, proximal + apart, proximal, advantages, **clip).loss for apart in (ends, 900.0))
    before = run(name, proximal + ends / 2, proximal, advantages, **clip).loss
    if name == "cispo":  # its loss has the logprob as a factor
        at_end, beyond = at_end / (ends - 1000), beyond / -100
    assert beyond.isfinite().all() and torch.allclose(at_end, beyond)
    assert name in ("ppo_clip, dual", "sapo") or not torch.allclose(before, beyond), "it still counts here"


OWN = """
from learner.losses import LossInputs, declare

def plain(inputs: LossInputs, *, scale: float = 1.0):
    return -scale * inputs.advantages * inputs.logprobs

@declare(ratio="token")
def weighted(inputs):
    return plain(inputs)

@declare(ratio="answer", refuses=lambda config, options: "not at lag 3" if config.replay.async_lag == 3 else "")
def of_answers(inputs):
    return plain(inputs).mean()
"""


@pytest.mark.parametrize(
    ("loss", "also", "refused"),
    [
        ("plain", ["replay.async_lag=1"], "algorithm.loss"),
        ("plain", ["replay.async_lag=8", "algorithm.correction=token_tis"], ""),
        ("plain", ["replay.async_lag=0"], ""),
        ("plain", ["algorithm.proximal=log_linear", "algorithm.correction=token_tis"], "algorithm.proximal"),
        ("weighted", ["replay.async_lag=8"], ""),
        ("weighted", ["algorithm.correction=token_tis"], "algorithm.correction"),
        ("weighted", ["algorithm.proximal=current"], "algorithm.proximal"),
        ("of_answers", ["replay.async_lag=3"], "algorithm.loss: '.*of_answers': not at lag 3"),
    ],
)
def test_a_loss_from_a_file_counts_as_what_it_declares(
    loss: str, also: list[str], refused: str, tmp_path: Path
) -> None:
    """By the launcher and by the learner."""
    (tmp_path / "own.py").write_text(OWN)
    config = load("quickstart", [f"algorithm.loss={tmp_path}/own.py:{loss}", *also])
    if not refused:
        assert list(checks.algorithm(checks.Subject(config))) and objective_of(config)
        return
    with pytest.raises(ConfigError, match=refused):
        list(checks.algorithm(checks.Subject(config)))
    with pytest.raises(ConfigError, match=refused):
        objective_of(config)


def test_a_loss_from_a_file_is_built_with_its_options_and_what_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN + "number = 3\n")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name")
    tokens = {"proximal_logprobs": torch.zeros(2), "advantages": torch.ones(2)}
    inputs = LossInputs(
        logprobs=torch.tensor([-1.0, -3.0]), **tokens, lengths=torch.tensor([2]), groups=torch.tensor([0])
    )
    assert loss_of({f"{path}:plain": {"scale": 2}})(inputs).loss.tolist() == [2.0, 6.0]
    for value, said in {
        f"{tmp_path}/other.py:twice": "algorithm.loss: '.*': no file '.*other.py'",
        f"{tmp_path}/broken.py:x": "broken.py fails: ModuleNotFoundError: .*nothing_of_that_name",
        f"{path}:weigted": "own.py has no function 'weigted'; did you mean 'weighted'",
        f"{path}:number": "own.py has no function 'number'",
        "ppo_klip": "algorithm.loss: 'ppo_klip' names no function; did you mean 'ppo_clip'",
    }.items():
        with pytest.raises(BadValue, match=said):
            loss_of(value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("loss", {"ppo_clip": {"clip_hi": 1}}, "'ppo_clip' has no option 'clip_hi'; did you mean 'clip_high'"),
        ("loss", {"ppo_clip": {"clip_low": 2}}, "option 'clip_low' of 'ppo_clip': .* less than or equal to 1"),
        ("loss", {"ppo_clip": {"clip_dual": 1}}, "option 'clip_dual' of 'ppo_clip': .* at 1, so none has a gradient"),
        ("loss", {"policy_gradient": {"clip_low": 0.1}}, "'policy_gradient' has no option 'clip_low'; it has none"),
        ("correction", {"icepop": {"low": 1.5}}, "algorithm.correction: option 'low' of 'icepop': .* equal to 1"),
        ("correction", {"token_tis": {"low": 0.5}}, "'token_tis' has no option 'low'"),
        ("advantage", "grop", "algorithm.advantage: 'grop' names no function; did you mean 'grpo'"),
    ],
)
def test_options_that_a_variant_does_not_take_are_refused_by_name(key: str, value: Any, said: str) -> None:
    with pytest.raises(BadValue, match=said):
        rules.chosen(load("quickstart", [f"algorithm.{key}={inline(value)}"]))


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 9))
def test_weights_make_means_of_whatever_is_in_the_loss(counts: list[int], constant: int) -> None:
    tokens = np.array(counts, np.int32)
    trained = tokens[tokens > 0]
    values = np.arange(1.0, len(tokens) + 1)  # of every token of a trajectory
    for kind, want in {
        "token": np.repeat(values, tokens),
        "sequence": values[tokens > 0],
        "constant": values[tokens > 0] * trained / constant,
    }.items():
        weights = token_weights(kind, tokens, constant=constant)
        assert (weights * tokens * values).sum() == pytest.approx(want.mean() if trained.size else 0.0, rel=1e-6)
        assert not weights[tokens == 0].any()


@pytest.mark.parametrize("kind", ["none", *CORRECTIONS.built_in])
def test_a_correction(kind: str) -> None:
    correct = build_correction(Algorithm(loss="policy_gradient", correction=kind), LossFacts())
    for seed, spread in enumerate([0.003, 0.1, 0.5]):
        log_rho = np.random.default_rng(seed).normal(0, spread, sum(LENGTHS))
        weights = correct(Rho(torch.tensor(log_rho), torch.tensor(LENGTHS)))
        assert weights.tolist() == pytest.approx(reference.correction(kind, log_rho.tolist(), LENGTHS), rel=1e-9)


def test_an_answer_beyond_its_bounds_is_refused_and_one_at_them_is_not() -> None:
    lengths = torch.tensor([2, 2])
    masked = build_correction(Algorithm(loss="policy_gradient", correction="sequence_mis"), LossFacts())
    weights = masked(Rho(torch.tensor([1.0, 1.0, 0.1, 0.2]), lengths))
    assert weights.tolist() == pytest.approx([0, 0, math.exp(0.3), math.exp(0.3)])
    assert within(torch.tensor([0.49, 0.5, 2.0, 2.01]), 0.5, 2.0).tolist() == [False, True, True, False]
    far = Rho(torch.tensor([15.0, 15.0, -15.0, -15.0], dtype=torch.float64), lengths).product()
    assert far.log().tolist() == pytest.approx([20, 20, -20, -20])


def test_a_loss_of_an_installed_package_is_chosen_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_losses.py").write_text("def damped(inputs, *, most: float = 4.0):\n    return most\n")
    (tmp_path / "own-1.0.dist-info").mkdir()
    (tmp_path / "own-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    points = "[slipstream.algorithm.loss]\ndamped = own_losses:damped\n"
    (tmp_path / "own-1.0.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert LOSSES.build(Choice("damped", {"most": 3})).call(None) == 3.0
    with pytest.raises(BadValue, match="'damped' has no option 'mst'; did you mean 'most'"):
        LOSSES.build(Choice("damped", {"mst": 3}))
    with pytest.raises(BadValue, match="'dampd' names no function; did you mean 'damped'"):
        LOSSES.build(Choice("dampd"))


@pytest.mark.parametrize(
    ("key", "own", "said"),
    [
        ("loss", "def own(one):\n    return one.logprobs * one.advantages", ""),
        ("loss", "def own(one):\n    return one.logprobs.clamp_(min=-9)", ""),
        ("loss", "def own(one):\n    raise SystemExit(3)", "fails: SystemExit: 3 at /.*own.py:2; correct it"),
        ("loss", "def own():\n    return 1", "one argument and its options .too many.*; take `def own.inputs, "),
        ("loss", "def own(one, two):\n    return 1", "one argument and its options .missing a required .*'two'"),
        ("loss", "class own:\n    def __init__(self, one): ...", "is a class; take `def own.inputs, "),
        ("loss", "async def own(one):\n    return one.logprobs", "is asynchronous; take `def own.inputs, "),
        ("loss", "def own(one):\n    return one.logprobs.mean()", r"gave loss of shape \[\] for 6 tokens"),
        ("loss", "def own(one):\n    return one.logprobs / 0", "gave a loss that is not finite"),
        ("loss", "def own(one):\n    return one.logprob", "fails: AttributeError: .*at /.*own.py:2; correct it"),
        ("advantage", "def own(one):\n    return one.rewards.tolist()", ""),
        ("advantage", "def own(one):\n    return one.rewards[:1]", r"gave values of shape \[1\], .* for 16 answers"),
        ("advantage", "def own(one):\n    return one.rewards * float('nan')", "some that are not finite, for 16"),
        ("advantage", "def own(one):\n    return 0.0", r"gave values of shape \[\], .* for 16 answers"),
        ("advantage", "def own(one):\n    return ['a'] * 16", "fails: ValueError: could not convert"),
        ("advantage", "def own(one):\n    raise KeyError('x')", "fails: KeyError: 'x' at /.*own.py:2; correct it"),
        ("correction", "def own(rho):\n    return rho.log > 0", ""),
        ("correction", "def own():\n    return 1", "one argument and its options .*; take `def own.rho, "),
        ("correction", "def own(rho):\n    return rho.log[:1].exp()", r"gave weights of shape \[1\], .* for 6 tokens"),
        ("correction", "def own(rho):\n    return rho.log / 0", "some that are negative or not finite"),
        ("correction", "def own(rho):\n    return -rho.log.exp()", "some that are negative or not finite"),
        ("correction", "def own(rho):\n    return None", r"gave weights of shape \[\]"),
        ("dynamic_sampling", "def own(group):\n    return True", ""),
        ("dynamic_sampling", "def own(group, least):\n    return True", "one argument .*; take `def own.group, "),
        ("dynamic_sampling", "class own: ...", "is a class"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_before_anything_starts(
    tmp_path: Path, key: str, own: str, said: str
) -> None:
    (tmp_path / "own.py").write_text(own)
    also = [] if key == "dynamic_sampling" else ["replay.async_lag=0"]
    subject = checks.Subject(load("quickstart", [f"algorithm.{key}={tmp_path}/own.py:own", *also]))
    if not said:
        assert list(checks.algorithm(subject))
        return
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}: '.*own\.py:own' .*{said}"):
        list(checks.algorithm(subject))


def test_a_loss_for_gpus_that_fails_on_a_cpu_is_warned_of(tmp_path: Path) -> None:
    own = "def own(one):\n    raise NotImplementedError('no kernel for CPUs')\n"
    (tmp_path / "own.py").write_text(f"{own}\n\ndef wrong(one):\n    return one.logprob\n")
    sets = ["replay.async_lag=0", "placement.device=cuda", "weight_bus.backend=gloo"]
    found = {
        name: checks.algorithm(checks.Subject(load("quickstart", [*sets, f"algorithm.loss={tmp_path}/own.py:{name}"])))
        for name in ("own", "wrong")
    }
    assert [one.severity for one in found["own"]] == ["warn", "ok"]
    with pytest.raises(ConfigError, match="no attribute 'logprob'"):
        list(found["wrong"])


def test_memory_that_runs_out_in_a_loss_is_no_fault_of_it(tmp_path: Path) -> None:
    """Nor is a device that fails: another start of the learner goes on."""
    raises = "import torch\n\n\ndef own(one):\n    raise torch.OutOfMemoryError('no room')\n"
    (tmp_path / "own.py").write_text(raises)
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(f"{tmp_path}/own.py:own")(None)


def test_a_correction_of_a_loss_that_declares_a_ratio_only_masks() -> None:
    log_rho = torch.tensor([0.0, 0.5, 1.0, -1.0])
    for traits, wanted in ((LossFacts("token"), [1, 1, 0, 0]), (LossFacts(), [1, math.exp(0.5), 0, 0])):
        weights = build_correction(Algorithm(loss="own.py:x", correction="icepop"), traits)
        assert weights(Rho(log_rho, torch.tensor([4]))).tolist() == pytest.approx(wanted)


def test_a_veto_takes_the_whole_answer() -> None:
    log_rho = torch.tensor([0.0, 0.1, 0.0, math.log(1e-5), 0.0, math.log(200.0)])
    lengths = torch.tensor([2, 2, 2])
    low = build_correction(Algorithm(veto_low=1e-4), LossFacts())(Rho(log_rho, lengths))
    both = build_correction(Algorithm(veto_low=1e-4, veto_high=100.0), LossFacts())(Rho(log_rho, lengths))
    assert (low.tolist(), both.tolist()) == ([1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0])


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_kl_estimator_and_its_gradient(kind: str) -> None:
    logprobs = torch.linspace(-4, -0.1, 9, dtype=torch.float64, requires_grad=True)
    anchor = torch.linspace(-1, -3, 9, dtype=torch.float64)
    values = estimate(kind, logprobs, anchor)
    values.sum().backward()
    assert logprobs.grad is not None
    for value, slope, now, then in zip(
        values.tolist(), logprobs.grad.tolist(), logprobs.tolist(), anchor.tolist(), strict=True
    ):
        assert value == pytest.approx(min(reference.kl(kind, now, then), 10.0), rel=1e-9)
        if value < 10:
            rise = reference.kl(kind, now + STEP, then) - reference.kl(kind, now - STEP, then)
            assert slope == pytest.approx(rise / (2 * STEP), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("kind", sorted(ADVANTAGES.built_in.keys() - {"gae"}))
def test_an_advantage(kind: str) -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        groups = random.integers(0, 5, 24).astype(np.int32)
        rewards = random.random(24).astype(np.float32)
        tokens = random.integers(0, 9, 24).astype(np.int32)
        inputs = AdvantageInputs(rewards=rewards, groups=groups, loss_tokens=tokens)
        got = advantages_of(build_advantage(Algorithm(advantage=kind)), inputs)
        want = reference.advantage(kind, rewards.astype(float).tolist(), groups.tolist(), tokens.tolist())
        assert got.tolist() == pytest.approx(want, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("groups", "reward"), [(4, 0.0), (4, 0.1), (0, 0.0)])
@pytest.mark.parametrize("kind", sorted(ADVANTAGES.built_in.keys() - {"gae"}))
def test_equal_rewards_teach_nothing(kind: str, groups: int, reward: float) -> None:
    inputs = AdvantageInputs(
        rewards=np.full(3 * groups, reward, np.float32),
        groups=np.repeat(np.arange(groups, dtype=np.int32), 3),
        loss_tokens=np.arange(3 * groups, dtype=np.int32),
    )
    found = advantages_of(build_advantage(Algorithm(advantage=kind)), inputs)
    assert found.shape == (3 * groups,) and not found.any()


def test_gae_over_mixed_lengths() -> None:
    random = np.random.default_rng(0)
    rewards, values = random.normal(size=sum(LENGTHS)), random.normal(size=sum(LENGTHS))
    for gamma, lam in [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (1.0, 0.0)]:
        advantages, returns = gae(rewards, values, np.array(LENGTHS), gamma=gamma, lam=lam)
        want = reference.gae(rewards.tolist(), values.tolist(), LENGTHS, gamma, lam)
        assert advantages.tolist() == pytest.approx(want, rel=1e-9)
        assert returns.tolist() == pytest.approx(np.add(want, values).tolist(), rel=1e-9)
    none = np.zeros(0)
    assert [part.size for part in gae(none, none, np.zeros(0, np.int64), gamma=1.0, lam=1.0)] == [0, 0]
