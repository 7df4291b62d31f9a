"""`python openenv_package.py`: a guessing game served by the package openenv itself; prints its port."""

import socket

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

WORDS = {True: "higher", False: "lower"}


class Guess(Action):
    message: str


class Hint(Observation):
    message: str


class Game(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, most=9, **_):
        self._state, self.secret = State(episode_id=episode_id), (seed or 0) % most + 1
        return Hint(message=f"Guess a number from 1 to {most}.")

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        guess = int(action.message) if action.message.isdigit() else 0
        if guess == self.secret:
            return Hint(message="right", reward=1.0, done=True)
        return Hint(message=WORDS[guess < self.secret], reward=-0.1, done=self._state.step_count >= 3)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    print(listening.getsockname()[1], flush=True)
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=2)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
