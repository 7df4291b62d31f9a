"""Commands that have another name now: `python -m scripts.OLD` says the new one and runs it with the same arguments."""

import importlib.abc
import os
import sys

MOVED = {
    "scripts.bench_bus": "scripts.bench bus",
    "scripts.bench_pipeline": "scripts.bench pipeline",
    "scripts.bench_replay": "scripts.bench replay",
    "scripts.bench.model": "learner.examples.random_qwen3",
    "scripts.bus_changes": "scripts.chaos weights changes",
    "scripts.bus_corruption": "scripts.chaos weights flips",
    "scripts.bus_faults": "scripts.chaos bus",
    "scripts.elastic": "scripts.chaos elastic",
    "scripts.fuzz": "tests.security.fuzz",
    "scripts.exact_resume": "scripts.chaos resume",
    "scripts.check_export": "learner.report.check_export",
    "scripts.lag_report": "learner.report.lag",
    "scripts.compare": "learner.sweep",
    "scripts.compare_corrections": "learner.sweep",
    "scripts.compare_staleness": "learner.sweep",
    "scripts.launch": "learner.launch.hosts",
    "scripts.launch.main": "learner.launch",
    "scripts.launch.node": "learner.launch.hosts.node",
    "scripts.launch.ready": "learner.launch.hosts.ready",
    "scripts.make_config_docs": "configs.docs",
    "scripts.make_keys": "replay.keys",
    "scripts.make_sort6": "learner.examples.sort6",
    "scripts.mutate": "tests.replay.simulation.mutate",
    "scripts.simulate": "tests.replay.simulation",
    "scripts.summarize_run": "learner.report.summary",
}


class MovedFinder(importlib.abc.MetaPathFinder):
    """Asked for the code of an old name, becomes the command of the new one."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        """Raises ImportError, which says the new name, where the old one is imported and not run."""
        if name not in MOVED:
            return
        # on the way to scripts.launch.node, scripts.launch is looked for as well
        run = [word for word in sys.orig_argv if word in MOVED] if sys.argv[:1] == ["-m"] else []
        old = run[0] if run else name
        note = f"{old} is now: python -m {MOVED[old]}\n"
        if not run:
            raise ImportError(note)
        sys.stderr.write(note)
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-m", *MOVED[old].split(), *sys.argv[1:]])


sys.meta_path.append(MovedFinder())
