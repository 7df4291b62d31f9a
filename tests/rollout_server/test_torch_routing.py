"""Experts in the torch engine: answers come with the choices of the passes that sampled them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_server.engines.base import Completion, Partial
from rollout_server.tasks.environments.recorder import EpisodeRecorder
from tests.rollout_server.torch_oracle import VARIANTS, check_versions, hf_tensors, load_model, make_model, save_folder
from tests.rollout_server.torch_served import PROMPT, STEP, Gates, Sampling, sample, serving, stopped_midway

MOE = VARIANTS["qwen3-moe"]
PROMPTS = [[3, 9, 17], [5], [30, 2, 2, 11, 8, 39, 1], list(range(1, 20))]


@torch.inference_mode()
def routing_of(model: Any, prompt: list[int], answer: Completion) -> np.ndarray[Any, Any]:
    """[P + L - 1, layers, k] of one whole forward of transformers."""
    found: list[torch.Tensor] = []
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(lambda _, __, made: found.append(made[2])) for gate in gates]
    model(torch.tensor([prompt + answer.token_ids.tolist()[:-1]]))
    for hook in hooks:
        hook.remove()
    dense = torch.zeros_like(found[0])
    sparse = iter(found)
    every = [next(sparse) if hasattr(layer.mlp, "experts") else dense for layer in model.model.layers]
    return torch.stack(every, 1).numpy()


@pytest.mark.parametrize("variant", ["qwen3-moe", "qwen3-moe-some-dense", "olmoe-untied"])
async def test_every_position_has_the_experts_of_its_pass(variant: str, tmp_path: Path) -> None:
    """Rows move as answers of other lengths end, and so must what was recorded of them."""
    model = load_model(save_folder(tmp_path, **VARIANTS[variant]))
    async with serving(tmp_path, max_running=5) as engine:
        for size, prompt in enumerate(PROMPTS, start=3):
            for answer in await sample(engine, prompt, "a", n=7, max_new_tokens=4 * size, stop_token_ids=(3, 8, 21)):
                assert answer.routing is not None and answer.routing.dtype == np.uint8
                assert np.array_equal(answer.routing, routing_of(model, prompt, answer))
                cut = answer.first(1)
                assert cut.routing is not None and np.array_equal(cut.routing, answer.routing[: len(prompt)])
    async with serving(tmp_path, routing=False) as engine:
        assert (await sample(engine, PROMPT, "a"))[0].routing is None


async def test_what_is_computed_again_keeps_the_experts_of_the_pass_that_sampled_it(
    tmp_path: Path, gate_at: Gates
) -> None:
    old, new = make_model(**MOE), make_model(seed=1, **MOE)
    old.save_pretrained(tmp_path)
    async with stopped_midway(tmp_path, gate_at, "recompute_kv") as (engine, answers, pausing):
        await pausing
        await engine.load(hf_tensors(new).items(), 1)
        await engine.resume()
        for answer in await answers:
            check_versions({0: old, 1: new}, PROMPT, answer)
            sampled = len(PROMPT) + STEP  # positions that version 0 has read
            before, after = routing_of(old, PROMPT, answer), routing_of(new, PROMPT, answer)
            assert answer.routing is not None and not np.array_equal(before[:sampled], after[:sampled])
            assert np.array_equal(answer.routing, np.concatenate([before[:sampled], after[sampled:]]))


async def test_a_prefix_gets_the_experts_of_the_pass_that_reads_it(tmp_path: Path) -> None:
    model = load_model(save_folder(tmp_path, **MOE))
    async with serving(tmp_path) as engine:
        (whole,) = await sample(engine, PROMPT, "a")
        halves = [Partial.of(whole.first(7)), Partial.of(whole)]
        begun = [Partial(token_ids=p.token_ids, logprobs=p.logprobs, versions=p.versions) for p in halves[:1]]
        answers = await engine.generate(
            PROMPT, Sampling(max_new_tokens=24), 2, request_id="b", prefixes=[*begun, halves[1]]
        )
        for answer in answers:
            assert answer.routing is not None
            assert np.array_equal(answer.routing, routing_of(model, PROMPT, answer))


def test_an_episode_keeps_the_experts_of_the_turn_that_sampled_a_token() -> None:
    def turn(number: int, context: list[int], token: int) -> None:
        one = np.array([number])
        answer = Completion(
            token_ids=np.array([token]), logprobs=one * -0.5, versions=one, finish_reason="stop",
            routing=np.full((len(context), 1, 1), number, np.uint8),
        )  # fmt: skip
        recorder.add(context, answer, number)

    recorder = EpisodeRecorder(50)
    turn(0, [1, 2], 3)
    turn(1, [1, 2, 3, 4], 5)
    (found,) = recorder.samples()
    assert found.routing is not None and found.routing[:, 0, 0].tolist() == [0, 0, 1, 1]
    recorder.forget(1)
    turn(2, [1, 2, 3, 4, 6], 7)
    (found,) = recorder.samples()
    assert found.routing is not None and found.routing[:, 0, 0].tolist() == [0, 0, 2, 2, 2]
