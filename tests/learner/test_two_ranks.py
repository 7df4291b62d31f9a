"""Everything that takes a second rank: uneven shards, parity, resharding, failures that must not leave a rank alone."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from learner.checkpoints.checkpointer import Checkpointer
from tests.learner import beside_ranks, mesh_ranks
from tests.learner.recorded import random_step
from tests.learner.reference import train
from tests.learner.tiny_models import SIZES, built, save_model, saved, with_tokenizer
from tests.learner.two_ranks import CONDITIONED, LORA, NUM_STEPS, configured, steps
from tests.support.ranks import two_ranks
from weight_bus.adapters import names_of
from weight_bus.digest import combined, slice_digest

DEADLINE_S = 380
MODELS = ("qwen3", "llama")
UNEVEN = {"vocab_size": 65, "intermediate_size": 191}
LARGE = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4}
LARGE |= {"hidden_size": 1024, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 16384}
SLACK_BYTES = 32 * 1024 * 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models whose rows do not divide by two, a large one, and a file where a folder should be."""
    folder = tmp_path_factory.mktemp("two_ranks")
    save_model(folder / "qwen3", "qwen3", tied=True, **UNEVEN)
    save_model(folder / "llama", "llama", tied=False, **UNEVEN)
    with_tokenizer(save_model(folder / beside_ranks.MODEL, "qwen3", tied=True, num_hidden_layers=1, **UNEVEN))
    (folder / "a_file").write_text("in the way")
    mesh_ranks.save_models(folder)
    config = Qwen3Config(**{**SIZES, **LARGE, "tie_word_embeddings": True})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "large", max_shard_size="20MB")
    return folder


@pytest.fixture(scope="module")
def one_rank(folder, mesh):
    """Digest after two steps in this process, by model; its checkpoint lies in FOLDER/one_rank_<model>."""
    result = {}
    for model in MODELS:
        config = configured(folder, model, run={"dir": str(folder), "name": f"one_rank_{model}"})
        policy, optimizer = built(config, mesh)
        steps(policy, optimizer, config, range(1, 3))
        saved(Checkpointer(config, policy, optimizer), 2)
        result[model] = policy.parameter_digest()
    return result


@pytest.fixture(scope="module")
def seen(folder, one_rank):
    """What the two ranks saw."""
    return two_ranks(Path(__file__).parent / "two_ranks.py", folder, lambda rank: {}, deadline_s=DEADLINE_S)


def test_no_rank_holds_a_model_of_several_files_whole(seen, folder):
    files = {name: file for file in (folder / "large").glob("*.safetensors") for name in load_file(file)}
    assert len(set(files.values())) > 2
    # The pages of a file that are mapped while its rows are copied count as memory of the process, too.
    mapped = max(file.stat().st_size for file in files.values())
    whole_model = {name: slice_digest(t.float()) for file in set(files.values()) for name, t in load_file(file).items()}
    for found in (rank["loading"] for rank in seen):
        assert found["whole"] > 200_000_000 and found["held"] <= 0.51 * found["whole"]
        assert found["growth"] <= found["held"] + mapped + SLACK_BYTES < 0.9 * found["whole"], found
        assert found["digest"] == combined({name: whole_model[name] for name in found["names"]})


@pytest.mark.parametrize("model", MODELS)
def test_digests_layout_and_gather_of_a_policy_agree(seen, folder, mesh, model):
    """On each rank, which compares them; and with those of a policy that is not sharded."""
    policy, _ = built(configured(folder, model), mesh)
    for start in (rank[model]["start"] for rank in seen):
        assert start["parameter_digest"] == policy.parameter_digest()
        assert ("lm_head.weight" in start["names"]) is (model == "llama")


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_train_what_the_reference_trains(seen, folder, model):
    config = configured(folder, model)
    recorded = [random_step(step) for step in range(1, NUM_STEPS + 1)]
    expected, found = train(folder / model, recorded, config), load_file(folder / f"{model}.safetensors")
    assert found.keys() == expected.keys()
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 1e-5
    start = load_file(folder / model / "model.safetensors")
    assert all(not torch.equal(found[name], start[name]) for name in expected)


