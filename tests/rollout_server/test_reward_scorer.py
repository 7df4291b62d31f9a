"""Scores of a reward model: those of transformers' own forward for each conversation alone, whatever the batch."""

import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.data import RewardModel
from rollout_server.reward_model import scorer
from rollout_server.reward_model.scorer import Scorer, batches
from rollout_server.rewards import RewardError
from tests.support.reward_folders import CHAT, alone, save_reward_model

TEXTS = ("312=", "", "a", "what is 12 + 30? ", "0123456789" * 4)
ANSWERS = ("123<eos>", "", "42", "the answer is 42", "<eos><eos>", "x" * 12, "12<pad>")
SAMPLES = [(prompt, answer) for prompt in TEXTS for answer in ANSWERS if prompt + answer]
TOLERANCE = 1e-5


def scorer_of(folder: Path, **keys: Any) -> Scorer:
    return Scorer(RewardModel(path=str(folder), **keys), on_gpu=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("rewards") / "qwen2", chat_template=CHAT)


@pytest.mark.parametrize(
    ("family", "padding"),
    [("qwen2", 0), ("qwen2", None), ("llama", 1), ("llama", -1)],
    ids=["own", "none", "eos", "no token"],
)
def test_scores_are_those_of_transformers_alone(tmp_path: Path, family: str, padding: int | None) -> None:
    """Padding of its own, none at all, that of eos, or a number that is no token; answers end with each of them."""
    folder = save_reward_model(tmp_path / "model", family, pad_token_id=padding)
    model = scorer_of(folder, max_tokens_per_batch=200)
    rows = [model.encode(*sample) for sample in SAMPLES]
    expected = alone(folder, rows)
    together = model.score(SAMPLES)
    apart = [model.score([sample])[0] for sample in SAMPLES]
    assert {error for _, error in together + apart} == {""}
    pairs = zip(together + apart, expected * 2, strict=True)
    worst = max(abs(score - wanted) for (score, _), wanted in pairs)
    assert worst <= TOLERANCE, worst
    assert len({round(score, 3) for score, _ in together}) > len(SAMPLES) / 2, "random weights, and yet all alike"


def test_a_conversation_goes_through_the_chat_template_of_the_reward_model(folder: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2+2="}]
    model = scorer_of(folder)
    text = "user:2+2=<eos>assistant:4<eos>"
    assert model.encode(chat, "4") == model.encode(text, "")
    (score, error), empty = model.score([(chat, "4"), (chat, "")])
    assert not error and empty[1] == ""
    assert abs(score - alone(folder, [model.encode(text, "")])[0]) <= TOLERANCE
    own = scorer_of(folder, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert own.encode(chat, "4") == model.encode("2+2=4", "")


def test_what_cannot_be_scored_is_an_error_of_its_own(folder: Path, tmp_path: Path) -> None:
    plain = scorer_of(save_reward_model(tmp_path / "plain"))
    chat = [{"role": "user", "content": "2"}]
    judged = plain.score([("1", "2"), (chat, "2"), ("", ""), ("1" * 60, "2" * 10), ("3", "4")])
    assert [bool(error) for _, error in judged] == [False, True, True, True, False]
    assert [score == score for score, _ in judged] == [True, False, False, False, True]
    words = ["reward.model.chat_template", "no token", "70 tokens of the reward model, which takes 64"]
    assert [word for word, (_, error) in zip(words, judged[1:4], strict=True) if word not in error] == []
    refusing = scorer_of(folder, chat_template="{{ raise_exception('no system turns') }}")
    assert "fails on messages of the roles user, assistant" in refusing.score([(chat, "2")])[0][1]
    broken = scorer_of(folder, chat_template="{{ messages[0].content + 1 }}")
    assert "fails on messages of the roles user, assistant" in broken.score([(chat, "2")])[0][1]


def test_a_token_that_the_model_does_not_have_costs_its_answer_and_not_the_server(tmp_path: Path) -> None:
    """A tokenizer of another model, or one that grew after training."""
    model = scorer_of(save_reward_model(tmp_path / "model", vocab_size=8))
    (_, error), (score, none) = model.score([("312=", "x"), ("1", "2")])
    assert "has 8 tokens" in error and "reward.model.path" in error
    assert not none and score == score


def test_memory_that_runs_out_costs_halves_and_not_the_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = scorer_of(folder)
    forward, sizes = model._model.forward, []

    @functools.wraps(forward)
    def short_of_memory(*arguments: Any, **keys: Any) -> Any:
        sizes.append(tuple(keys["input_ids"].shape))
        if sizes[-1][0] > 2 or sizes[-1][1] == 50:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(*arguments, **keys)

    samples = [("1", "2"), ("3", "4"), ("5", "6"), ("7", "8")]
    expected = [score for score, _ in model.score(samples)]
    monkeypatch.setattr(model._model, "forward", short_of_memory)
    assert [score for score, _ in model.score(samples)] == pytest.approx(expected, abs=TOLERANCE)
    assert sizes == [(4, 2), (2, 2), (2, 2)]
    assert "no memory to score 50 tokens" in model.score([("1" * 50, "")])[0][1]


def test_scores_that_are_no_number_are_errors(folder: Path) -> None:
    import torch

    model = scorer_of(folder)
    with torch.no_grad():
        model._model.score.weight.fill_(float("nan"))
    ((score, error),) = model.score([("1", "2")])
    assert score != score and error == "the reward model's score is nan"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("num_labels", "has 2 labels, a scalar reward model has 1"),
        ("vocab_size", "cannot be loaded"),
        ("tokenizer", "the tokenizer cannot be loaded"),
    ],
)
def test_a_folder_that_is_no_reward_model_is_refused(tmp_path: Path, changes: str, words: str) -> None:
    folder = save_reward_model(tmp_path / "model", **({"num_labels": 2} if changes == "num_labels" else {}))
    if changes == "vocab_size":
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.replace('"vocab_size": 64', '"vocab_size": 80'))
    elif changes == "tokenizer":
        (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(RewardError, match=rf"^reward\.model\.path: .*{words}"):
        scorer_of(folder)


def test_a_head_that_is_missing_is_refused(tmp_path: Path) -> None:
    """transformers draws it at random, and says so in a warning."""
    from safetensors.torch import load_file, save_file

    folder = save_reward_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RewardError, match=r"lack score\.weight, which would be random"):
        scorer_of(folder)


