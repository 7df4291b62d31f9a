"""The built-in rewards that judge in a reward process, one a file; configs/rewards.py has their options."""

FUNCTIONS = {
    "exact": "rollout_server.tasks.rewards.built_in.exact:reward",
    "environment": "rollout_server.tasks.rewards.built_in.environment:reward",
    "numeric": "rollout_server.tasks.rewards.built_in.numeric:reward",
    "reasoning_gym": "rollout_server.tasks.rewards.built_in.reasoning_gym:reward",
    "math": "rollout_server.tasks.rewards.built_in.mathematics:reward",
    "regex": "rollout_server.tasks.rewards.built_in.pattern:reward",
    "format": "rollout_server.tasks.rewards.built_in.form:reward",
    "length": "rollout_server.tasks.rewards.built_in.length:reward",
    "code": "rollout_server.tasks.rewards.built_in.code:reward",
}
"""By their names in reward.function. `judge` and `remote_model` ask other servers: rewards/remote/."""
