"""Why a lease cannot be finished here: what episodes and single turns fail with alike."""

from configs.errors import SlipstreamError


class LeaseFailed(SlipstreamError, RuntimeError, code="SLIP-TASK-03"):
    """This lease cannot be finished here. `reason` is the counter that replay books it under."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
