"""docs/tutorials as a reader follows them: their files are written, their commands are run, in their order.

Without `-m slow` a page is followed up to its first command that trains or needs another machine, in this process.
Machines are network
namespaces, which SLIPSTREAM_SSH and stand-ins for Slurm's commands enter; what they start is what runs on real ones.
"""

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.in_process import run
from tests.support.namespaces import Switch, switched
from tests.support.runs import ROOT, left_over

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PAGES = ROOT / "docs" / "tutorials"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEAVY = re.compile(
    r"^(?!.*--dry-run)(slipstream (train|sweep|doctor|launch \w+ --(hosts|ray|replay))|python -m learner\.main|sbatch)",
    re.MULTILINE,
)
"""What trains, or asks other machines."""
COSTLY = re.compile(r"slipstream try-reward")
"""What takes seconds of a core, and is left out without `-m slow`."""
OTHER_MACHINE = re.compile(r"# on (node\d)\n")
HOSTS = {f"node{number}": f"10.0.0.{number + 1}" for number in range(3)}


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """(kind, file or "", text) of the blocks of PAGE or PAGE#SECTION: bash, file, or shown; `console`: an example."""
    name, _, section = page.partition("#")
    written = (PAGES / name).read_text(encoding="utf-8").partition(f"\n## {section}\n" if section else "# ")[2]
    for language, text in BLOCK.findall(written.partition("\n## ")[0] if section else written):
        name = re.match(r"# (\w+(?:\.\w+)?)\n", text)
        if language == "bash":
            yield "bash", "", text.replace("\\\n", " ")
        elif name is not None:
            yield "file", name[1], text
        elif language != "console":
            assert language == "text", f"{page}: a block of {language} has no file name: {text[:60]!r}"
            yield "shown", "", text


def without_numbers(text: str) -> str:
    return " ".join(re.sub(r"\d[\d.]*", "N", text).split())


class Reader:
    """Follows a page in a folder, as a reader would."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder, self.said = folder, ""
        path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
        self.beside: list[subprocess.Popen[str]] = []

    def follow(self, page: str, *, light: bool = False) -> str:
        """Write the files and run the commands of a page; what they said. `light`: up to the first heavy one.

        What the page shows must have been said, numbers apart.
        """
        shown: list[str] = []
        left_out = False
        for kind, name, text in blocks(page):
            if kind == "bash":
                left_out = light and COSTLY.match(text) is not None
            if left_out and kind != "file":
                continue
            if kind == "file":
                (self.folder / name).write_text(text, encoding="utf-8")
            elif kind == "shown":
                shown += text.splitlines()
            elif (machine := OTHER_MACHINE.match(text)) is not None:
                if not light:
                    self._start(machine[1], text[machine.end() :])
            elif light:
                light_ones = list(itertools.takewhile(lambda line: not HEAVY.match(line), text.splitlines()))
                self._run_here(light_ones)
                if len(light_ones) < len(text.splitlines()):
                    break
            else:
                self._run(*text.splitlines())
        for process in self.beside:
            self.said += process.communicate(timeout=150)[0]
            assert process.returncode == 0, self.said[-3000:]
        said = without_numbers(self.said)
        assert [line for line in shown if without_numbers(line) not in said] == [], self.said[-3000:]
        return self.said

    def _run(self, *lines: str) -> None:
        command = ["bash", "-euxo", "pipefail", "-c", "\n".join(lines)]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        self.said += done.stdout + done.stderr

    def _run_here(self, lines: Sequence[str]) -> None:
        with contextlib.chdir(self.folder):
            for words in filter(None, (shlex.split(line, comments=True) for line in lines)):
                if words[0] in ("python", "slipstream"):
                    code, said = run(words)
                    assert code == 0, said[-4000:]
                    self.said += said
                else:
                    self._run(shlex.join(words))

    def _start(self, machine: str, text: str) -> None:
        """A command of another machine, which waits for the run that the next command on this one starts."""
        command = [self.environment["SLIPSTREAM_SSH"], machine, f"cd {self.folder} && exec {text}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.beside.append(subprocess.Popen(command, cwd=self.folder, env=self.environment, text=True, **pipes))

    def program(self, name: str, text: str) -> Path:
        """A command that the reader has."""
        file = self.folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/usr/bin/env bash\n{text}\n")
        file.chmod(0o755)
        return file

    def close(self) -> None:
        for process in self.beside:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the other pages begin in: files, model and data of the first one."""
    reader = Reader(tmp_path_factory.mktemp("first"))
    reader.said = reader.follow("model.md", light=True)
    (reader.folder / "said").write_text(reader.said)
    return reader.folder


