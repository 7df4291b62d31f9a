"""Names worker processes that compute without a pause while cores are free: more of them would help."""

from collections.abc import Mapping

from configs.schema import Config
from slipstream.runtime.vitals.processes import Use

FULL = 0.9
"""Of a core: who uses as much for `HELD_S` holds up what waits for it."""
HELD_S = 30.0
FREE_CORES = 1.0
"""Of the machine: with fewer, another process would take the time of the others."""


class Busy:
    """The worker processes of a rollout server, sample by sample."""

    def __init__(self, config: Config) -> None:
        self._workers = {"reward": config.reward.num_workers(), "environment": config.environment.num_workers()}
        self._before: tuple[float, float, dict[int, float]] | None = None
        self._since: dict[str, float] = {}
        self._said: set[str] = set()

    def judge(self, now: float, idle_s: float, used: Mapping[str, Use]) -> tuple[dict[str, float], list[str]]:
        """Gauges `vitals/full_workers/<role>`, and a line for a role all of whose workers have been full for long.

        Args:
            now: seconds, monotonic.
            idle_s: of all cores of the machine so far, seconds.
            used: by role; those that are no workers are left out.
        """
        known = {pid: cpu_s for use in used.values() for pid, cpu_s in use.cpu_by_pid.items()}
        before, self._before = self._before, (now, idle_s, known)
        if before is None or now <= before[0]:
            return {}, []
        elapsed = now - before[0]
        free = (idle_s - before[1]) / elapsed
        gauges, lines = {}, []
        for role, workers in self._workers.items():
            if role not in used:
                continue
            pids = [pid for pid in used[role].cpu_by_pid if pid in before[2]]
            full = [pid for pid in pids if (known[pid] - before[2][pid]) / elapsed >= FULL]
            gauges[f"vitals/full_workers/{role}"] = float(len(full))
            if len(full) < workers or free < FREE_CORES:
                self._since.pop(role, None)
                continue
            held = now - self._since.setdefault(role, before[0])
            if held >= HELD_S and role not in self._said:
                self._said.add(role)
                who = f"the {role} process (pid {full[0]})" if workers == 1 else f"all {workers} {role} processes"
                lines.append(
                    f"{who} computed without a pause for {held:.0f} s, and what waits for it keeps engines waiting,"
                    f" while {free:.1f} cores are free: raise {role}.workers ({workers})"
                )
        return gauges, lines
