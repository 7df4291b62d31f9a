"""Nothing from outside is ever executed: no package and no script holds a call that makes code from data.

The check reads the source. It follows names through imports (`from torch import load as read`), not through getattr
or tables; what runs is watched by tests/security/audit.
"""

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "slipstream", "replay", "weight_bus", "rollout_server", "learner", "scripts")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

CODE_FROM_BYTES = {
    "pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "code",
    "codeop", "runpy", "imp", "multiprocessing.connection", "multiprocessing.managers", "torch.package", "torch.hub",
}  # fmt: skip
"""Modules that are not imported at all."""
FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile",
    "importlib.import_module", "importlib.__import__", "importlib.reload", "importlib.util.spec_from_file_location",
    "torch.load", "torch.jit.load", "torch.serialization.load", "torch.package", "torch.hub", "torch.export.load",
    "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all",
    "yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader", "yaml.CLoader",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "multiprocessing.Queue", "multiprocessing.SimpleQueue", "multiprocessing.JoinableQueue", "multiprocessing.Pipe",
    "multiprocessing.Manager", "multiprocessing.Pool",
}  # fmt: skip
"""Names that are not even mentioned, called or not."""
FORBIDDEN_ENDS = {
    # of torch.load and its kind, whatever they are called on
    "exec_module", "load_module", "read_pickle", "recv_pyobj", "send_pyobj", "unsafe_load",
    # collectives that pickle
    "all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
MUST_BE = {"trust_remote_code": False, "allow_pickle": False, "shell": False, "weights_only": True}
"""Arguments that, where they are given, are given like this."""
ALLOWED = {
    ("configs/loading.py", "yaml.load"): "its loader is a SafeLoader: test_the_loader_of_configurations_is_a_safe_one",
    ("slipstream/command/__init__.py", "importlib.import_module"): "a module of the table in that file",
    (
        "rollout_server/tasks/workers/worker.py",
        "importlib.import_module",
    ): "a module of ours, named by the process that starts it",
    ("slipstream/check/facts.py", "importlib.import_module"): "packages of a table in that file",
    ("replay/data/formats/base.py", "importlib.import_module"): "optional packages, by constants of that folder",
    ("slipstream/runtime/loading.py", "importlib.import_module"): "a function of the user, named by a module",
    (
        "slipstream/runtime/loading.py",
        "importlib.util.spec_from_file_location",
    ): "the same, named by a file",
    ("slipstream/runtime/loading.py", "description.loader.exec_module"): "the same, named by a file",
    ("rollout_server/engines/sglang/cpu.py", "importlib.import_module"): "packages of a table in that file",
    (
        "slipstream/families/table.py",
        "importlib.util.spec_from_file_location",
    ): "a user's record, named by model.family",
    ("slipstream/families/table.py", "description.loader.exec_module"): "the same",
    ("slipstream/vision.py", "importlib.import_module"): "a module of transformers, named by the table of families",
}
"""(file, what): why it may. Each is needed: test_every_exception_is_used."""


SANDBOXED = "rollout_server/tasks/rewards/built_in/code_inside.py"
"""Runs the policy's programs; goes into the sandbox as text, and nothing imports it."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def aliases(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for, in full."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(node: ast.expr, known: dict[str, str]) -> str:
    """`a.b.c` of a name or attribute, its first part in full; what comes from a call or an index is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, known)}.{node.attr}"
    return known.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def offences(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) of every forbidden import, name and argument."""
    known = aliases(tree)
    for node in ast.walk(tree):
        for module in modules_of(node):
            parts = module.split(".")
            if {".".join(parts[:end]) for end in range(1, len(parts) + 1)} & (CODE_FROM_BYTES | FORBIDDEN):
                yield node.lineno, module
        if isinstance(node, ast.Attribute) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
            name = dotted(node, known)
            if name in FORBIDDEN or name.rsplit(".", 1)[-1] in FORBIDDEN_ENDS:
                yield node.lineno, name
        if isinstance(node, ast.keyword) and node.arg in MUST_BE:
            value = node.value
            if not (isinstance(value, ast.Constant) and value.value is MUST_BE[node.arg]):
                yield node.value.lineno, f"{node.arg}="


@functools.cache
def found() -> list[tuple[str, int, str]]:
    """(file, line, what) of every offence in the packages and scripts."""
    trees = {name_of(path): ast.parse(path.read_text(encoding="utf-8"), filename=str(path)) for path in MODULES}
    return [(file, line, what) for file, tree in trees.items() for line, what in offences(tree)]


def test_nothing_from_outside_is_run() -> None:
    elsewhere = [each for each in found() if each[0] != SANDBOXED]
    left = [f"{file}:{line}: {what}" for file, line, what in elsewhere if (file, what) not in ALLOWED]
    assert left == [], "code from data; read it with msgpack, JSON, safetensors or yaml.SafeLoader"


def test_nothing_imports_what_runs_in_the_sandbox() -> None:
    name = Path(SANDBOXED).stem
    importing = re.compile(rf"^\s*(from \S*{name} |from \S+ import .*\b{name}\b|import \S*{name})", re.MULTILINE)
    assert [name_of(path) for path in MODULES if importing.search(path.read_text(encoding="utf-8"))] == []


def test_every_exception_is_used_once() -> None:
    counts = Counter((file, what) for file, _, what in found())
    assert {key: counts[key] for key in ALLOWED} == dict.fromkeys(ALLOWED, 1)


def test_the_loader_of_configurations_is_a_safe_one() -> None:
    from configs.loading import _Loader, load

    assert [base.__name__ for base in _Loader.__mro__ if "Constructor" in base.__name__] == [
        "SafeConstructor",
        "BaseConstructor",
    ]
    assert not [tag for tag in _Loader.yaml_constructors if tag and "python" in tag]
    assert not [tag for tag in _Loader.yaml_multi_constructors if tag and "python" in tag]
    with pytest.raises(Exception, match=r"python/object|constructor"):
        load("quickstart", ["data.train=!!python/object/apply:os.getcwd []"])


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "import os, pickle as p", "from marshal import loads", "def f():\n    import dill.settings",
        "from multiprocessing.connection import Client", "from multiprocessing import connection",
        "eval('1')", "exec(code)", "run = eval", "compile(text, 'x', 'exec')", "from builtins import exec as run",
        "__import__(name)", "import importlib\nimportlib.import_module(message.kind)",
        "from importlib import import_module as find\nfind(name)", "spec.loader.exec_module(module)",
        "import torch\ntorch.load(path, weights_only=True)", "import torch as t\nt.load(path)",
        "from torch import load as read\nread(path)", "import torch\nlist(map(torch.load, files))",
        "torch.jit.load(path)", "dist.broadcast_object_list(x)",
        "from torch.distributed import all_gather_object as gather\ngather(x, y)",
        "socket.recv_pyobj()", "pd.read_pickle(path)", "np.load(path, allow_pickle=True)",
        "import yaml\nyaml.load(text, yaml.Loader)", "import yaml\nyaml.unsafe_load(text)",
        "import os\nos.system(command)", "subprocess.run(command, shell=True)", "subprocess.run(command, shell=flag)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=flag)",
        "load_state(path, weights_only=False)", "import multiprocessing as mp\nmp.Queue()",
    ],
)  # fmt: skip
def test_the_check_itself_finds(source: str) -> None:
    assert list(offences(ast.parse(source)))
