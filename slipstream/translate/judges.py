"""What judges and plays there: rewards, environments and the rows that come with them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from configs.loading import inline
from slipstream.translate.names import TABLES
from slipstream.translate.settings import Foreign, Line


def _reward_of_verl(shown: str, value: Any, foreign: Foreign) -> Line:
    name = foreign.value("custom_reward_function.name", default="compute_score")
    return Line(shown, "key", {"reward.function": f"{value}:{name}"}, "a function with verl's arguments, as it is")


def _rewards_of_trl(shown: str, value: Any, foreign: Foreign) -> Line:
    weights = foreign.value("reward_weights") or [1.0] * len(value)
    alone = len(value) == 1 and weights[0] == 1
    function = value[0] if alone else dict(zip(value, weights, strict=False))
    return Line(shown, "key", {"reward.function": function}, "functions with TRL's arguments, as they are")


def _score_of_verl(shown: str, value: Any, foreign: Foreign) -> Line:
    """Of what judges by `data_source`; a reward model, or another manager, judges otherwise."""
    managers, model = ("reward_model.reward_manager", "reward_manager.name"), "reward_model.enable"
    is_other = foreign.value(*managers, default="naive") not in TABLES["values"]["reward_manager"]
    if is_other or foreign.is_on(model) or foreign.is_open(*managers, model):
        return Line(shown, "open", note="a reward model or manager judges there", decides="reward.function")
    return Line(shown, "key", {"reward.function": f"{FOREIGN}:verl"}, BY_ITS_RULE)


def _score_of_slime(shown: str, value: Any, foreign: Foreign) -> Line:
    if foreign.value("custom_rm_path") or foreign.is_open("custom_rm_path"):
        return Line(shown, "not needed", note="--custom-rm-path decides")
    if foreign.value("reward_key", default="score") != "score" or foreign.is_open("reward_key"):
        return Line(shown, "open", note="--reward-key takes another number than its score", decides="reward.function")
    if value not in RULES_OF_SLIME:
        why = f"its rule {value!r} is not here: write it to a file (docs/howto/rewards.md)"
        return Line(shown, "open", note=why, decides="reward.function")
    return Line(shown, "key", {"reward.function": f"{FOREIGN}:slime_{value}"}, BY_ITS_RULE)


def _score_of_areal(shown: str, value: Any, foreign: Foreign) -> Line:
    """Its file names none; the script beside the documented one does, for the dataset of that."""
    if foreign.value("train_dataset.path") != HUB_GSM8K:
        return Line(shown, "open", note="the script that reads the file decides", decides="reward.function")
    return Line(shown, "key", {"reward.function": f"{FOREIGN}:areal_gsm8k"}, BY_ITS_RULE)


FOREIGN = "rollout_server.tasks.rewards.foreign"
BY_ITS_RULE = "scores by the same rule"
RULES_OF_SLIME = ("deepscaler", "math", "dapo")
HUB_GSM8K = "openai/gsm8k"
ASKING_FOR_A_BOX = quote('"\\nPlease put your final answer within \\\\boxed{}."')
"""What AReaL puts behind the questions of GSM8K."""


def _rows_of_areal(key: str, split: str) -> Callable[[str, Any, Foreign], Line]:
    def convert(shown: str, value: Any, foreign: Foreign) -> Line:
        query = f"datasets:{value}?name=main&split={split}&suffix={ASKING_FOR_A_BOX}"
        return Line(shown, "key", {key: query if value == HUB_GSM8K else value})

    return convert


VERIFIERS = "examples/environments/verifiers_tasks.py:rollout"
"""Of a clone of this repository."""
OF_TRAINING = ("train.source.env", "train.env", "orchestrator.env")
OF_EVALUATION = ("eval.source.env", "eval.env")


def _taskset(foreign: Foreign, places: Sequence[str]) -> dict[str, Any]:
    """Settings of a verifiers environment; of older files its id and the arguments that it is loaded with."""
    for place in places:
        if isinstance(taskset := foreign.value(f"{place}.taskset"), dict):
            return taskset
        if name := foreign.value(f"{place}.id"):
            return {"id": name, **(foreign.value(f"{place}.args") or {})}
    return {}


def _tasks(taskset: Mapping[str, Any]) -> str:
    options = "&".join(f"{key}={quote(inline(value))}" for key, value in taskset.items() if key != "id")
    return f"verifiers:{taskset['id']}{'?' if options else ''}{options}"


def _environment(shown: str, value: Any, foreign: Foreign) -> Line:
    taskset = _taskset(foreign, OF_TRAINING)
    agent = foreign.value(*(f"{place}.agent" for place in OF_TRAINING)) or {}
    agent = {key: one for key, one in agent.items() if one != PLAIN_AGENT.get(key)}
    if value and ".agent = " in shown and not agent:
        return Line(shown, "not needed", note="the task set's own episodes on this machine, as here")
    options = {"taskset": taskset} | ({"env": {"agent": agent}} if agent else {})
    pairs = {"environment.function": {VERIFIERS: options}, "data.train": _tasks(taskset)}
    return Line(shown, "key", pairs | {"reward.function": "environment"}, "its tasks are the rows (extra `verifiers`)")


PLAIN_AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


def _evaluated(shown: str, value: Any, foreign: Foreign) -> Line:
    taskset, trained = _taskset(foreign, OF_EVALUATION), _taskset(foreign, OF_TRAINING)
    if taskset.get("id") != trained.get("id"):
        why = f"the environment of training plays evaluations, too, and cannot play {taskset.get('id')}"
        return Line(shown, "no counterpart", note=why)
    return Line(shown, "key", {"data.eval": _tasks(taskset)}, "with the environment of training")


JUDGES: Mapping[str, Callable[[str, Any, Foreign], Line]] = {
    "custom_reward_function.path": _reward_of_verl,
    "reward_funcs": _rewards_of_trl,
    "default_compute_score": _score_of_verl,
    "rm_type": _score_of_slime,
    "gsm8k_reward_fn": _score_of_areal,
    "train_dataset.path": _rows_of_areal("data.train", "train"),
    "valid_dataset.path": _rows_of_areal("data.eval", "test"),
    **{f"{place}.{end}": _environment for place in OF_TRAINING for end in ("taskset", "id", "args", "agent")},
    **{f"{place}.{end}": _evaluated for place in OF_EVALUATION for end in ("taskset", "id", "args")},
}
"""By end of the name."""
