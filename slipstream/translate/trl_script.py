"""Settings of a Python script around a trainer of TRL, read as a syntax tree. The script is never run or imported."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.translate.settings import Foreign, Setting, Untranslatable

CONFIG, TRAINER, LORA, LOAD = "GRPOConfig", "GRPOTrainer", "LoraConfig", "load_dataset"
DISTILLATION = {"DistillationConfig": CONFIG, "DistillationTrainer": TRAINER}
"""Calls whose arguments are read as those of the other trainer."""
CALLS = (CONFIG, TRAINER, LORA, *DISTILLATION)
RECIPES = ("AsyncGRPOTrainer", "DistillationTrainer", "AsyncDistillationTrainer")
REST = ("args", "train_dataset", "eval_dataset")
POSITIONS = {
    CONFIG: ("output_dir",),
    TRAINER: ("model", "reward_funcs", *REST),
    "DistillationConfig": ("output_dir",),
    "DistillationTrainer": ("model", "teacher_model", *REST),
}
TRAINS_WHEN_IMPORTED = "importing {file} would train; move {name} to a file of its own, such as rewards.py"


def read(path: Path, text: str) -> Foreign:
    """Raises Untranslatable: no Python, or nothing in it makes a GRPOConfig or a GRPOTrainer."""
    try:
        tree = ast.parse(text, filename=str(path))
    except SyntaxError as error:
        raise Untranslatable(f"{path}:{error.lineno}: not readable as Python: {error.msg}") from error
    script = _Script(path, tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [call for call in calls if _called(call).endswith(CALLS)]
    if all(_called(call).endswith(LORA) for call in made):
        raise Untranslatable(
            f"{path}: makes no GRPOConfig, GRPOTrainer or DistillationTrainer, so there is no training to translate"
        )
    found = Foreign("TRL", (str(path),))
    found.settings += [Setting("recipe", name, name) for name in RECIPES if name in map(_called, made)]
    for call in sorted(made, key=lambda call: call.lineno):
        found.settings += script.settings(call)
    found.remarks += script.remarks
    for name in CALLS:
        if sum(_called(call).endswith(name) for call in made) > 1:
            found.remarks.append(f"{name} is made more than once: all is read, and each setting's last value counts")
    return found


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


class _Script:
    """What names of the script stand for."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path = path
        self.remarks: list[str] = []
        self.assigned = [
            (target.id, node.end_lineno or 0, node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        self.functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self.modules = {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        self.trains_when_imported = any(
            isinstance(inner, ast.Call) and _called(inner) == "train"
            for node in tree.body
            if isinstance(node, ast.Expr | ast.Assign)
            for inner in ast.walk(node)
        )

    def settings(self, call: ast.Call) -> Iterator[Setting]:
        """A setting for each argument of one call."""
        made = next(name for name in CALLS if _called(call).endswith(name))
        what = DISTILLATION.get(made, made)
        prefix = {CONFIG: "", TRAINER: "GRPOTrainer.", LORA: "peft_config."}[what]
        given = list(zip(POSITIONS.get(made, ()), call.args, strict=False))
        given += [(str(keyword.arg or "**"), keyword.value) for keyword in call.keywords]
        for name, node in given:
            if what == TRAINER and name in ("args", "peft_config"):
                continue  # that call's own arguments are settings
            shown = f"{name}={' '.join(ast.unparse(node).split())}"
            value: Any
            if name == "reward_funcs":
                value, missing = self._functions(node)
            elif what == TRAINER and name.endswith("_dataset"):
                value, missing = self._dataset(node)
            else:
                value, missing = self._literal(node)
            yield Setting(f"{prefix}{name}", value, f"{prefix}{shown}", missing)

    def _behind(self, node: ast.expr) -> ast.expr:
        """What a name was given last before it stands there; anything else itself."""
        if not isinstance(node, ast.Name):
            return node
        found = [(end, value) for name, end, value in self.assigned if name == node.id and end < node.lineno]
        return max(found, key=lambda one: one[0])[1] if found else node

    def _literal(self, node: ast.expr, depth: int = 0) -> tuple[Any, str]:
        """(value, what is open)."""
        if (behind := self._behind(node)) is not node and depth < 8:
            return self._literal(behind, depth + 1)
        try:
            return ast.literal_eval(node), ""
        except (ValueError, TypeError):
            return None, ast.unparse(node)

    def _functions(self, node: ast.expr) -> tuple[Any, str]:
        """The reward functions as file.py:name, or as the names of reward models."""
        found: list[str] = []
        node = self._behind(node)
        for item in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
            name = item.id if isinstance(item, ast.Name) else ""
            if name in self.functions and self.trains_when_imported:
                return None, TRAINS_WHEN_IMPORTED.format(file=self.path.name, name=name)
            if name in self.functions:
                found.append(f"{self.path}:{name}")
            elif name in self.modules:
                module, function = self.modules[name]
                file = self.path.parent / f"{module.replace('.', '/')}.py"
                found.append(f"{file}:{function}" if file.is_file() else f"{module}:{function}")
            else:
                return None, ast.unparse(item)
        return found, ""

    def _dataset(self, node: ast.expr) -> tuple[Any, str]:
        """What `load_dataset` was given; what `.map` and the like made of it is said."""
        changed, split = [], ""
        while True:
            if (behind := self._behind(node)) is not node:
                node = behind
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                split = str(node.slice.value)
                node = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _called(node) != LOAD:
                changed.append(f".{_called(node)}")
                node = node.func.value
            else:
                break
        if not isinstance(node, ast.Call) or _called(node) != LOAD:
            return None, ast.unparse(node)
        if changed:
            self.remarks.append(
                f"the dataset goes through {', '.join(reversed(changed))} there: here its rows are read as they are"
                " (docs/howto/data.md#columns)"
            )
        names = [self._literal(argument)[0] for argument in node.args]
        given = {str(keyword.arg): self._literal(keyword.value)[0] for keyword in node.keywords}
        if isinstance(given.get("data_files"), str):
            return given["data_files"], ""
        options = {"name": names[1] if len(names) > 1 else given.get("name"), "split": given.get("split") or split}
        query = "&".join(f"{key}={value}" for key, value in options.items() if value)
        return f"datasets:{names[0]}{'?' if query else ''}{query}", ""
