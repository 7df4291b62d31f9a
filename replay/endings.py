"""Why replay ends a run: reasons that reach every process, and the last line of the launcher, with their codes."""

from configs.errors import SlipstreamError


class Ending(SlipstreamError):
    """A run that cannot go on. Replay states it in Goodbye, and raises nothing."""


class NoServer(
    Ending,
    code="SLIP-RUN-03",
    cause="All rollout servers are dead, or none has come yet: wrong address, keys, or an engine that does not start.",
    mend="Look at the end of logs/rollout-N.log; raise rollout.wait_for_servers_s where engines load for long.",
):
    """There was no rollout server for rollout.wait_for_servers_s."""


class NoLearner(
    Ending,
    code="SLIP-RUN-04",
    cause="The learner, or rank 0 of it, died and nothing has started it again.",
    mend="Look at the end of logs/learner-0.log, and go on with --resume.",
):
    """There was no learner for replay.wait_for_learner_s."""


class Diverged(
    Ending,
    code="SLIP-RUN-05",
    cause="A repeated step made other weights than the journal has: other kernels, another number of ranks.",
    mend="Take learner.deterministic=true and as many ranks as before, or replay.on_divergence=supersede.",
):
    """A resumed learner does not reproduce the journal."""


class StrayCommit(
    Ending,
    code="SLIP-RUN-06",
    cause="Two learners speak to one replay, or its journal was exchanged under it.",
    mend="End all processes of the run, and go on with --resume.",
):
    """The learner commits a step whose batch it has not taken."""


class RewardsFail(
    Ending,
    code="SLIP-REWARD-07",
    cause="The reward function raises, returns no number or does not return, for more than reward.max_error_rate.",
    mend="The message ends with the last error: mend the function, and try it with `python -m"
    " rollout_server.try_reward`.",
):
    """The reward function fails for too many answers."""


class EnvironmentsFail(
    Ending,
    code="SLIP-ENV-04",
    cause="The environment raises, takes too long or loses its process, for more than reward.max_error_rate.",
    mend="The message ends with the last error: mend the function; docs/howto/environments.md.",
):
    """The environment fails for too many groups."""


class NothingToTrain(
    Ending,
    code="SLIP-DATA-03",
    cause="Every prompt of a whole pass was dropped: too long, not rendered, poison, or of equal rewards.",
    mend="The message counts the reasons: mend the most frequent one.",
):
    """No prompt of the data can be trained on."""
