"""The budget of a learner rank's device: what is counted, what is chosen, what is said."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from configs import load
from configs.learner import LearnerSettings
from examples.random_qwen3 import SHAPES
from learner.beside.beside import build_beside
from learner.checkpoints.parts import HostMemory, Part, tensors_of
from learner.learner import Learner
from learner.policy import logprobs, memory
from learner.policy.lane_bytes import lane_bytes
from learner.policy.memory import (
    GIB,
    Budget,
    OutOfMemory,
    Setup,
    choose,
    host_items_of,
    items_of,
    largest_microbatch,
    refusal,
    usable,
)
from learner.train import REFUSALS
from learner.trainer import Trainer, prepare
from slipstream.families.names import Place, held
from slipstream.families.sizes import Sizes
from slipstream.runtime.fingerprint import read_json
from tests.learner.recorded import batch_of, random_step
from tests.learner.tiny_models import built, make_config, save_model
from weight_bus.lanes import Slice, joined, plan_lanes
from weight_bus.packing import Packer


def setup(shape: str, **changes: Any) -> Setup:
    learner = LearnerSettings.model_validate({"compile": True} | changes.pop("learner", {}))
    return Setup(sizes=Sizes.of(SHAPES[shape]), learner=learner, **({"num_ranks": 1, "wire_bytes": 2} | changes))


def chosen(shape: str, gib: float | None, **changes: Any) -> Budget:
    return choose(setup(shape, **changes), None if gib is None else int(gib * GIB))


@pytest.mark.parametrize(("shape", "peak_gib"), [("0.6B", 27.4), ("1.7B", 53.0), ("4B", 113.3)])
def test_the_budget_is_above_the_peaks_of_an_h200_and_near(shape: str, peak_gib: float) -> None:
    """Measured with rows of up to 16,384 tokens, nothing recomputed (docs/benchmarks/learner.md)."""
    found = chosen(shape, None, learner={"recompute": "none"}, wire_bytes=0).total / GIB
    assert peak_gib < found < 1.16 * peak_gib


def test_a_refreshed_teacher_costs_a_copy_of_what_is_trained_and_two_packed_versions() -> None:
    alone, taught = (chosen("1.7B", None, refreshed=count) for count in (0, 2))
    more = {
        name: size - alone.items.get(name, 0) for name, size in taught.items.items() if alone.items.get(name) != size
    }
    packed = "packed versions (rank 0)"
    assert more == {"refreshed teachers": 2 * alone.items["float32 weights"], packed: 2 * alone.items[packed]}


def test_more_memory_buys_a_faster_way_and_what_does_not_fit_is_the_smallest() -> None:
    ways = [chosen("1.7B", gib) for gib in (200, 58, 55, 42, 1)]
    assert [way.recompute for way in ways] == ["none", "selective", "full", "full", "full"]
    assert ways[0].keeps_gathered and not ways[-1].keeps_gathered
    assert all(way.total <= gib * GIB for way, gib in zip(ways[:-1], (200, 58, 55, 42), strict=True))
    assert chosen("1.7B", None).recompute == "none"
    assert chosen("1.7B", 200, learner={"recompute": "full"}).recompute == "full", "what was asked for is done"


@pytest.mark.parametrize("gib", [24, 48, 80])
def test_the_largest_microbatch_fits_and_the_next_one_does_not(gib: int) -> None:
    available, case = usable(gib * GIB), setup("0.6B")
    tokens = largest_microbatch(case, available)
    for more, fits in ((0, True), (1024, False)):
        assert (choose(case.with_tokens(tokens + more), available).total <= available) is fits
    assert largest_microbatch(setup("8B"), GIB) == 0


def test_ranks_that_divide_experts_gather_a_block_of_them_and_tokens_count_for_each_choice() -> None:
    expert, rest = 128 * 3 * 2048 * 768, 2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 2048
    ends = 2 * 151_936 * 2048
    for ranks in (1, 8):
        learner = {"mesh": {"expert": ranks}, "recompute": "none"}
        items = items_of(setup("30B-A3B", num_ranks=8, learner=learner), Budget("none", True, False))
        gathered = 2 * (48 * (expert // ranks + rest) + ends)
        assert items["gathered weights"] == pytest.approx(gathered, rel=3e-3), "routers are counted as divided"
        assert items["float32 weights"] == 4 * (48 * (expert + rest) + ends) // 8
    choices, inside, around = 8 * 2048, 8 * 768, 2 * 4096 + 1024 + 2 * 2048 + int(1.1 * (4096 + 512))
    for ranks, kept, in_work in ((1, 0, 2 * choices + inside), (8, choices, 12 * choices + 8 * inside)):
        whole = around + 2 * inside + kept
        for recompute, of_layers in (("none", 48 * whole), ("selective", 48 * around + whole)):
            learner = {"mesh": {"expert": ranks}, "recompute": recompute}
            items = items_of(setup("30B-A3B", num_ranks=8, learner=learner), Budget(recompute, True, False))
            assert items["activations"] == pytest.approx(16_384 * 2 * (of_layers + in_work), rel=1e-3)


def test_weights_of_a_mixture_are_gathered_again_before_its_experts_are_computed_again() -> None:
    ways = []
    for tokens, gib in ((8192, 120), (8192, 110), (16_384, 110), (32_768, 110)):
        learner = {"mesh": {"expert": 8}, "max_tokens_per_microbatch": tokens}
        ways.append(chosen("30B-A3B", gib, num_ranks=8, wire_bytes=0, learner=learner))
    assert [way.recompute for way in ways] == ["none", "none", "selective", "full"]
    assert [way.keeps_gathered for way in ways[:2]] == [True, False]


def test_packed_versions_leave_the_gpu_before_layers_are_recomputed() -> None:
    given: dict[str, Any] = {"num_ranks": 8, "learner": {"compile": True, "max_tokens_per_microbatch": 8192}}
    on_gpu, on_host = (chosen("8B", 70, **given, staged_bytes=staged) for staged in (0, GIB))
    assert (on_gpu.packs_on_device, on_gpu.recompute) == (True, "full")
    assert (on_host.packs_on_device, on_host.recompute) == (False, "none")
    assert chosen("0.6B", 70, staged_bytes=GIB).packs_on_device, "where there is room, they stay"


TINY_MOE = (
    {"model_type": "qwen3_moe", "hidden_size": 128, "num_hidden_layers": 3, "num_experts": 8, "vocab_size": 512}
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 96}
    | {"num_experts_per_tok": 2, "intermediate_size": 256, "tie_word_embeddings": False}
)


@pytest.mark.parametrize(("senders", "positions"), [(2, 1), (3, 2), (4, 2), (2, 2), (2, 4), (1, 4), (8, 2)])
@pytest.mark.parametrize("model", [TINY_MOE, SHAPES["0.6B"]], ids=["moe", "0.6B"])
def test_packed_versions_are_those_of_the_lanes_that_the_fullest_rank_sends(
    model: dict[str, Any], senders: int, positions: int
) -> None:
    """Measured on the buckets themselves; of the large model, on their layout."""
    sizes = Sizes.of(model)
    wanted = [
        [Slice(p.name, "bfloat16", p.shape, p.start, p.size) for p in held(sizes, Place(rank, positions))]
        for rank in range(positions)
    ]
    lanes = plan_lanes(wanted, senders, 1 << 20)
    layouts = [joined([lane.layout for lane in lanes if lane.sender == rank]).layout for rank in range(senders)]
    measured = max(2 * layout.num_bytes for layout in layouts)
    if model is TINY_MOE:
        packers = [Packer(1 << 20, layout=layout) for layout in layouts]
        sets = [[(packer.room(into) or pytest.fail())[1] for into in (0, 1)] for packer in packers]
        measured = max(sum(bucket.nbytes for its in both for bucket in its) for both in sets)
    given = setup("0.6B", lane_bytes=lane_bytes(sizes, senders, positions, 2))
    (said,) = [size for what, size in items_of(given, Budget("none", True, False)).items() if what == "packed versions"]
    assert measured <= said <= 1.1 * measured


def test_the_budget_follows_what_travels_in_lanes() -> None:
    config, model = load("qwen3-8b-2nodes"), OF_PRESETS["qwen3-8b-2nodes"]
    given = Setup.of(config, model)
    assert config.lane_ends == (8, 1) and given.packed() == ("packed versions", 2 * given.lane_bytes)
    assert given.packed()[1] == pytest.approx(2 * 2 * given.sizes.parameters / 8, rel=0.01), "even by bytes"
    bus = config.weight_bus.model_copy(update={"delta": True})
    alone = Setup.of(config.model_copy(update={"weight_bus": bus}), model)
    assert alone.packed() == ("packed versions (rank 0)", 4 * given.sizes.parameters)


OF_PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-4b-8gpu": SHAPES["4B"],
    "qwen3-8b-2nodes": SHAPES["8B"],
    "qwen3-14b-4nodes": SHAPES["8B"] | {"hidden_size": 5120, "num_hidden_layers": 40, "intermediate_size": 17_408}
    | {"num_attention_heads": 40},
    "qwen3-30b-a3b-2nodes": SHAPES["30B-A3B"],
    "gsm8k-qwen3-0.6b-2gpu": SHAPES["0.6B"],
    "geo3k-qwen2.5-vl-3b-8gpu": {"model_type": "qwen2_5_vl", "hidden_size": 2048, "num_hidden_layers": 36}
    | {"num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 11_008, "vocab_size": 151_936}
    | {"tie_word_embeddings": True, "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420}},
}  # fmt: skip


@pytest.mark.parametrize("preset", OF_PRESETS)
def test_every_preset_fits_the_gpus_that_it_is_for(preset: str) -> None:
    config = load(preset)
    available = usable(int((config.placement.gpu_gib or 79) * GIB))
    assert choose(Setup.of(config, OF_PRESETS[preset]), available).total <= available
    assert refusal(config, OF_PRESETS[preset], available) == ""


def test_what_does_not_fit_is_refused_with_the_key_and_a_value() -> None:
    config, model = load("qwen3-8b-2nodes"), OF_PRESETS["qwen3-8b-2nodes"]
    said = refusal(config, model, usable(30 * GIB))
    assert said.startswith("learner.max_tokens_per_microbatch: 16384 tokens need ")
    assert " fit, and one trajectory may have 10240 with 8 learner ranks; lower it, or give the learner more" in said
    assert ": 16384 tokens need 31.9 GiB" in said and "; 0 fit" not in said


def test_memory_that_runs_out_ends_the_run_with_the_keys_to_set(qwen3: Path, mesh: DeviceMesh) -> None:
    config = make_config(qwen3)
    policy, _ = built(config, mesh)
    exhausted = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    assert policy.when_exhausted(RuntimeError("something else"), config) == ""
    learner = Mock(config=config, policy=policy, _first_step=nullcontext())
    learner.trainer.train_step.side_effect = exhausted
    with pytest.raises(OutOfMemory, match="with microbatches of up to 256 tokens and recompute none") as said:
        Learner.update(learner, Mock())
    assert "2.00 GiB. Take learner.max_tokens_per_microbatch=32, or learner.recompute=full" in str(said.value)
    assert OutOfMemory in REFUSALS, "a restart would meet the same batch"


def test_attention_that_pads_is_in_the_budget() -> None:
    """Of float32, odd head sizes, caps and `sdpa`, which no kernel of rows without padding takes."""
    for learner, changed, pads in (
        ({"compute_dtype": "bfloat16"}, {}, False),
        ({"compute_dtype": "float32"}, {}, True),
        ({"compute_dtype": "bfloat16", "attention": "sdpa"}, {}, True),
        ({"compute_dtype": "bfloat16"}, {"head_dim": 100}, True),
        ({"compute_dtype": "bfloat16"}, {"model_type": "gemma2"}, True),
    ):
        config = make_config(Path("unused"), placement={"device": "cuda"}, learner=learner)
        found = choose(Setup.of(config, SHAPES["0.6B"] | changed), None)
        assert ("padding of attention" in found.items) is pads, learner
        assert ("scores of attention" in found.items) is ("model_type" in changed), "they are capped"


LARGER: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 64}
LARGER |= {"num_key_value_heads": 4, "intermediate_size": 1536, "vocab_size": 512}
BESIDE: dict[str, dict[str, Any]] = {
    "a larger critic": {"critic": {"path": "large"}},
    "adapters of both": {"learner": {"lora": {"rank": 8}}, "algorithm": {"kl": "k3", "kl_coef": 0.1}},
}


@pytest.mark.parametrize("case", BESIDE)
def test_the_budget_of_ppo_is_above_the_peak_of_a_step_and_near(
    case: str, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of models whose weights are nearly everything, as the allocator of the host counts it."""
    monkeypatch.setattr(memory, "HEAD_BYTES", 0)
    folder, large = save_model(tmp_path / "model", **LARGER), LARGER | {"num_hidden_layers": 4}
    sections = {name: dict(values) for name, values in BESIDE[case].items()}
    if "critic" in sections:
        sections["critic"]["path"] = str(save_model(tmp_path / "large", **large))
    sections["algorithm"] = sections.get("algorithm", {}) | {"advantage": "gae"}
    sections["learner"] = sections.get("learner", {}) | {"max_tokens_per_microbatch": 80}
    config = make_config(folder, **sections)
    setup = Setup.of(config, read_json(folder / "config.json"))
    budget = choose(setup, None)
    assert budget.keeps_gathered and budget.whole_gradients

    made: list[Part] = []

    def a_step() -> None:
        policy, optimizer = built(config, mesh)
        batch = batch_of(random_step(3), 3, num_microbatches=3)
        trainer = Trainer(config, policy, optimizer, beside=build_beside(config, policy))
        assert max(row.input_ids.numel() for row in prepare(batch, trainer.advantage, config).rows) <= 80
        assert not trainer.train_step(batch).reason
        made.append(Part(policy, optimizer))

    peak = peak_bytes(a_step)
    print(f"{case}: {peak / 2**20:.1f} MiB, the budget has {budget.total / 2**20:.1f}: {budget.items}")
    assert peak <= budget.total <= 1.1 * peak
    copied = HostMemory().copy(tensors_of(made[0]))
    kinds = (copied.weights, *copied.moments.values())
    copies = [copy.untyped_storage() for by_name in kinds for copy in by_name.values()]
    held = sum({block.data_ptr(): block.nbytes() for block in copies}.values())
    assert held <= host_items_of(setup, budget)["copy for checkpoints"] <= 1.1 * held


def test_a_second_chunk_of_logits_takes_no_more_memory_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, vocabulary = 256, 1024
    chunk = 4 * tokens * vocabulary
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", chunk)
    weight = torch.randn(vocabulary, 8, requires_grad=True)

    def a_head(chunks: int) -> None:
        hidden = torch.randn(chunks * tokens, 8, requires_grad=True)
        found, entropy = logprobs.head_logprobs(hidden, weight, torch.zeros(len(hidden), dtype=torch.int64), 1.0)
        (found.sum() + entropy.sum()).backward()

    one, two = (peak_bytes(partial(a_head, chunks)) for chunks in (1, 2))
    assert chunk < one <= two < one + chunk / 4


def peak_bytes(run: Callable[[], None]) -> int:
    """Most bytes that were allocated at a time in host memory."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(changes))
