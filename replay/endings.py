"""Why replay ends a run: reasons that reach every process, and the last line of the launcher, with their codes."""

from configs.errors import SlipstreamError


class RunFailure(SlipstreamError):
    """A run that cannot go on. Replay states it in Goodbye, and raises nothing."""


class NoServer(RunFailure, code="SLIP-RUN-03"):
    """There was no rollout server for rollout.wait_for_servers_s."""


class NoLearner(RunFailure, code="SLIP-RUN-04"):
    """There was no learner for replay.wait_for_learner_s."""


class NoTeacher(RunFailure, code="SLIP-RUN-11"):
    """There was no process of a teacher for its wait_s."""


class Diverged(RunFailure, code="SLIP-RUN-05"):
    """A resumed learner does not reproduce the journal."""


class StrayCommit(RunFailure, code="SLIP-RUN-06"):
    """The learner commits a step whose batch it has not taken."""


class RewardsFail(RunFailure, code="SLIP-REWARD-07"):
    """The reward function fails for too many answers."""


class EnvironmentsFail(RunFailure, code="SLIP-ENV-04"):
    """The environment fails for too many groups."""


class FilterFails(RunFailure, code="SLIP-DATA-05"):
    """A filter of groups raises, or says neither yes nor no."""


class NothingToTrain(RunFailure, code="SLIP-DATA-03"):
    """No prompt of the data can be trained on."""
