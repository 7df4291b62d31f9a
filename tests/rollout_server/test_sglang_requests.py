"""SGLang's engine where no SGLang is needed: versions of tokens, arguments, staged memory, layout of live tensors."""

import base64
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from configs.loading import load
from rollout_server.engines import staging_in
from rollout_server.engines.base import EngineError, Partial, Sampling
from rollout_server.engines.sglang.arguments import DECIDED, LOADER, memory_share, server_arguments
from rollout_server.engines.sglang.requests import (
    AnswerPart,
    ResumableAnswer,
    versions_from_boundaries,
    versions_from_spans,
)
from rollout_server.engines.sglang.update.layout import LiveSlice, live_slices
from rollout_server.engines.sglang.update.live import RankWeights, _covered
from rollout_server.engines.sglang.update.orders import StagingFolder
from slipstream.families.experts import Experts
from slipstream.families.sizes import Sizes
from weight_bus.digest import TensorSlice as Piece
from weight_bus.digest import add, slice_digest, slice_digests

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
def test_spans_give_each_token_its_version_and_one_that_may_be_booked_late_the_older(versions: list[int]) -> None:
    first = {span["start"] for span in spans_of(versions)} - {0}
    older = [versions[i - 1] if i in first else version for i, version in enumerate(versions)]
    for doubt, expected in ((0, versions), (1, older)):
        assert versions_from_spans(spans_of(versions), len(versions), doubt).tolist() == expected


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


@given(count=st.integers(1, 60), updates=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 16)), max_size=4))
def test_without_spans_no_token_is_called_newer_than_it_is(count: int, updates: list[tuple[int, int]]) -> None:
    """`updates`: where each began, and how many tokens in doubt there were."""
    part = AnswerPart(rid="a", version=3)
    true = np.full(count, 3)
    for version, (began, doubt) in enumerate(sorted(updates), start=4):
        true[began:] = version
        part.boundaries.append((began + doubt, version))
    found = versions_from_boundaries(part, count)
    assert (found <= true).all() and (np.diff(found) >= 0).all()
    last = max((first for first, _ in part.boundaries), default=0)
    assert (found[last:] == true[last:]).all()


# ---- arguments --------------------------------------------------------------------------------------------

DEFAULTS = ["log_level", "attention_backend", "max_total_tokens", "sleep_on_idle", "stream_interval", "random_seed"]
KNOWN = [*DECIDED, *DEFAULTS, "disable_radix_cache", "schedule_policy"]


def arguments(folder: Path, *overrides: str, known: list[str] = KNOWN, **described: Any) -> dict[str, Any]:
    keys = "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"
    described = {
        "model_type": "llama",
        "max_position_embeddings": 32,
        **dict.fromkeys(keys, 4),
        "intermediate_size": 64,
        **described,
    }
    (folder / "config.json").write_text(json.dumps(described))
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


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.sglang.max_totl_tokens=9", r"no such argument; did you mean 'rollout\.sglang\.max_total_tokens'"),
        (
            "rollout.sglang.qqq=9",
            r"rollout\.sglang\.qqq: the installed SGLang has no such argument \[SLIP-ENGINE-01\]$",
        ),
        ("rollout.sglang.trust_remote_code=true", r"trust_remote_code: Slipstream decides it; set nothing: code in"),
        ("rollout.sglang.incremental_streaming_output=true", r"incremental_streaming_output: Slipstream decides it"),
        ("rollout.sglang.preferred_sampling_params=x", r"preferred_sampling_params: Slipstream decides it"),
        ("rollout.max_new_tokens=17", r"= 33, and the model has max_position_embeddings 32"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=said):
        arguments(tmp_path, override)


def test_routed_experts_are_asked_for_where_they_are_replayed(tmp_path: Path) -> None:
    moe = {"model_type": "qwen3_moe"}
    assert arguments(tmp_path, **moe)["enable_return_routed_experts"] is True
    for override, described in (("algorithm.routing_replay=false", moe), ("run.seed=1", {})):
        assert "enable_return_routed_experts" not in arguments(tmp_path, override, **described)
    with pytest.raises(EngineError, match="does not return the routed experts of qwen3_moe"):
        arguments(tmp_path, known=[name for name in KNOWN if name != "enable_return_routed_experts"], **moe)


