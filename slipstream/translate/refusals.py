"""What an operator's command says of a name that is a key of another framework."""

from configs.errors import ConfigError
from configs.loading import Parser
from slipstream.translate.names import answer, target_of


class AnsweringParser(Parser):
    """Answers an option or `a.b=c` of another framework with the key here, or why there is none."""

    def answer(self, name: str) -> tuple[str, str]:
        """(key, what to say) of a word that is no option."""
        said = answer(name)
        return (target_of(name) or "", said) if said is not None else super().answer(name)


def refused(error: Exception) -> str:
    """`refused: ...`, and a line for each unknown key that another framework has."""
    names = error.unknown if isinstance(error, ConfigError) else ()
    answers = [f"{name}: {said}" for name in names if (said := answer(name)) is not None]
    return "\n".join([f"refused: {error}", *answers])
