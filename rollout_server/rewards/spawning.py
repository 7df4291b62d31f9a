"""Starts a reward process, in a session of its own and without the secrets of the rollout server's environment."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PACKAGE_ROOT = str(Path(__file__).parents[2])
SECRET_NAME = re.compile(
    r"(KEYS?|TOKENS?|COOKIES?|AUTH(_SOCK)?)(_|$)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|^(AWS|AZURE|WANDB)_",
    re.IGNORECASE,
)
DEFAULTS = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
"""glibc reserves 64 MB of address space for each further arena, and reward.memory_bytes counts address space."""
SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]+@")
"""An address with a password in it, such as that of a proxy or a package index."""


def spawn(channel: socket.socket) -> subprocess.Popen[bytes]:
    """Start a reward process: the supervisor (rewards/supervisor.py), which starts the worker.

    Must be called from a thread that lives as long as the worker shall: the parent-death signal follows it.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "rollout_server.rewards.worker", str(os.getpid())],
        stdin=channel.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=without_secrets(os.environ),
        start_new_session=True,
    )


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a reward process. A function that needs the key of a service reads it from a file.

    Example: OPENAI_API_KEY, HF_TOKEN, AWS_PROFILE, SSH_AUTH_SOCK and HTTP_PROXY=http://me:word@proxy are left out;
    PATH, HOME, TOKENIZERS_PARALLELISM and HTTP_PROXY=http://proxy stay.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if not SECRET_NAME.search(name) and not SECRET_VALUE.search(value)
    }
    path = os.pathsep.join(filter(None, [PACKAGE_ROOT, environment.get("PYTHONPATH")]))
    return DEFAULTS | kept | {"PYTHONPATH": path}