@pytest.mark.parametrize("model", MODELS)
def test_ranks_read_the_same_numbers_and_one_rank_nearly_the_same(seen, folder, mesh, model):
    assert seen[0][model]["steps"] == seen[1][model]["steps"]
    assert seen[0][model]["end"] == seen[1][model]["end"]
    config = configured(folder, model)
    alone = steps(*built(config, mesh), config, range(1, NUM_STEPS + 1))
    for one, two in zip(alone, seen[0][model]["steps"], strict=True):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_gradients_summed_after_each_microbatch_are_those_summed_once(seen, model):
    for found in (rank[model]["sharded"] for rank in seen):
        assert found["early"] == [False, True], "only above the size do shards exist after the first microbatch"
        assert found["metrics_equal"]
        assert found["difference"] <= 1e-6 * max(1.0, found["largest"])


@pytest.mark.parametrize("model", MODELS)
def test_a_number_that_is_not_finite_on_one_rank_is_skipped_on_both(seen, model):
    expected = {"reason": "nonfinite_loss", "same": True, "actions": ["warn", "roll_back"]}
    assert [rank[model]["poisoned"] for rank in seen] == [expected] * 2


@pytest.mark.parametrize("model", MODELS)
def test_training_goes_on_while_a_checkpoint_is_written(seen, model):
    """And what is written are the weights of its step; a resumed run repeats the digests."""
    for rank in range(2):
        found = seen[rank][model]["checkpoints"]
        assert found["nothing_yet"] is None and found["meanwhile"] == [True, True]
        step, kept, metrics = found["report"]
        assert (step, kept) == (NUM_STEPS, [[NUM_STEPS], []][rank])
        assert 0 < metrics["checkpoint/copy_seconds"] < metrics["checkpoint/seconds"]
        assert found["state"] == {"step": NUM_STEPS, "version": NUM_STEPS, "seed": 0, "replay": {"cursor": 7}}
        assert found["resumed"] == found["saved"] != found["went_on"]
        assert found["went_on_again"] == found["went_on"]


@pytest.mark.parametrize("model", MODELS)
def test_checkpoints_move_between_one_and_two_ranks(seen, folder, mesh, one_rank, model):
    for rank in range(2):
        assert seen[rank][model]["checkpoints"]["from_one_rank"] == one_rank[model]
        assert seen[rank][model]["checkpoints"]["from_one_rank_steps"] == 2
    config = configured(folder, model)
    policy, optimizer = built(config, mesh)
    assert Checkpointer(config, policy, optimizer).resume() is not None
    assert policy.parameter_digest() == seen[0][model]["checkpoints"]["saved"]
    assert optimizer.num_steps == NUM_STEPS


def test_adapters_on_two_ranks_are_those_of_one_and_merge_into_the_export(seen, folder, mesh):
    config = configured(folder, "qwen3", learner=CONDITIONED | LORA)
    policy, optimizer = built(config, mesh)
    assert [rank["lora"]["start"] for rank in seen] == [policy.parameter_digest()] * 2, "A is drawn alike"
    assert all(rank["lora"]["resumed"] == rank["lora"]["end"] == seen[0]["lora"]["end"] for rank in seen)
    steps(policy, optimizer, config, range(1, NUM_STEPS + 1))
    step = folder / "runs" / "lora" / "checkpoints" / f"step_{NUM_STEPS}"
    found, expected = (
        load_file(step / "adapter" / "adapter_model.safetensors"),
        dict(policy.named_full_tensors("float32")),
    )
    assert found.keys() == expected.keys()
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 1e-5
    whole, merged = load_file(folder / "qwen3" / "model.safetensors"), load_file(step / "hf" / "model.safetensors")
    for name, weight in merged.items():
        a, b = names_of(name)
        added = 2.0 * found[b] @ found[a] if a in found else torch.zeros(())
        assert float((weight - whole[name] - added).abs().max()) <= 1e-6, name


