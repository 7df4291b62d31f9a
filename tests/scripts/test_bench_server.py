"""The benchmarks' rollout server: what an update costs the probe. Forced lengths: tests/rollout_server."""

import pytest

from learner.learner import Learner
from rollout_server.engines.sglang.engine import SGLangEngine
from rollout_server.engines.sglang.process import SGLangProcess
from rollout_server.generate import Generator
from scripts.bench.server import ForcedLengths, ProbedEngine, ProbedProcess, TokenGaps
from scripts.bench.train import BenchLearner


def test_the_gap_over_an_update_stands_apart_from_the_others() -> None:
    gaps = TokenGaps()
    assert gaps.claim("a") and not gaps.claim("b") and gaps.is_probe("a")
    for at in (1.0, 1.01, 1.02, 1.03):
        gaps.token(at)
    gaps.resume()
    gaps.token(1.09)
    gaps.token(1.10)
    found = gaps.detail()
    assert found["token_gap_ms_p50"] == pytest.approx(10)
    assert found["pause_ms_p50"] == found["pause_ms_max"] == found["pause_ms_last"] == pytest.approx(50)
    assert found["pause_samples"] == 1


def test_an_update_between_two_probes_is_no_gap() -> None:
    gaps = TokenGaps()
    gaps.claim("a")
    gaps.token(1.0)
    gaps.release()
    gaps.resume()
    assert gaps.claim("b")
    gaps.token(5.0)
    gaps.token(5.01)
    assert gaps.detail()["pause_samples"] == 0 and gaps.detail()["token_gap_ms_p50"] == pytest.approx(10)


@pytest.mark.parametrize(
    ("variant", "names"),
    [
        (BenchLearner, {"update", "commit", "checkpoint_if_due", "finish", "wait_for_broadcast", "span"}),
        (ForcedLengths, {"sample", "abort", "running_tokens", "progress", "sampling"}),
        (ProbedProcess, {"sampling_parameters", "generate", "resume"}),
        (ProbedEngine, {"health"}),
    ],
)
def test_the_product_has_what_the_variants_replace_and_call(variant: type, names: set[str]) -> None:
    (base,) = variant.__bases__
    assert base in (Learner, Generator, SGLangProcess, SGLangEngine)
    assert names <= vars(base).keys(), "or the variant measures something else"
