"""`python -m learner.launch.hosts.ready`: 0 once this node's processes take part in the run.

A rollout server takes part when it serves proven weights; a learner node when its ranks have said Hello.
"""

import argparse
import os
import secrets
import socket
import sys
from dataclasses import dataclass
from typing import Any

from configs.placement import ranks_of
from configs.schema import Config
from learner.launch.hosts.node_spec import add_spec_arguments, resolve, spec_of_arguments
from replay import messages as m
from replay.channel import Dealer, WireError, load_keys

ANSWER_S = 3.0


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m learner.launch.hosts.ready", description=__doc__)
    add_spec_arguments(parser)
    args = parser.parse_args()
    assignment = resolve(spec_of_arguments(args), host=args.host, renumber=args.renumber, write=False)
    answer = ask_replay(assignment.config, assignment.plan.replay, ANSWER_S)
    if answer is None:
        sys.stderr.write(f"not ready: replay at {assignment.plan.replay} does not answer\n")
        return 1
    present = {
        peer["name"] for peer in answer.state["peers"] if peer["role"] == "learner" or peer["version"] is not None
    }
    node, role = assignment.spec.node, assignment.spec.role
    wanted = [f"learner-{rank}" for rank in ranks_of(assignment.config.shares, node)]
    if role == "rollout":
        wanted = [process.name for process in assignment.plan.of(node, role)]
    missing = [name for name in wanted if name not in present]
    if missing:
        sys.stderr.write(f"not ready: {', '.join(missing)}\n")
    return 1 if missing else 0


@dataclass(frozen=True, slots=True)
class Answer:
    """Replay's view of the run."""

    run_name: str
    state: dict[str, Any]
    """Schema: docs/protocol.md."""


def ask_replay(config: Config, address: str, timeout_s: float) -> Answer | None:
    """Replay's Status, or None when it does not answer in time.

    Example: ask_replay(config, "tcp://10.0.0.1:5757", 1.0).state["version"]
    """
    identity = f"node.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
    with Dealer(address, identity, m.FROM_REPLAY, keys=load_keys(config.network.keys)) as dealer:
        dealer.send(m.StatusRequest())
        try:
            envelope = dealer.poll(timeout_s)
        except WireError:
            return None
        if envelope is None or not isinstance(envelope.message, m.Status):
            return None
        # the launcher makes the run id of name, pid and time
        return Answer(dealer.run_id.rsplit("-", 2)[0], envelope.message.state)


if __name__ == "__main__":
    sys.exit(main())
