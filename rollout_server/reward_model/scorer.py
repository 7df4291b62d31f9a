"""The reward model: conversations into token ids, ids into batches, batches into scores.

A score is what transformers' own forward gives for the conversation alone. Decoders read it at the last token that is
no padding, which they find by `pad_token_id`: of a folder without one they refuse batches, and where it is the eos
token as well, the last token is another one than its place says. Rows are therefore padded on the right, always, with
the model's own padding token; where it has none, with a token that no row of the batch holds.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size

from configs.data import RewardModel
from replay.fingerprint import TEMPLATE_ERRORS, FingerprintError, resolve_chat_template, template_failure
from rollout_server.rewards import NotScored, RewardError
from rollout_server.tasks import load_tokenizer

log = logging.getLogger(__name__)

Prompt = str | list[dict[str, str]]
Judged = tuple[float, str]
"""(score, "") or (NaN, error)."""


class Scorer:
    """A loaded reward model. Not to be used by two threads at once."""

    def __init__(self, settings: RewardModel, *, on_gpu: bool) -> None:
        """Load tokenizer and model; code in the folder is never run.

        Raises:
            RewardError: the folder is no reward model, or does not fit into the memory that it may have.
        """
        torch.set_num_threads(settings.num_threads)
        path = str(settings.path)
        try:
            self._template = resolve_chat_template(path, settings.chat_template, "reward.model.chat_template")
            self._tokenizer = load_tokenizer(path)
        except FingerprintError as error:
            raise RewardError(str(error)) from error
        except Exception as error:  # the tokenizers library raises bare Exception on a broken file
            raise RewardError(f"reward.model.path: {path}: the tokenizer cannot be loaded: {error}") from error
        self._model = load_model(settings, on_gpu=on_gpu)
        self._device = torch.device("cuda" if on_gpu else "cpu")
        self._budget = settings.max_tokens_per_batch
        self._config = self._model.config.get_text_config()
        padding = self._config.pad_token_id
        self._pads = isinstance(padding, int) and 0 <= padding < self._config.vocab_size
        limit = getattr(self._config, "max_position_embeddings", None)
        self._longest = limit if isinstance(limit, int) and limit > 0 else None
        self._known = int(self._model.get_input_embeddings().num_embeddings)

    def score(self, samples: Sequence[tuple[Prompt, str]]) -> list[Judged]:
        """Scores of (prompt, answer) pairs, in their order."""
        judged: list[Judged] = [(math.nan, "")] * len(samples)
        rows: dict[int, list[int]] = {}
        for index, (prompt, completion) in enumerate(samples):
            try:
                rows[index] = self.encode(prompt, completion)
            except NotScored as error:
                judged[index] = (math.nan, str(error))
        for batch in batches({index: len(row) for index, row in rows.items()}, self._budget):
            for index, result in zip(batch, self._forward([rows[index] for index in batch]), strict=True):
                judged[index] = result
        return judged

    def encode(self, prompt: Prompt, completion: str) -> list[int]:
        """Token ids of a conversation, as the reward model's own tokenizer makes them.

        Text is tokenised as it is, with the special tokens that the tokenizer adds by default. Messages go through the
        chat template, the answer as the assistant's. Raises NotScored: no template, one that refuses, too long, or a
        token that the model does not have.
        """
        token_ids = self._text(prompt + completion) if isinstance(prompt, str) else self._chat(prompt, completion)
        if not token_ids:
            raise NotScored("the reward model's tokenizer makes no token of the conversation")
        if self._longest is not None and len(token_ids) > self._longest:
            raise NotScored(
                f"the conversation has {len(token_ids)} tokens of the reward model, which takes {self._longest}"
                " (max_position_embeddings); lower data.max_prompt_tokens or rollout.max_new_tokens"
            )
        if max(token_ids) >= self._known:  # on a GPU its look-up would end the process
            raise NotScored(
                f"the tokenizer makes token {max(token_ids)}, and the reward model has {self._known} tokens: it is not"
                " this model's; save the reward model's own tokenizer into reward.model.path"
            )
        return token_ids

    def _text(self, text: str) -> list[int]:
        return list(self._tokenizer(text).input_ids)

    def _chat(self, prompt: list[dict[str, str]], completion: str) -> list[int]:
        if self._template is None:
            raise NotScored(
                "the prompt is a list of chat messages, and the reward model's tokenizer has no chat template; set"
                " reward.model.chat_template"
            )
        messages = [*prompt, {"role": "assistant", "content": completion}]
        try:
            token_ids = self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=True, return_dict=False
            )
        except TEMPLATE_ERRORS as error:
            raise NotScored(template_failure(messages, error, "reward.model.chat_template")) from error
        return list(token_ids)

    def _forward(self, rows: list[list[int]]) -> list[Judged]:
        """Scores of one batch; in halves where memory runs out."""
        try:
            scores = self._scores(rows)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            if len(rows) == 1:
                return [(math.nan, f"no memory to score {len(rows[0])} tokens: {str(error)[:300]}")]
            log.warning(
                "memory ran out on %d rows of %d tokens: scored in halves; lower reward.model.max_tokens_per_batch"
                " (%d) [full]", len(rows), max(map(len, rows)), self._budget,
            )  # fmt: skip
        else:
            return [(s, "") if math.isfinite(s) else (math.nan, f"the reward model's score is {s}") for s in scores]
        half = len(rows) // 2
        return self._forward(rows[:half]) + self._forward(rows[half:])

    def _scores(self, rows: list[list[int]]) -> list[float]:
        padding = self._padding(rows)
        if padding is None:
            return [score for row in rows for score in self._scores([row])]
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), padding)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        with torch.inference_mode():
            logits = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device)).logits
        scores: list[float] = logits.float().reshape(-1).tolist()
        return scores

    def _padding(self, rows: list[list[int]]) -> int | None:
        """The padding token for these rows, of which the model knows; None: they must go one by one."""
        if self._pads:
            return int(self._config.pad_token_id)
        if len(rows) == 1:
            self._config.pad_token_id = None
            return 0  # not used
        taken = set[int]().union(*rows)
        free = next((token for token in range(self._config.vocab_size) if token not in taken), None)
        self._config.pad_token_id = free
        return free


def load_model(settings: RewardModel, *, on_gpu: bool) -> Any:
    """The model in evaluation mode, where accelerate puts it. Raises RewardError."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    where = f"reward.model.path: {settings.path}"
    dtype = settings.dtype if settings.dtype != "auto" else ("bfloat16" if on_gpu else "float32")
    limits = {int(key) if key.isdigit() else key: value for key, value in (settings.max_memory or {}).items()}
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            settings.path,
            dtype=getattr(torch, dtype),
            device_map="auto" if on_gpu or limits else {"": "cpu"},
            max_memory=limits or None,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, LookupError) as error:
        raise RewardError(f"{where}: cannot be loaded: {error}") from error
    if model.config.num_labels != 1:
        raise RewardError(f"{where}: the model has {model.config.num_labels} labels, a scalar reward model has 1")
    if found["missing_keys"]:
        names = ", ".join(sorted(map(str, found["missing_keys"]))[:5])
        raise RewardError(
            f"{where}: its weights lack {names}, which would be random; save the whole model with save_pretrained"
        )
    used = {str(device) for device in getattr(model, "hf_device_map", {"": "cpu"}).values()}
    beside = {"disk", *(() if not on_gpu or "cpu" in limits else ("cpu",))} & used
    if beside:
        raise RewardError(
            f"{where}: in {dtype} it does not fit, and {' and '.join(sorted(beside))} would hold a part of it; raise"
            f" reward.model.devices, or reward.model.max_memory ({settings.max_memory or 'unset'}; cpu: 60GiB allows a"
            " part of it in host memory)"
        )
    log.info("reward model %s: %s on %s", settings.path, dtype, ", ".join(sorted(used)))
    model.config.get_text_config().use_cache = False
    return model.eval()


def batches(lengths: dict[int, int], budget: int) -> list[list[int]]:
    """Keys in batches of at most `budget` tokens with padding; longer ones alone."""
    made: list[list[int]] = []
    for key in sorted(lengths, key=lambda key: lengths[key]):
        if made and (len(made[-1]) + 1) * lengths[key] <= budget:  # the longest of a batch comes last
            made[-1].append(key)
        else:
            made.append([key])
    return made
