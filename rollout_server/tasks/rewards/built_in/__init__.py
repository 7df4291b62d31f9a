"""The built-in rewards that judge in a reward process; configs/rewards.py has their options."""

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
}
"""By their names in reward.function. `judge` and `remote_model` ask other servers: rewards/remote/."""