@pytest.fixture
def reader(first: Path, tmp_path: Path) -> Iterator[Reader]:
    folder = tmp_path / "work"
    shutil.copytree(first, folder)
    made = Reader(folder)
    made.program("kubectl", '[ "$1 $2" = "apply -f" ] && [ -s "$3/jobset.yaml" ] && echo applied')
    yield made
    made.close()
    assert left_over(str(folder)) == []


def test_every_tutorial_is_followed() -> None:
    assert {page.name for page in PAGES.glob("*.md")} == {"model.md", *(page.partition("#")[0] for page in SHOWN)}


def test_what_the_first_tutorial_writes_passes_a_dry_run(first: Path) -> None:
    said = (first / "said").read_text()
    assert "32 prompts × 8 = 256 trajectories a step" in said
    assert "dry run: configuration and files are in order" in said


SHOWN: Mapping[str, tuple[str, ...]] = {
    "reward.md": ("dry run: configuration and files are in order",),
    "environment.md": ("dry run: configuration and files are in order",),
    "loss.md": ("dry run: configuration and files are in order",),
    "machines.md#One host": ("dry run: configuration and files are in order",),
    "machines.md#Several hosts": ("node0  10.0.0.1  replay", "node1  10.0.0.2  rollout-node1-0"),
    "machines.md#Ray": ("keys: keys of the learner's node",),
    "machines.md#Slurm": ("start the run with: sbatch runs/larger/launch/run.sbatch",),
    "machines.md#Kubernetes": ("manifests/jobset.yaml", "applied"),
}


@pytest.mark.parametrize("page", SHOWN)
def test_a_page_holds_up_to_its_first_run(reader: Reader, page: str) -> None:
    said = reader.follow(page, light=True)
    assert [words for words in SHOWN[page] if words not in said] == [], said[-3000:]
    if page.endswith("#Kubernetes"):
        folder = reader.folder / "manifests"
        _, jobset = yaml.safe_load_all((folder / "jobset.yaml").read_text())
        assert jobset["kind"] == "JobSet" and jobset["metadata"]["name"] == "larger"
        assert {path.name for path in folder.iterdir()} == {"jobset.yaml", "keys-learner.yaml", "keys-rollout.yaml"}
    elif page.endswith("#Slurm"):
        file = reader.folder / "runs" / "larger" / "launch" / "run.sbatch"
        assert subprocess.run(["bash", "-n", file], check=False).returncode == 0


# ---- whole pages ----------------------------------------------------------------------------------------


def json_lines(said: str, key: str) -> dict[str, Any]:
    (found,) = [json.loads(line) for line in said.splitlines() if line.startswith("{") and f'"{key}"' in line]
    return dict(found)


@pytest.mark.slow
def test_the_tutorial_trains_a_model_that_answers(tmp_path: Path) -> None:
    said = Reader(tmp_path).follow("model.md")
    summary = json_lines(said, "greedy_after")
    assert summary["greedy_before"] <= 0.3 and summary["greedy_after"] >= 0.7, summary
    assert summary["digests_equal"] and summary["groups_trained_twice"] == 0
    exported, replayed = json_lines(said, "ties"), json_lines(said, "first_different")
    assert exported["prompts"] > 0 and exported["different"] == []
    assert replayed["equal"] == replayed["steps"] == exported["step"]
    assert re.search(r"^3,8\? \d$", said, re.MULTILINE), said[-500:]


