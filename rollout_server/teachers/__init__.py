"""Teachers score a group's answers: which one, with which prompt, asked how, and the process that answers."""

from configs.errors import SlipstreamError


class TeacherError(SlipstreamError, RuntimeError, code="SLIP-TEACHER-01"):
    """A teacher cannot score, or no teacher is there for a prompt; the message names it and the key."""


class NotScored(SlipstreamError, RuntimeError, code="SLIP-TEACHER-02"):
    """One try brought no scores, or some that cannot be used; another try may."""
