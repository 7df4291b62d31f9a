"""The built-in rewards; configs/rewards.py has their options."""

_ROOM = "rollout_server.tasks.rewards.built_in"
FUNCTIONS = {
    "exact": f"{_ROOM}.texts:exact",
    "environment": f"{_ROOM}.texts:environment",
    "format": f"{_ROOM}.texts:form",
    "length": f"{_ROOM}.texts:length",
    "regex": f"{_ROOM}.texts:pattern",
    "numeric": f"{_ROOM}.numeric:reward",
    "reasoning_gym": f"{_ROOM}.reasoning_gym:reward",
    "math": f"{_ROOM}.mathematics:reward",
    "code": f"{_ROOM}.code:reward",
    "judge": f"{_ROOM}.judge:Grading",
    "remote_model": f"{_ROOM}.remote_model:Scoring",
}
"""By their names in reward.function. A class is built with the options, and judges samples as a function does."""