LAYERS = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"model_type": "mistral", "sliding_window": 25}, "'mistral' model whose attention sees 25 tokens"),
        ({"model_type": "mistral", "sliding_window": 26}, ""),
        ({"model_type": "mistral"}, ""),
        ({"model_type": "qwen3", "sliding_window": 8, "layer_types": LAYERS}, "sees 8 tokens"),
        ({"model_type": "gemma3_text", "sliding_window": 8, "layer_types": LAYERS}, ""),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"model_type": "phi3", "rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, ""),
        ({"model_type": "gemma2"}, "does not compute attn_logit_softcapping on a CPU"),
        ({"model_type": "qwen3_moe"}, ""),
        ({"model_type": "qwen3_moe", "tie_word_embeddings": True}, "'qwen3_moe' model an output head apart"),
        ({"intermediate_size": 48}, "on a CPU SGLang widens MLPs of 48 to a multiple of 32 for each of 1 ranks"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 80}, "widens MLPs of 80"),
        ({"model_type": "olmoe"}, "does not return the routed experts of olmoe; set it to false"),
        ({"model_type": "olmoe", "num_key_value_heads": 2}, "olmoe has as many key/value heads as others"),
    ],
)
def test_what_sglang_would_compute_unlike_the_learner_is_refused(described: Any, said: str, tmp_path: Path) -> None:
    if not said:
        arguments(tmp_path, **described)
        return
    with pytest.raises(EngineError, match=said):
        arguments(tmp_path, **described)


# ---- what comes back ----------------------------------------------------------------------------------------


def ended(reason: dict[str, Any] | None, ids: list[int]) -> dict[str, Any]:
    """The output of a part as SGLang returns it."""
    pairs = [(-token / 8, token, None) for token in ids]
    return {"output_ids": ids, "meta_info": {"finish_reason": reason, "output_token_logprobs": pairs}}


EXPERTS = Experts(layers=2, chosen=2, number=6)


def an_answer() -> ResumableAnswer:
    return ResumableAnswer("lease", [1, 2, 3], Sampling(max_new_tokens=8), pinned=None)


def test_parts_add_up_to_an_answer() -> None:
    answer = an_answer()
    assert answer.take(AnswerPart(rid="a", version=3), ended({"type": "abort"}, [5, 6]), 0) == (2, "abort")
    assert answer.take(AnswerPart(rid="b", version=4), ended({"type": "stop"}, [7]), 0) == (1, "stop")
    done = answer.completion("stop")
    assert done.token_ids.tolist() == [5, 6, 7] and done.versions.tolist() == [3, 3, 4]


@pytest.mark.parametrize("late_tokens", [0, 1])
@pytest.mark.parametrize("experts", [None, EXPERTS])
def test_tokens_of_weights_without_a_proof_are_sampled_again(experts: Experts | None, late_tokens: int) -> None:
    """Also where they seemed to end the answer, and where a second load failed later.

    With overlapped scheduling too: whether a token was on its way when the order came is not known.
    """
    answer = ResumableAnswer("lease", [1, 2, 3], Sampling(max_new_tokens=8), pinned=None, experts=experts)
    part = answer.part = AnswerPart(rid="a", version=3)
    answer.met(4, {"a": 2}, late_tokens, tainted=True)
    answer.met(4, {"a": 3}, late_tokens, tainted=True)
    answer.met(4, {"b": 1}, late_tokens, tainted=True)
    assert part.interrupted and part.boundaries == [(2 + late_tokens, 4), (3 + late_tokens, 4)]
    output = routed({"type": "stop"}, [5, 6, 7], 5, 3) if experts else ended({"type": "stop"}, [5, 6, 7])
    assert answer.take(part, output, late_tokens) == (2, "abort") and answer.at_its_end() is None
    rest = routed({"type": "stop"}, [8], 5, 4) if experts else ended({"type": "stop"}, [8])
    answer.take(AnswerPart(rid="b", version=4), rest, late_tokens)
    done = answer.completion("stop")
    assert (done.token_ids.tolist(), done.versions.tolist()) == ([5, 6, 8], [3, 3, 4])
    assert done.routing is None or done.routing[:, 0, 0].tolist() == [3, 3, 3, 3, 4]


