"""Errors of the channel."""


class ChannelError(RuntimeError):
    """A peer could not be reached. `symptom` is one of closed, silent, slow, corrupt, full, duplicate."""

    def __init__(self, message: str, symptom: str) -> None:
        super().__init__(f"{message} [{symptom}]")
        self.symptom = symptom


class KeysError(ChannelError):
    """CURVE keys are missing, incomplete, broken or readable by others; the message names the file and a way out."""

    def __init__(self, message: str) -> None:
        RuntimeError.__init__(self, message)
        self.symptom = "closed"
