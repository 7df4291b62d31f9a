"""Games of textarena (MIT; extra `textarena`).

`environment.function: examples/environments/textarena_games.py:rollout`

options  game: name in textarena's registry, such as GuessTheNumber-v0; its raw form is played
         players: seats (default 1); the policy plays all of them, and only the first one's turns are trained
         style: `chat` (default: an observation is a message of the user) or `text` (for models without chat template)
         max_turn_tokens: of one move (default: what is left)
         settings: further arguments of the game, for example {max_number: 9}

All episodes of a prompt play the same game, by the seed of the prompt or the row's own `seed`. The reward is the first
seat's. The prompt of a row goes before the first observation.
"""

import random
from collections.abc import Mapping
from typing import Any

from rollout_server.tasks.environments import EnvironmentFailed, EpisodeOver, Trajectory
from rollout_server.tasks.environments.client import Client

OPTIONS = {"game", "players", "style", "max_turn_tokens", "settings"}
STYLES = ("chat", "text")


class Chance:
    """The random numbers of one game: textarena draws from Python's own generator, which all episodes share."""

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()
        self._others: Any = None

    def __enter__(self) -> None:
        self._others = random.getstate()
        random.setstate(self._state)

    def __exit__(self, *_: object) -> None:
        self._state = random.getstate()
        random.setstate(self._others)


def prepare(options: Mapping[str, Any]) -> None:
    """Find the game. Raises EnvironmentFailed: not installed, no such game, or an option that there is not."""
    if strange := sorted(set(options) - OPTIONS):
        raise EnvironmentFailed(f"environment.function.*.{strange[0]}: unknown; textarena's have {sorted(OPTIONS)}")
    if options.get("style", "chat") not in STYLES:
        raise EnvironmentFailed(f"environment.function.*.style: {options['style']!r}; take one of {STYLES}")
    game(options)


def game(options: Mapping[str, Any]) -> Any:
    """A fresh game. Raises EnvironmentFailed."""
    try:
        import textarena
    except ModuleNotFoundError as error:
        raise EnvironmentFailed(
            f"textarena_games.py needs a package ({error}): pip install 'slipstream-rl[textarena]'"
        ) from error
    name = str(options.get("game", ""))
    try:
        return textarena.make(f"{name.removesuffix('-raw')}-raw", **options.get("settings", {}))
    except (ValueError, ImportError, TypeError, LookupError, OSError) as error:
        raise EnvironmentFailed(
            f"environment.function.*.game: {name!r} with settings cannot be played: {error}"
        ) from error


async def rollout(row: dict[str, Any], client: Client) -> Trajectory:
    """One game."""
    options, chance = client.options, Chance(int(row["columns"].get("seed", client.prompt_seed)))
    with chance:
        played = game(options)
        played.reset(num_players=int(options.get("players", 1)))
    seats: dict[int, Any] = {}
    left_out: list[int] = []
    moves, done = 0, False
    while not done:
        with chance:
            seat, observation = played.get_observation()
        said = "\n".join(text for sender, text, _ in observation if sender != seat)
        if seat not in seats:
            said, seats[seat] = begun(row["prompt"], said), [] if options.get("style", "chat") == "chat" else ""
        try:
            turn = await client.generate(
                after(seats[seat], said), max_new_tokens=options.get("max_turn_tokens")
            )  # the context is full for good: what was reached counts
        except EpisodeOver:
            break
        if seat:
            left_out.append(turn.number)
        seats[seat] = after(seats[seat], said)
        seats[seat] = seats[seat] + turn.text if isinstance(seats[seat], str) else [*seats[seat], turn.message]
        with chance:
            done, _ = played.step(turn.text)
        moves += 1
    with chance:
        rewards, info = played.close()
    metrics = {"episode/moves": float(moves), "episode/finished": float(done)}
    metrics["episode/invalid_move"] = float(bool(((info or {}).get(0) or {}).get("invalid_move")))
    return Trajectory(reward=float((rewards or {}).get(0, 0.0)), metrics=metrics, leave_out=left_out)


def begun(prompt: Any, said: str) -> str:
    """The first observation behind the row's prompt."""
    text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    return f"{text}\n{said}"


def after(context: Any, said: str) -> Any:
    """A seat's context with what it is told next."""
    if isinstance(context, str):
        return f"{context}\n{said}\n" if context else f"{said}\n"
    return [*context, {"role": "user", "content": said}]