def rows(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if "training/lag_histogram" in row]


@pytest.mark.slow
def test_a_part_without_weight_is_measured(reader: Reader) -> None:
    reader.follow("reward.md")
    first, *_, last = rows(reader.folder / "runs" / "sum")
    assert last["reward/my_reward.larger"] == pytest.approx(last["critic/score/mean"])
    assert last["reward/my_reward.larger"] > first["reward/my_reward.larger"] + 0.3
    assert last["reward/my_form.form"] > first["reward/my_form.form"]


@pytest.mark.slow
def test_a_game_is_learnt(reader: Reader) -> None:
    reader.follow("environment.md")
    every = rows(reader.folder / "runs" / "game")
    assert every[-1]["reward/found"] > every[0]["reward/found"] + 0.2
    assert every[-1]["episode/samples"] == 1, "a conversation is one sample"


@pytest.mark.slow
def test_a_loss_of_your_own_trains_beside_the_default(reader: Reader) -> None:
    reader.follow("loss.md")
    assert len(list((reader.folder / "runs" / "losses").glob("*/metrics.jsonl"))) == 2
    assert (reader.folder / "runs" / "losses" / "sweep.png").exists()


ENTER = """case "$1" in {cases} esac
exec ip netns exec "$host" bash -c 'mount --bind {names} /etc/hosts && exec bash -c "$0"' "$2"
"""
SBATCH = """export SLURM_JOB_ID=42 SLURM_JOB_NODELIST='node[0-1]' SLURM_CPUS_ON_NODE=2
exec bash "$1"
"""
SRUN = """while [[ "$1" == --* ]]; do
  case "$1" in --nodelist=*) machine="${1#*=}" ;; esac
  shift
done
exec "$SLIPSTREAM_SSH" "$machine" "cd $PWD && $(printf '%q ' "$@")"
"""


@pytest.fixture
def machines(reader: Reader) -> Iterator[Switch]:
    """node0 and node1, which ssh and Slurm's commands of the reader reach."""
    with switched(HOSTS) as switch:
        (reader.folder / "names").write_text(switch.names())
        cases = " ".join(f"{name} | {address}) host={switch.host(name)} ;;" for name, address in HOSTS.items())
        enter = reader.program("enter", ENTER.format(cases=cases, names=reader.folder / "names"))
        reader.environment |= {"SLIPSTREAM_SSH": str(enter)}
        for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": "printf 'node0\\nnode1\\n'"}.items():
            reader.program(name, text)
        yield switch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "run", "servers"),
    [
        ("machines.md#One host", "one", ["rollout-0"]),
        ("machines.md#Several hosts", "two", ["rollout-node1-0", rf"rollout-{socket.gethostname()}-\d+-0"]),
        ("machines.md#Slurm", "larger-42", ["rollout-node1-0"]),
    ],
)
def test_machines_train(reader: Reader, machines: Switch, page: str, run: str, servers: Sequence[str]) -> None:
    reader.follow(page)
    steps = rows(reader.folder / "runs" / run)
    assert len(steps) == 40 and steps[-1]["weight_sync/digests_equal"] is True
    groups = " ".join(key for key, count in steps[-1].items() if key.startswith("rollout/groups/") and count)
    assert [name for name in servers if re.search(rf"rollout/groups/{name}\b", groups) is None] == []


@pytest.mark.slow
def test_a_cluster_of_ray_trains(reader: Reader) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'slipstream-rl[ray]'")
    from tests.e2e.test_ray import Raylets  # of a module that is skipped as a whole without Ray

    with contextlib.closing(Raylets()) as raylets:
        reader.environment |= {"RAY_ADDRESS": raylets.address}
        reader.follow("machines.md#Ray")
    steps = rows(reader.folder / "runs" / "three")
    assert len(steps) == 40 and steps[-1]["rollout/groups/rollout-node2-0"] > 0
