"""What decoding costs: CPU seconds of a decode step, of an answer in it and of a prompt token, measured as it runs."""

from dataclasses import dataclass

HALVE_AT = 8192
"""Decode steps after which older ones count half: costs follow what changes in a run."""


@dataclass(slots=True)
class DecodeCosts:
    """Least squares of a step's CPU seconds over its answers: seconds = step_s + answers · answer_s."""

    steps: float = 0.0
    answers: float = 0.0
    squares: float = 0.0
    seconds: float = 0.0
    products: float = 0.0
    prompt_tokens: int = 0
    prefill_s: float = 0.0

    def decoded(self, answers: int, seconds: float) -> None:
        """Count a decode step of so many answers."""
        if self.steps >= HALVE_AT:
            for name in ("steps", "answers", "squares", "seconds", "products"):
                setattr(self, name, getattr(self, name) / 2)
        self.steps += 1
        self.answers += answers
        self.squares += answers * answers
        self.seconds += seconds
        self.products += answers * seconds

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Count a prefill of so many prompt tokens, each prompt once."""
        self.prompt_tokens += tokens
        self.prefill_s += seconds

    def measured(self) -> dict[str, float]:
        """`decode_step_s`, `decode_answer_s` and `prefill_token_s`; empty until steps had different sizes."""
        spread = self.steps * self.squares - self.answers**2
        if not self.prompt_tokens or spread <= 1e-6 * self.answers**2:
            return {}
        slope = (self.steps * self.products - self.answers * self.seconds) / spread
        slope = min(max(0.0, slope), self.seconds / self.answers)  # neither part of a step takes less than no time
        return {
            "decode_step_s": (self.seconds - slope * self.answers) / self.steps,
            "decode_answer_s": slope,
            "prefill_token_s": self.prefill_s / self.prompt_tokens,
        }
