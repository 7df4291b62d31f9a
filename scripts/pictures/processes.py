"""The processes of a run on two nodes, and what connects them."""

from scripts.pictures.drawing import Drawing


def rollout_node(drawing: Drawing) -> None:
    """A rollout server with its engine and its children."""
    drawing.box(24, 52, 330, 420, "plain dashed")
    drawing.text(40, 76, "rollout node", "bold")
    drawing.text(338, 76, "one of any number", "small quiet", "end")
    drawing.box(40, 92, 298, 172, "rollout", "rollout server", "event loop: leases, groups, updates")
    drawing.box(54, 150, 270, 46, "card")
    drawing.lines(189, 169, ("engine: SGLang, a scheduler process", "for each of its GPUs (or torch)"))
    drawing.box(54, 204, 270, 46, "card")
    drawing.lines(189, 223, ("staging of the next version,", "compared before the engine is touched"))
    drawing.box(40, 304, 142, 64, "plain")
    drawing.lines(111, 330, ("reward processes,", "killable"))
    drawing.box(196, 304, 142, 64, "plain")
    drawing.lines(267, 330, ("environment", "processes"))
    drawing.box(40, 396, 298, 60, "plain dashed")
    drawing.lines(189, 420, ("reward server, with a reward model:", "its own process, on GPUs or the CPU"))
    drawing.arrow("rollout", (111, 266), (111, 302), both=True)
    drawing.arrow("rollout", (267, 266), (267, 302), both=True)
    drawing.text(122, 288, "socket", "small quiet")
    drawing.text(256, 288, "socket", "small quiet", "end")
    drawing.arrow("rollout dashed", (189, 266), (189, 394), both=True)
    drawing.text(200, 384, "ZeroMQ", "small quiet")


def learner_node(drawing: Drawing) -> None:
    """Replay and the ranks."""
    drawing.box(606, 52, 330, 420, "plain dashed")
    drawing.text(622, 76, "learner node", "bold")
    drawing.box(
        622, 92, 298, 144, "replay", "replay", "prompts, leases, groups, batches:", "one process, CPU only, no torch"
    )
    drawing.box(636, 176, 270, 44, "card")
    drawing.lines(771, 203, ("journal: on disk before the answer",))
    drawing.box(622, 270, 298, 74, "learner", "learner rank 0", "a shard, and the publisher", "of the weight bus")
    drawing.box(622, 376, 142, 80, "learner", "rank 1", "a shard")
    drawing.box(778, 376, 142, 80, "learner", "rank 2 …", "on any number", "of nodes")
    drawing.arrow("replay", (890, 268), (890, 238), both=True)
    drawing.text(880, 258, "every rank: Take, Batch, Proceed", "small quiet", "end")
    drawing.arrow("learner", (693, 346), (693, 374), both=True)
    drawing.arrow("learner", (849, 346), (849, 374), both=True)
    drawing.text(771, 364, "FSDP2: NCCL or gloo", "small quiet", "middle")


def between(drawing: Drawing) -> None:
    """The two channels."""
    drawing.arrow("replay", (338, 124), (620, 124))
    drawing.text(479, 98, "ZeroMQ, CURVE", "small replay", "middle")
    drawing.text(479, 115, "LeaseRequest, Renew, Group", "small quiet", "middle")
    drawing.arrow("replay", (620, 140), (340, 140))
    drawing.text(479, 158, "Lease, Ack, Cancel", "small quiet", "middle")
    drawing.arrow("bus", (340, 226), (480, 226), (480, 292), (620, 292), both=True)
    drawing.text(362, 216, "Join, Staged, Applied", "small quiet")
    drawing.text(492, 262, "Begin, Commit", "small quiet")
    drawing.text(492, 284, "ZeroMQ, CURVE", "small bus")
    drawing.arrow("bus thick", (620, 326), (420, 326), (420, 246), (342, 246))
    drawing.lines(508, 350, ("buckets: NCCL, gloo or UCC,", "in a group of one epoch"), "small bus")


def processes() -> Drawing:
    """What listens, what connects, and over what."""
    drawing = Drawing(
        "The processes of a run and their connections",
        "Rollout servers and learner ranks connect to replay over ZeroMQ. Rollout servers connect to the publisher "
        "of the weight bus at learner rank 0 over ZeroMQ, and receive buckets of weights over NCCL or gloo. Rewards "
        "and environments are processes of the rollout node.",
        960,
        544,
    )
    drawing.text(24, 32, "Processes and sockets", "bold")
    drawing.text(220, 32, "replay, learner rank 0 and reward servers listen; the others connect", "small quiet")
    rollout_node(drawing)
    learner_node(drawing)
    between(drawing)
    ports = "network.replay_port, weight_bus.port, placement.rendezvous_port, and the ports of NCCL or gloo"
    notes = (
        "One process of each node (on the first learner node the launcher) starts, watches and restarts the others.",
        f"Open between nodes: {ports}.",
    )
    drawing.lines(24, 500, notes, "small quiet", "start")
    return drawing