def test_a_part_that_an_update_ends_in_the_queue_is_routed_by_the_next_one() -> None:
    """SGLang says nothing of experts where it aborts what waits; the tokens were sampled before."""
    answer = ResumableAnswer("lease", [1, 2, 3], Sampling(max_new_tokens=8), pinned=None, experts=EXPERTS)
    answer.take(AnswerPart(rid="a", version=3, interrupted=True), ended({"type": "abort"}, [5, 6]), 0)
    answer.take(AnswerPart(rid="b", version=4), routed({"type": "stop"}, [7], 5, 4), 0)
    rows = answer.completion("stop").routing
    assert rows is not None and rows[:, 0, 0].tolist() == [4] * 5


def test_a_request_that_sglang_refuses_is_an_error_with_its_reason() -> None:
    refusal = {"type": "abort", "status_code": 400, "message": "too long for max_total_tokens"}
    with pytest.raises(EngineError, match="3 prompt tokens: too long for max_total_tokens"):
        an_answer().take(AnswerPart(rid="a", version=0), ended(refusal, []), 0)
    interrupted = AnswerPart(rid="b", version=0, interrupted=True)
    assert an_answer().take(interrupted, ended(refusal, []), 0) == (0, "abort")


def test_progress_reaches_over_prefix_parts_and_what_runs() -> None:
    begun = Partial(token_ids=np.array([9]), logprobs=np.array([-0.5]), versions=np.array([2]))
    answer = ResumableAnswer("lease", [1], Sampling(max_new_tokens=8), pinned=None, prefix=begun)
    answer.take(AnswerPart(rid="a", version=3, interrupted=True), ended({"type": "abort"}, [5, 6]), 0)
    output = ended(None, [7, 8, 3])  # SGLang has made it longer since
    answer.part = AnswerPart(rid="b", version=4, seen=2, boundaries=[(1, 5)], output=output)
    for since in range(7):
        part = answer.progress(since)
        assert part.token_ids.tolist() == [9, 5, 6, 7, 8][since:]
        assert part.logprobs.tolist() == [-0.5, -0.625, -0.75, -0.875, -1.0][since:]
        assert part.versions.tolist() == [2, 3, 3, 4, 5][since:]
        assert part.finish_reason is None
    answer.part, answer.ended = None, "length"
    assert (answer.progress(1).token_ids.tolist(), answer.progress(1).finish_reason) == ([5, 6], "length")