@pytest.mark.parametrize("case", beside_ranks.CASES)
def test_models_beside_the_policy_give_the_same_on_two_ranks_as_on_one(seen, folder, mesh, case):
    made, metrics = beside_ranks.train(beside_ranks.configured(folder, case, "1:1", "alone"), mesh)
    found, expected = load_file(folder / f"beside_{case}.safetensors"), dict(made.policy.named_full_tensors("float32"))
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 1e-5
    for one, two in zip(metrics, seen[0]["beside"][case]["metrics"], strict=True):
        assert one.keys() == two.keys() and two == pytest.approx(one, rel=1e-3, abs=1e-5)
    assert seen[1]["beside"][case] == seen[0]["beside"][case]


@pytest.mark.parametrize("case", beside_ranks.CASES)
def test_critic_and_refreshed_reference_are_part_of_a_checkpoint(seen, case):
    found = seen[0]["beside"][case]
    assert found["resumed"] == found["digest"]
    name = beside_ranks.PARTS[case]
    assert f"it has no {name}/; the run that wrote it had no {name} of its own" in found["damaged"]


def test_refreshed_teachers_are_sent_by_all_ranks(seen):
    first, second = (rank["beside"]["sent"] for rank in seen)
    assert first["senders"] == second["senders"] == [2, 2]
    assert first["versions"] == second["versions"] == {"old": 2, "mean": 3}
    sent = {key: value for key, value in first["metrics"].items() if key.endswith(("version", "equal", "members"))}
    assert {name: sent[f"teacher/{name}/version"] for name in ("old", "mean")} == first["versions"]
    assert all(sent[f"teacher/{name}/{key}"] for name in ("old", "mean") for key in ("digests_equal", "members"))
    assert second["metrics"] == {}


def test_a_checkpoint_goes_from_two_ranks_to_one_to_three(seen, folder, mesh):
    """Bitwise, moments included (loading compares their digests); trained on, within rounding of one rank."""
    first, second = (rank["on_other_ranks"] for rank in seen)
    third = seen[0]["child"]
    assert first["on_one"] == seen[0]["qwen3"]["checkpoints"]["saved"]
    config = configured(folder, "qwen3", run={"dir": str(folder / "runs"), "name": "alone"})
    policy, optimizer = built(config, mesh)
    state = Checkpointer(config, policy, optimizer).resume()
    assert state == first["state"] == second["state"] == third["state"]
    assert policy.parameter_digest() == first["on_three"] == second["on_three"] == third["on_three"]
    recorded = [random_step(step) for step in range(1, 10)]
    for file, num_steps in (("one_at_7", 7), ("three_at_9", 9)):
        expected, found = (
            train(folder / "qwen3", recorded[:num_steps], config),
            load_file(folder / f"{file}.safetensors"),
        )
        worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
        print(f"{file}: max |difference of a parameter| = {worst:.3g}")
        assert worst <= 1e-5


@pytest.mark.parametrize(
    ("point", "left", "resumes_at"),
    [
        ("dcp_save", ["step_1"], 1),
        ("write_hf_folder", ["step_1"], 1),
        ("mark_complete", ["step_1", "step_2"], 2),
        ("rmtree", ["step_2"], 2),
    ],
)
def test_a_kill_while_a_checkpoint_is_written_leaves_a_whole_one(seen, point, left, resumes_at):
    """What is half written is cleared."""
    assert seen[1]["child"][point] == [signal.SIGKILL, ["step_1", "step_2"], resumes_at, left]


def test_all_ranks_write_a_hugging_face_folder(seen, folder):
    loaded = AutoModelForCausalLM.from_pretrained(folder / "exported", local_files_only=True)
    assert len(list((folder / "exported").glob("model-*.safetensors"))) > 2
    assert combined({name: slice_digest(t.data) for name, t in loaded.named_parameters()}) == seen[0]["exported"]
    assert seen[0]["exported"] == seen[1]["exported"]


