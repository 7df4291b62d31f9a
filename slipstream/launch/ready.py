"""`python -m slipstream.launch.ready`: 0 once this node's processes take part in the run.

A rollout server takes part when it serves proven weights; a learner node when its ranks have said Hello.
"""

import argparse
import sys

from configs.placement import ranks_of
from replay.status_client import ask_replay
from slipstream.launch.node_spec import add_spec_arguments, resolve, spec_of_arguments

ANSWER_S = 3.0


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m slipstream.launch.ready", description=__doc__)
    add_spec_arguments(parser)
    args = parser.parse_args()
    assignment = resolve(spec_of_arguments(args), host=args.host, renumber=args.renumber, write=False)
    answer = ask_replay(assignment.plan.replay, assignment.config.network.keys, ANSWER_S)
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


if __name__ == "__main__":
    sys.exit(main())