def routed(reason: Any, ids: list[int], positions: int, pass_: int) -> dict[str, Any]:
    """With routing of so many positions, each [[pass, position], [pass, 0]], as 0.5.20 has it."""
    rows = np.array([[[pass_, position], [pass_, 0]] for position in range(positions)], np.int32)
    output = ended(reason, ids)
    output["meta_info"]["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
    return output


def test_each_position_keeps_the_experts_of_the_part_that_sampled_behind_it() -> None:
    """A prefix of another server comes without, and gets those of the part that reads it."""
    begun = Partial(token_ids=np.array([9]), logprobs=np.array([-0.5]), versions=np.array([2]))
    for prefix, expected in ((None, [3, 3, 3, 3, 4]), (begun, [3, 3, 3, 3, 3, 4])):
        answer = ResumableAnswer(
            "lease", [1, 2, 3], Sampling(max_new_tokens=8), pinned=None, prefix=prefix, experts=EXPERTS
        )
        held = 0 if prefix is None else 1
        answer.take(AnswerPart(rid="a", version=3), routed({"type": "abort"}, [5, 6], 4 + held, 3), 0)
        answer.take(AnswerPart(rid="b", version=4), routed({"type": "abort"}, [], 0, 4), 0)
        answer.take(AnswerPart(rid="b", version=4), routed({"type": "stop"}, [7], 5 + held, 4), 0)
        rows = answer.completion("stop").routing
        assert rows is not None and rows.dtype == np.uint8 and rows[:, 0, 0].tolist() == expected
        assert rows[:, 0, 1].tolist() == list(range(len(expected)))


@pytest.mark.parametrize("positions", [None, 3, 5])
def test_routing_that_is_missing_or_of_other_positions_is_an_error(positions: int | None) -> None:
    answer = ResumableAnswer("lease", [1, 2, 3], Sampling(max_new_tokens=8), pinned=None, experts=EXPERTS)
    output = ended({"type": "stop"}, [5, 6]) if positions is None else routed({"type": "stop"}, [5, 6], positions, 0)
    with pytest.raises(EngineError, match=r"SGLang returned .* routed experts"):
        answer.take(AnswerPart(rid="a", version=3), output, 0)


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


LEAVES = """
import os, signal, torch
from rollout_server.engines.sglang.update.orders import StagingFolder
folder = StagingFolder()
folder.write_update([("a", torch.ones(1000))])
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_a_server_that_was_killed_is_removed_by_the_next_one() -> None:
    """With it the model, where it was killed in its first update: such files are memory."""
    ended = subprocess.run([sys.executable, "-c", LEAVES], stdout=subprocess.PIPE, text=True, check=False)
    left = Path(ended.stdout.strip())
    assert ended.returncode == -signal.SIGKILL and sum(f.stat().st_size for f in left.glob("memory.*")) == 4000
    other = Path(tempfile.mkdtemp(prefix="slipstream-", dir=left.parent))
    live = StagingFolder()
    try:
        assert not left.exists()
        StagingFolder().close()
        assert live.path.is_dir(), "in use"
        assert other.is_dir(), "not locked yet"
    finally:
        live.close()
        other.rmdir()


GB = 10**9


def test_the_share_of_a_gpu_leaves_room_for_a_staged_update() -> None:
    alone, beside = (memory_share(80 * GB, 16 * GB, tensor_parallel=1, staged_bytes=n * GB) for n in (0, 16))
    assert alone - beside == pytest.approx(16 / 80, abs=2e-3)
    for ranks, total, model in ((4, 80, 66), (8, 80, 141)):  # 32B and 70B, refused when each rank staged all of it
        assert memory_share(total * GB, model * GB, tensor_parallel=ranks, staged_bytes=model * GB // ranks) > 0.6


def test_what_does_not_fit_is_refused_with_what_would_mend_it() -> None:
    with pytest.raises(EngineError, match=r"take more placement\.tensor_parallel"):
        memory_share(80 * GB, 141 * GB, tensor_parallel=1, staged_bytes=0)
    assert memory_share(80 * GB, 141 * GB, tensor_parallel=4, staged_bytes=0) > 0.8
    with pytest.raises(EngineError, match=r"47.0 GB of a staged update .* take more placement\.tensor_parallel"):
        memory_share(80 * GB, 141 * GB, tensor_parallel=3, staged_bytes=47 * GB)
    for ranks in (2, 64):
        with pytest.raises(EngineError) as refused:
            memory_share(80 * GB, 141 * GB, tensor_parallel=ranks, staged_bytes=141 * GB)
        text = str(refused.value)
        assert "weight_bus.stage_in: engine" in text and "weight_bus.backend: gloo" in text
        assert "take more" not in text


def test_a_broadcast_that_hangs_longer_than_an_engine_may_be_silent_is_refused() -> None:
    bus = ("weight_bus.stage_in=engine", "weight_bus.collective_timeout_s=60", "rollout.engine_deadline_s=60")
    with pytest.raises(EngineError, match="collective_timeout_s 60, which is not below rollout"):
        staging_in(load("quickstart", ["rollout.engine=sglang", *bus]), None)  # type: ignore[arg-type]


# ---- the layout of live tensors, on models as SGLang fuses, slices and pads them -----------------------------

HIDDEN, HEADS, KV_HEADS, HEAD = 8, 4, 2, 4
VOCABULARY, PADDED = 40, 64
MLP = 8
CONFIG = LlamaConfig(
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD,
    intermediate_size=MLP,
    vocab_size=VOCABULARY,
    num_hidden_layers=1,
    tie_word_embeddings=True,
)


def part(rows: int, columns: int = HIDDEN, **attributes: Any) -> torch.nn.Module:
    """A module with a weight of zeros, and what SGLang's has besides."""
    made = torch.nn.Module()
    made.weight = torch.nn.Parameter(torch.zeros(rows, columns) if columns else torch.zeros(rows))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


class Model(torch.nn.Module):
    """One layer of everything, as SGLang has it on this rank; too few KV heads are replicated."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.config, self.model, layer = CONFIG, torch.nn.Module(), torch.nn.Module()
        self.model.embed_tokens, self.model.norm = part(PADDED // ranks, shard_indices=object()), part(HIDDEN, 0)
        layer.self_attn, layer.mlp = torch.nn.Module(), torch.nn.Module()
        rows = (HEADS // ranks + 2 * max(1, KV_HEADS // ranks)) * HEAD
        layer.self_attn.qkv_proj = part(rows, tp_rank=rank, tp_size=ranks)
        layer.self_attn.o_proj = part(HIDDEN, HEADS * HEAD // ranks)
        layer.mlp.gate_up_proj = part(2 * MLP // ranks)
        layer.mlp.down_proj = part(HIDDEN, MLP // ranks)
        layer.input_layernorm, layer.post_attention_layernorm = part(HIDDEN, 0), part(HIDDEN, 0)
        self.model.layers = torch.nn.ModuleList([layer])


FOLDER = dict(Sizes.of(CONFIG.to_dict()).tensors())
NORM, UP, KEY = "model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"


def cut_of(whole: dict[str, torch.Tensor], piece: LiveSlice) -> torch.Tensor:
    """What a slice holds of its tensor."""
    return whole[piece.name][
        tuple(slice(first, first + n) for first, n in zip(piece.start, piece.view.shape, strict=True))
    ]


def filled(ranks: int) -> tuple[dict[str, torch.Tensor], list[Model]]:
    """A folder's tensors, and the models of all ranks that hold them, written slice by slice."""
    generator = torch.Generator().manual_seed(ranks)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in FOLDER.items()}
    models = [Model(rank, ranks) for rank in range(ranks)]
    for model in models:
        for piece in live_slices(model, FOLDER.items()):
            piece.view.copy_(cut_of(whole, piece))
    return whole, models


