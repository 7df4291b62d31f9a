"""Versions of tokens, with what SGLang records and without; arguments that it is given. No SGLang is needed here."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.loading import load
from rollout_server.engines import staging_in
from rollout_server.engines.base import EngineError, Sampling
from rollout_server.engines.sglang.arguments import DECIDED, LOADER, memory_share, server_arguments
from rollout_server.engines.sglang.requests import (
    Answer,
    Part,
    tokens_of,
    versions_from_boundaries,
    versions_from_spans,
)
from rollout_server.engines.sglang.update.orders import StagingFolder

TRUE_VERSIONS = st.lists(st.integers(0, 6), min_size=1, max_size=40).map(sorted)


def spans_of(versions: list[int]) -> list[dict[str, Any]]:
    """What SGLang 0.5.20 puts into meta_info["weight_versions"]."""
    spans, start = [], 0
    for version, run in itertools.groupby(versions):
        end = start + len(list(run))
        spans.append({"version": str(version), "start": start, "end": end})
        start = end
    return spans


# ---- versions ---------------------------------------------------------------------------------------------


@given(TRUE_VERSIONS)
def test_spans_give_each_token_its_version(versions: list[int]) -> None:
    assert versions_from_spans(spans_of(versions), len(versions), 0).tolist() == versions


@given(TRUE_VERSIONS)
def test_a_token_that_may_have_been_booked_late_gets_the_older_version(versions: list[int]) -> None:
    found = versions_from_spans(spans_of(versions), len(versions), 1).tolist()
    first = {span["start"] for span in spans_of(versions)} - {0}
    expected = [versions[i - 1] if i in first else version for i, version in enumerate(versions)]
    assert found == expected


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([{"version": "3", "start": 0, "end": 2}], "do not cover 4 tokens"),
        ([{"version": "3", "start": 1, "end": 4}], "do not cover 4 tokens"),
        ([{"version": "default", "start": 0, "end": 4}], "'default', which is not ours"),
    ],
)
def test_spans_that_say_too_little_are_refused(spans: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        versions_from_spans(spans, 4, 0)


@given(
    count=st.integers(1, 60),
    updates=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 16)), max_size=4),
)
def test_without_spans_no_token_is_called_newer_than_it_is(count: int, updates: list[tuple[int, int]]) -> None:
    """`updates`: where each began, and how many tokens in doubt there were."""
    part = Part(rid="a", version=3)
    true = np.full(count, 3)
    for version, (began, doubt) in enumerate(sorted(updates), start=4):
        true[began:] = version
        part.boundaries.append((began + doubt, version))
    found = versions_from_boundaries(part, count)
    assert (found <= true).all() and (np.diff(found) >= 0).all()
    last = max((first for first, _ in part.boundaries), default=0)
    assert (found[last:] == true[last:]).all()


# ---- outputs ----------------------------------------------------------------------------------------------


def test_tokens_and_logprobs_of_an_output() -> None:
    meta = {"output_token_logprobs": [(-0.5, 7, None), (-1.5, 9, None)]}
    assert tokens_of({"output_ids": [7, 9], "meta_info": meta}) == ([7, 9], [-0.5, -1.5])
    assert tokens_of({"output_ids": [], "meta_info": {}}) == ([], [])  # aborted before it ran
    with pytest.raises(EngineError, match="3 tokens and 2 logprobs"):
        tokens_of({"output_ids": [7, 9, 1], "meta_info": meta})


# ---- arguments --------------------------------------------------------------------------------------------

DEFAULTS = ["log_level", "attention_backend", "max_total_tokens", "sleep_on_idle", "stream_interval", "random_seed"]
KNOWN = [*DECIDED, *DEFAULTS, "disable_radix_cache", "schedule_policy"]


def arguments(folder: Path, *overrides: str, known: list[str] = KNOWN) -> dict[str, Any]:
    (folder / "config.json").write_text('{"max_position_embeddings": 32}')
    config = load("quickstart", ["rollout.engine=sglang", f"model.path={folder}", *overrides])
    return server_arguments(config, known=known, cuda=False)


def test_arguments_come_from_the_configuration_and_the_pass_through_wins_over_defaults(tmp_path: Path) -> None:
    given = arguments(tmp_path, "rollout.sglang.schedule_policy=fcfs", "rollout.sglang.max_total_tokens=4096")
    assert given["schedule_policy"] == "fcfs" and given["max_total_tokens"] == 4096
    assert given["model_path"] == str(tmp_path) and given["custom_weight_loader"] == [LOADER]
    assert (given["device"], given["attention_backend"], given["sleep_on_idle"]) == ("cpu", "torch_native", True)


def test_an_engine_stays_on_the_loopback_interface_with_keys_of_its_own(tmp_path: Path) -> None:
    one, other = arguments(tmp_path), arguments(tmp_path)
    assert one["host"] == "127.0.0.1" and one["trust_remote_code"] is False
    keys = {one["api_key"], one["admin_api_key"], other["api_key"], other["admin_api_key"]}
    assert len(keys) == 4 and min(map(len, keys)) >= 32


def test_defaults_that_an_older_sglang_does_not_know_are_left_out(tmp_path: Path) -> None:
    assert "sleep_on_idle" not in arguments(tmp_path, known=[name for name in KNOWN if name != "sleep_on_idle"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.sglang.max_totl_tokens=9", r"no such argument; did you mean 'rollout\.sglang\.max_total_tokens'"),
        ("rollout.sglang.qqq=9", r"rollout\.sglang\.qqq: the installed SGLang has no such argument$"),
        ("rollout.sglang.trust_remote_code=true", r"trust_remote_code: Slipstream decides it; set nothing: code in"),
        ("rollout.sglang.incremental_streaming_output=true", r"incremental_streaming_output: Slipstream decides it"),
        (
            "rollout.sglang.preferred_sampling_params=x",
            r"preferred_sampling_params: Slipstream decides it",
        ),
        ("rollout.max_new_tokens=17", r"max_new_tokens = 33, and the model has max_position_embeddings 32"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=said):
        arguments(tmp_path, override)


# ---- what comes back ----------------------------------------------------------------------------------------


def ended(reason: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    """The output of a part as SGLang returns it."""
    pairs = [(-0.5, token, None) for token in ids]
    return {"output_ids": ids, "meta_info": {"finish_reason": reason, "output_token_logprobs": pairs}}


def an_answer() -> Answer:
    return Answer("lease", [1, 2, 3], Sampling(max_new_tokens=8), pinned=None)


def test_parts_add_up_to_an_answer() -> None:
    answer = an_answer()
    assert answer.take(Part(rid="a", version=3), ended({"type": "abort"}, [5, 6]), 0) == (2, "abort")
    assert answer.take(Part(rid="b", version=4), ended({"type": "stop"}, [7]), 0) == (1, "stop")
    done = answer.completion("stop")
    assert done.token_ids.tolist() == [5, 6, 7] and done.versions.tolist() == [3, 3, 4]


def test_a_request_that_sglang_refuses_is_an_error_with_its_reason() -> None:
    refusal = {"type": "abort", "status_code": 400, "message": "too long for max_total_tokens"}
    with pytest.raises(EngineError, match="3 prompt tokens: too long for max_total_tokens"):
        an_answer().take(Part(rid="a", version=0), ended(refusal, []), 0)
    interrupted = Part(rid="b", version=0, interrupted=True)
    assert an_answer().take(interrupted, ended(refusal, []), 0) == (0, "abort")


# ---- the staging folder -------------------------------------------------------------------------------------


def test_memory_leaves_no_file_behind_and_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StagingFolder()
    try:
        folder.write_update([("a", torch.ones(1000))])
        assert [path.stat().st_size for path in folder.path.glob("memory.*")] == [4000]
        folder.mapped_by_all()
        assert not list(folder.path.glob("memory.*"))
        folder.write_update([("a", torch.zeros(1000))])  # the same memory again, without its file

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(EngineError, match="No space left on device; enlarge it"):
            folder.write_update([("a", torch.zeros(2000))])
    finally:
        folder.close()
    assert not folder.path.exists()


GB = 10**9


def test_the_share_of_a_gpu_leaves_room_for_a_staged_update() -> None:
    alone, beside = (memory_share(80 * GB, 16 * GB, tensor_parallel=1, staged=staged) for staged in (False, True))
    assert alone - beside == pytest.approx(16 / 80, abs=2e-3)


@pytest.mark.parametrize("tensor_parallel", [2, 8, 64])
def test_what_more_tensor_parallelism_cannot_mend_is_refused_with_the_reason(tensor_parallel: int) -> None:
    with pytest.raises(EngineError) as refused:
        memory_share(80 * GB, 141 * GB, tensor_parallel=tensor_parallel, staged=True)
    text = str(refused.value)
    assert "Staging is not divided over tensor parallelism" in text and "weight_bus.apply: direct" in text
    assert "take more" not in text


def test_an_engine_whose_own_weights_do_not_fit_is_told_to_divide_them() -> None:
    with pytest.raises(EngineError, match=r"take more placement\.tensor_parallel"):
        memory_share(80 * GB, 141 * GB, tensor_parallel=1, staged=False)
    assert memory_share(80 * GB, 141 * GB, tensor_parallel=4, staged=False) > 0.8


def test_a_broadcast_that_hangs_longer_than_an_engine_may_be_silent_is_refused() -> None:
    bus = ("weight_bus.stage_in=engine", "weight_bus.collective_timeout_s=60", "rollout.engine_deadline_s=60")
    with pytest.raises(EngineError, match="collective_timeout_s 60, which is not below rollout"):
        staging_in(load("quickstart", ["rollout.engine=sglang", *bus]), None)  # type: ignore[arg-type]
