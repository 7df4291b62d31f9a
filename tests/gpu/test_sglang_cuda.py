"""SGLang on a GPU: updates through CUDA IPC, digests of the live tensors, tensor parallelism."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.infrastructure import WeightBus
from configs.schema import Config
from rollout_server.engines.base import PauseMode, Sampling
from rollout_server.follower import WeightFollower
from tests.support.waiting import eventually
from weight_bus import Publisher
from weight_bus.digest import slice_digest

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
VOCAB = 1003
"""Not a multiple of anything: SGLang pads it."""
MODES: tuple[PauseMode, ...] = ("keep_kv", "recompute_kv", "drain")


def make_folder(folder: Path) -> dict[str, torch.Tensor]:
    """A random Qwen3 in bfloat16; its tensors as they are in the file."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "max_position_embeddings": 1024}
    others = {"tie_word_embeddings": False, "eos_token_id": 1, "dtype": torch.bfloat16}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, **sizes, **heads, **others)).to(torch.bfloat16)
    model.save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text())
    assert text["vocab_size"] == VOCAB
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def settings(folder: Path, tensor_parallel: int) -> Config:
    rollout = {"engine": "sglang", "dtype": "bfloat16", "max_new_tokens": 512, "max_running": 64}
    split = {"split": f"{tensor_parallel}:1", "tensor_parallel": tensor_parallel}
    return Config.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"train": "none.jsonl", "max_prompt_tokens": 256},
            "rollout": rollout | {"sglang": {"attention_backend": "triton", "mem_fraction_static": 0.3}},
            "learner": {"compute_dtype": "bfloat16"},
            "placement": {"device": "cuda"} | split,
            "weight_bus": {"backend": "nccl"},
        }
    )


@asynccontextmanager
async def started(config: Config) -> AsyncIterator[Any]:
    from rollout_server.engines import build_engine

    engine = build_engine(config)
    try:
        yield engine
    finally:
        await engine.close()