@pytest.mark.parametrize("ranks", [1, 2])
def test_digests_of_slices_add_up_over_ranks_fusions_and_padding(ranks: int) -> None:
    whole, models = filled(ranks)
    parts: dict[str, dict[tuple[int, ...], int]] = {}
    for model in models:
        assert _covered(model, live_slices(model, FOLDER.items())), "every parameter, but for padded rows"
        for piece in live_slices(model, FOLDER.items()):
            (found,) = slice_digests([Piece(piece.view, piece.full_shape, piece.start)])
            parts.setdefault(piece.name, {})[piece.start] = found
    for name, tensor in whole.items():
        assert add(list(parts[name].values())) == slice_digest(tensor), name


def test_kv_heads_with_replicas_begin_at_the_same_place() -> None:
    _, models = filled(4)
    starts = [next(p for p in live_slices(m, FOLDER.items()) if p.name == KEY).start for m in models]
    assert starts == [(0, 0), (0, 0), (HEAD, 0), (HEAD, 0)]


def test_what_an_update_does_not_name_is_not_covered() -> None:
    (model,) = filled(1)[1]
    but_one = [shape for shape in FOLDER.items() if shape[0] != NORM]
    assert not _covered(model, live_slices(model, but_one))
    half = [shape for shape in FOLDER.items() if shape[0] != UP]
    assert not _covered(model, live_slices(model, half)), "half of a fused tensor"
    model.model.norm.bias = torch.nn.Parameter(torch.zeros(HIDDEN))
    assert not _covered(model, live_slices(model, FOLDER.items()))


def test_slices_are_of_one_model_and_its_tensors() -> None:
    whole, (model,) = filled(1)
    live = RankWeights(model, FOLDER.items())
    assert [digest for *_, digest in live.digests()] == [slice_digest(whole[name]) for name in FOLDER]
    assert live.are_of(model, FOLDER.items(), {})
    assert not live.are_of(filled(1)[1][0], FOLDER.items(), {})
    assert not live.are_of(model, list(FOLDER.items())[1:], {})