def test_a_failure_on_one_rank_raises_on_both_and_hangs_none(seen):
    for model in MODELS:
        found = [seen[rank][model]["checkpoints"] for rank in range(2)]
        assert all("a_file/x/checkpoints/step_1 could not be written" in each["blocked"] for each in found)
        words = "broken/x/checkpoints/step_1 could not be written on rank 1: [Errno 5] Input/output error"
        assert all(words in each["broken"] for each in found), found[0]["broken"]
    assert seen[0]["in_step"] == seen[1]["in_step"]


# ---- meshes ---------------------------------------------------------------------------------------------

CASES = {case[0]: case for case in mesh_ranks.CASES[2]}


@pytest.fixture(scope="module")
def trained(folder, mesh):
    """Digest before, metrics of and weights after the steps of a case, on one rank; weights by the plain reference
    where it has the loss."""
    known = {}

    def one(case):
        config = mesh_ranks.configured(folder, case, 1)
        key = (case[1], repr(config.algorithm), config.learner.minibatches)
        if key not in known:
            policy, optimizer = built(config, mesh)
            start = policy.parameter_digest()
            metrics = mesh_ranks.steps(policy, optimizer, config, range(1, mesh_ranks.NUM_STEPS + 1))
            weights = dict(policy.named_full_tensors("float32"))
            if config.algorithm.loss.name == "ppo_clip" and config.algorithm.distillation is None:
                weights = train(
                    folder / case[1], [random_step(step) for step in range(1, mesh_ranks.NUM_STEPS + 1)], config
                )
            known[key] = start, metrics, weights
        return known[key]

    return one


@pytest.mark.parametrize("name", CASES)
def test_a_mesh_trains_what_one_rank_trains(seen, folder, trained, name):
    start, metrics, expected = trained(CASES[name])
    assert [rank["meshes"][name]["start"] for rank in seen] == [start] * 2
    found = load_file(folder / f"mesh_{name}.safetensors")
    assert found.keys() == expected.keys()
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 1e-5
    one, two = (rank["meshes"][name] for rank in seen)
    assert one["steps"] == two["steps"] and one["end"] == two["end"]
    for alone, together in zip(metrics, one["steps"], strict=True):  # the norm of the gradient among them
        of_microbatches = {name: together[name] for name in ("moe/aux_loss",) if name in together}
        assert together == pytest.approx(alone | of_microbatches, rel=1e-4, abs=1e-6)


def test_a_mesh_divides_what_it_says(seen):
    """Parameters of both ranks together: two copies, one copy, or one with the norms twice."""
    held = {name: sum(rank["meshes"][name]["held"] for rank in seen) for name in ("sequence", "replicate", "tensor")}
    assert held["replicate"] == 2 * held["sequence"]
    assert held["sequence"] < held["tensor"] < 1.02 * held["sequence"]


def test_a_checkpoint_moves_between_meshes(seen, folder, mesh):
    for rank in seen:
        assert rank["meshes"]["moved"]["saved"] == rank["meshes"]["moved"]["loaded"]
    for case, key in (("tensor", "moved"), ("expert", "moved_experts")):
        config = mesh_ranks.configured(folder, CASES[case], 1)
        policy, optimizer = built(config, mesh)
        assert Checkpointer(config, policy, optimizer).resume() is not None
        assert [policy.parameter_digest(), optimizer.num_steps] == seen[0]["meshes"][key]["saved"]


def test_copies_that_have_drifted_apart_are_an_error_on_every_rank(seen):
    for said in (said for rank in seen for said in rank["meshes"]["drifted"]):
        assert "model.norm.weight: the 2 copies that learner ranks hold are no longer equal" in said
    assert all(rank["meshes"]["settled"] for rank in seen), "what differs is made equal while it is a gradient"
