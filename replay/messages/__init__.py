"""Everything that travels between replay, rollout servers and learner ranks.

One ROUTER socket at replay, a DEALER at everyone else. Sends are at-least-once until acked; replay
deduplicates by group id = (pass over the data, prompt index).

| from           | messages                                                                              |
|----------------|---------------------------------------------------------------------------------------|
| anyone         | Hello, Heartbeat, Goodbye, StatusRequest                                              |
| rollout server | LeaseRequest, Renew, Cancel (gives a lease up), Group, EvaluationResult / -Failed      |
| learner rank   | Take, Committed, Published, Evaluate, CursorRequest, Checkpointed                      |
| replay         | Welcome, Refused, Lease, Cancel (no longer wanted), Ack, Batch, Proceed, Status, ...   |
"""

from replay.channel.frames import Message, registry
from replay.messages.arrays import Float32, Int32, UInt8
from replay.messages.evaluation import (
    Evaluate,
    EvaluationClosed,
    EvaluationFailed,
    EvaluationLease,
    EvaluationResult,
)
from replay.messages.rollouts import (
    Ack,
    Cancel,
    Group,
    Lease,
    LeaseRequest,
    Renew,
)
from replay.messages.session import (
    Goodbye,
    Heartbeat,
    Hello,
    Refused,
    Role,
    Status,
    StatusRequest,
    Welcome,
)
from replay.messages.training import (
    Batch,
    Checkpointed,
    Committed,
    Cursor,
    CursorRequest,
    Proceed,
    Published,
    Take,
)

__all__ = [
    "FROM_REPLAY",
    "TO_REPLAY",
    "Ack",
    "Batch",
    "Cancel",
    "Checkpointed",
    "Committed",
    "Cursor",
    "CursorRequest",
    "Evaluate",
    "EvaluationClosed",
    "EvaluationFailed",
    "EvaluationLease",
    "EvaluationResult",
    "Float32",
    "Goodbye",
    "Group",
    "Heartbeat",
    "Hello",
    "Int32",
    "Lease",
    "LeaseRequest",
    "Message",
    "Proceed",
    "Published",
    "Refused",
    "Renew",
    "Role",
    "Status",
    "StatusRequest",
    "Take",
    "UInt8",
    "Welcome",
]

TO_REPLAY = registry(
    Hello,
    Heartbeat,
    Goodbye,
    LeaseRequest,
    Renew,
    Cancel,
    Group,
    Take,
    Committed,
    Published,
    CursorRequest,
    Checkpointed,
    Evaluate,
    EvaluationResult,
    EvaluationFailed,
    StatusRequest,
)
FROM_REPLAY = registry(
    Welcome,
    Refused,
    Heartbeat,
    Goodbye,
    Lease,
    Cancel,
    Ack,
    Batch,
    Proceed,
    Cursor,
    EvaluationLease,
    EvaluationResult,
    EvaluationClosed,
    Status,
)
