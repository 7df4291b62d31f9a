"""Forms of a reward function. Its processes import this, and neither pydantic nor the schema."""

VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Parameters of a reward function of verl."""
SIGNATURES = (
    "take `async def reward(sample)`, `compute_score(data_source, solution_str, ground_truth, extra_info=None)` or"
    " `f(prompts, completions, **columns)`"
)
"""What a reward function of another form is answered."""
