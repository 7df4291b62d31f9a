"""Commands that have another name now: `python -m scripts.OLD` says the new one and runs it with the same arguments."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys

MOVED = {
    "scripts.bench_bus": "scripts.bench bus",
    "scripts.bench_pipeline": "scripts.bench pipeline",
    "scripts.bench_replay": "scripts.bench replay",
    "scripts.bus_changes": "scripts.chaos weights changes",
    "scripts.bus_corruption": "scripts.chaos weights flips",
    "scripts.bus_faults": "scripts.chaos bus",
    "scripts.elastic": "scripts.chaos elastic",
    "scripts.fuzz": "tests.security.fuzz",
    "scripts.exact_resume": "scripts.chaos resume",
    "scripts.check_export": "learner.report.check_export",
    "scripts.lag_report": "learner.report.lag",
    "scripts.compare_corrections": "scripts.compare corrections",
    "scripts.compare_staleness": "scripts.compare staleness",
    "scripts.launch": "learner.launch.hosts",
    "scripts.launch.main": "learner.launch",
    "scripts.launch.node": "learner.launch.hosts.node",
    "scripts.launch.ready": "learner.launch.hosts.ready",
    "scripts.make_keys": "replay.keys",
    "scripts.make_sort6": "learner.examples.sort6",
    "scripts.mutate": "tests.replay.simulation.mutate",
    "scripts.simulate": "tests.replay.simulation",
    "scripts.summarize_run": "learner.report.summary",
}
FORWARD = (
    "if __name__ != '__main__': raise ImportError({note!r})\n"
    "import os, sys; sys.stderr.write({note!r}); sys.stderr.flush()\n"
    "os.execv(sys.executable, [sys.executable, '-m', *{new!r}, *sys.argv[1:]])"
)


class MovedFinder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds the old names for `python -m`."""

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name in MOVED else None

    def is_package(self, name: str) -> bool:
        return any(old.startswith(f"{name}.") for old in MOVED)

    def get_source(self, name: str) -> str:
        """Code that becomes the command of the new name; a package of old commands has none."""
        note = f"{name} is now: python -m {MOVED[name]}\n"
        return "" if self.is_package(name) else FORWARD.format(note=note, new=MOVED[name].split())


sys.meta_path.append(MovedFinder())
