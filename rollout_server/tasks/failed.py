"""Why a lease cannot be finished here: what episodes and single turns fail with alike."""

from configs.errors import SlipstreamError


class LeaseFailed(
    SlipstreamError,
    RuntimeError,
    code="SLIP-TASK-03",
    cause="One prompt could not be answered or scored at this server; the message has the counter and the reason.",
    mend="Another server tries; after replay.max_attempts the prompt is dropped as poison. Look at the reason where"
    " there are many.",
):
    """This lease cannot be finished here. `reason` is the counter that replay books it under."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