def test_a_dtype_is_kept(folder: Path) -> None:
    assert str(next(scorer_of(folder)._model.parameters()).dtype) == "torch.float32", "auto, on a CPU"
    model = scorer_of(folder, dtype="bfloat16")
    assert str(next(model._model.parameters()).dtype) == "torch.bfloat16"
    expected = alone(folder, [model.encode(*sample) for sample in SAMPLES[:8]])
    assert [score for score, _ in model.score(SAMPLES[:8])] == pytest.approx(expected, abs=0.15)


@given(st.lists(st.integers(1, 90), max_size=40), st.integers(1, 200))
@settings(max_examples=100)
def test_batches_hold_every_row_once_within_their_budget(lengths: list[int], budget: int) -> None:
    made = batches(dict(enumerate(lengths)), budget)
    assert sorted(key for batch in made for key in batch) == list(range(len(lengths)))
    for batch in made:
        padded = len(batch) * max(lengths[key] for key in batch)
        assert padded <= budget or len(batch) == 1


def test_what_does_not_fit_is_refused_with_the_keys_to_change(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What accelerate would put on a disk, or beside the GPUs without leave."""

    class Placed:
        """A loaded model of which accelerate says that a part lies elsewhere."""

        def __init__(self, model: Any) -> None:
            self.config, self.hf_device_map = model.config, {"model": 0, "score": "cpu"}

    from transformers import AutoModelForSequenceClassification

    from_pretrained = AutoModelForSequenceClassification.from_pretrained
    asked: dict[str, Any] = {}

    def placing(path: str, **keys: Any) -> Any:
        asked.update(keys)
        model, found = from_pretrained(path, **keys | {"device_map": {"": "cpu"}, "max_memory": None})
        return Placed(model), found

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", placing)
    with pytest.raises(RewardError, match=r"does not fit, and cpu would hold a part.*reward\.model\.max_memory"):
        scorer.load_model(RewardModel(path=str(folder), max_memory={0: "1GiB"}), on_gpu=True)  # type: ignore[dict-item]
    assert (asked["device_map"], asked["max_memory"], asked["trust_remote_code"]) == ("auto", {0: "1GiB"}, False)