def altered(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every element of them."""
    return {n: (t.float() + 0.01 * torch.randn(t.shape)).to(t.dtype) for n, t in tensors.items()}


@dataclass
class Run:
    """A publisher on the last GPU, the end of its transport, and an engine that follows it."""

    engine: Any
    bus: Publisher
    end: Any
    follower: WeightFollower
    live: list[int]
    dark: list[str]


@asynccontextmanager
async def following(config: Config, transport: Callable[[WeightBus, str], Any]) -> AsyncIterator[Run]:
    live: list[int] = []
    dark: list[str] = []
    ends: list[Any] = []

    async def went_live(version: int, _: int) -> None:
        live.append(version)

    async def went_dark(reason: str) -> None:
        dark.append(reason)

    def factory(bus: WeightBus, host: str) -> Any:
        ends.append(transport(bus, host))
        return ends[-1]

    bus = config.weight_bus
    async with started(config) as engine:
        with (
            torch.cuda.device(GPUS - 1),
            Publisher(bus, host="127.0.0.1", run_id="cuda", incarnation=1, transport_factory=factory) as publisher,
        ):
            follower = WeightFollower(config, engine, "one", on_live=went_live, on_quarantine=went_dark)
            follower.follow(publisher.address, "cuda")
            await eventually(lambda: publisher.members() or follower.failure, "it joins", 90.0)
            assert follower.failure is None, follower.failure
            yield Run(engine, publisher, ends[0], follower, live, dark)
            await asyncio.to_thread(follower.stop)


class Buckets:
    """An update as the weight bus stages it: views into one flat buffer on the first GPU."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.layout: list[tuple[str, torch.Tensor]] = []
        total = sum(-(-t.numel() * 2 // 64) * 64 for t in tensors.values())
        self.flat = torch.empty(total, dtype=torch.uint8, device="cuda:0")
        offset = 0
        for name, tensor in tensors.items():
            size = tensor.numel() * 2
            view = self.flat[offset : offset + size].view(torch.bfloat16).view(tensor.shape)
            self.layout.append((name, view))
            offset += -(-size // 64) * 64

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        for name, view in self.layout:
            view.copy_(tensors[name])
        torch.cuda.synchronize()
        return {name: slice_digest(tensor.cpu()) for name, tensor in tensors.items()}


async def load(
    engine: Any, buckets: Buckets, version: int, mode: PauseMode = "keep_kv", want: Mapping[str, int] | None = None
) -> Mapping[str, int]:
    await engine.pause(mode)
    await engine.load(buckets.layout, version, want)
    digests: Mapping[str, int] = await engine.digest()
    return digests


async def update(
    engine: Any, buckets: Buckets, version: int, mode: PauseMode, want: Mapping[str, int] | None = None
) -> Mapping[str, int]:
    digests = await load(engine, buckets, version, mode, want)
    await engine.resume()
    return digests


async def twenty_updates(folder: Path, tensors: dict[str, torch.Tensor], tensor_parallel: int) -> None:
    sampling = Sampling(max_new_tokens=400, stop_token_ids=())
    async with started(settings(folder, tensor_parallel)) as engine:
        assert await engine.digest() == {n: slice_digest(t) for n, t in tensors.items()}
        buckets = Buckets(tensors)
        for version in range(1, 21):
            mode = MODES[version % 3]
            prompt = np.random.default_rng(version).integers(2, VOCAB, 32).tolist()
            running = asyncio.create_task(engine.generate(prompt, sampling, 16, request_id=f"r{version}"))
            await asyncio.sleep(0.5)
            want = buckets.fill(altered(tensors))
            assert await update(engine, buckets, version, mode, want) == want, (version, mode)
            for completion in await running:
                assert completion.token_ids.size == 400
                assert np.isfinite(completion.logprobs).all()
                assert (np.diff(completion.versions) >= 0).all()
                assert set(completion.versions.tolist()) <= {version - 1, version}
        health = await engine.health()
        print(f"tp {tensor_parallel}: {health.detail}")


def run(job: Callable[[], Awaitable[None]]) -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(job())  # type: ignore[arg-type]


def test_live_digests_equal_for_twenty_updates_through_cuda_ipc(tmp_path: Path) -> None:
    tensors = make_folder(tmp_path)
    run(lambda: twenty_updates(tmp_path, tensors, 1))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_live_digests_equal_over_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    tensors = make_folder(tmp_path)
    run(lambda: twenty_updates(tmp_path, tensors, 2))


def test_a_flipped_bit_in_the_buffer_shows_in_the_live_digest(tmp_path: Path) -> None:
    tensors = make_folder(tmp_path)

    async def job() -> None:
        async with started(settings(tmp_path, 1)) as engine:
            buckets = Buckets(tensors)
            want = buckets.fill(tensors)
            buckets.flat[12345] ^= 1
            torch.cuda.synchronize()
            held = await update(engine, buckets, 1, "keep_kv")
            assert len([name for name in want if held[name] != want[name]]) == 1

    run(job)


def test_tokens_of_an_update_without_a_proof_are_sampled_again(tmp_path: Path) -> None:
    """With overlapped scheduling and captured graphs; a head that is turned round makes each token of it plain."""
    tensors, head = make_folder(tmp_path), "lm_head.weight"
    new = altered(tensors)
    new[head] *= 10
    prompts = [np.random.default_rng(seed).integers(2, VOCAB, 32).tolist() for seed in range(8)]
    sampling = Sampling(max_new_tokens=400, stop_token_ids=())
    models = [loaded(tmp_path, weights) for weights in (tensors, new)]
    off: dict[int, list[float]] = {0: [], 1: []}

    async def job() -> None:
        async with started(settings(tmp_path, 1)) as engine:
            buckets = Buckets(tensors)
            await update(engine, buckets, 0, "keep_kv", buckets.fill(tensors))  # by the model's own code
            running = [
                asyncio.create_task(engine.generate(prompt, sampling, 8, request_id=f"r{number}"))
                for number, prompt in enumerate(prompts)
            ]
            await asyncio.sleep(0.5)
            want = buckets.fill(new)
            buckets.fill(new | {head: -new[head]})
            held = await load(engine, buckets, 1, want=want)
            assert {name for name in want if held[name] != want[name]} == {head}
            assert engine.schedulers.stopped and engine.schedulers.tainted, "a forward has run beside the digests"
            buckets.fill(new)
            assert await update(engine, buckets, 1, "keep_kv", want) == want
            for prompt, answers in zip(prompts, [await one for one in running], strict=True):
                for answer in answers:
                    assert answer.token_ids.size == 400 and set(answer.versions.tolist()) == {0, 1}
                    for version, model in enumerate(models):
                        expected = logprobs(model, prompt + answer.token_ids.tolist())[len(prompt) - 1 :]
                        found = np.abs(answer.logprobs - expected)[answer.versions == version]
                        off[version] += found.tolist()

    run(job)
    print({version: (float(np.mean(found)), max(found)) for version, found in off.items()})
    assert all(np.mean(found) < 0.05 and max(found) < 1 for found in off.values())


def loaded(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Any:
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.load_state_dict(dict(tensors))
    return model.cuda().eval()


def logprobs(model: Any, ids: list[int]) -> Any:
    """Of all tokens but the first."""
    with torch.no_grad():
        logits = model(torch.tensor([ids], device="cuda")).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:], device="cuda")[:, None])[:, 0].cpu().numpy()
