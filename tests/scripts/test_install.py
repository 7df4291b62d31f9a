"""scripts/install.sh and what quickstart.sh and test.sh ask of it, with a pip that only writes down what it is told."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from configs.loading import load

ROOT = Path(__file__).parents[2]
PINS = ROOT / "scripts" / "sglang-cpu-requirements.txt"
PIP = """
import os, sys
if not os.path.exists(os.path.join(sys.prefix, "has_pip")):
    sys.exit("No module named pip")
if sys.argv[1:] == ["--version"]:
    sys.exit()
with open(os.environ["PIP_LOG"], "a") as log:
    print(*(a if "constraints" not in a else "CONSTRAINTS" for a in sys.argv[1:]), file=log)
"""
ENSUREPIP = "import os, sys; open(os.path.join(sys.prefix, 'has_pip'), 'w').close()"
# a Python whose venv is whole, or stops where ensurepip is missing, as Debian's without python3-venv
VENV = f"""#!/usr/bin/env bash
[ "$1 $2" = "-m venv" ] || exec {sys.executable} "$@"
{sys.executable} "$@" --without-pip
if [ -z "$ENDS" ]; then rm "${{@: -1}}/bin/activate"; exit 1; fi
touch "${{@: -1}}/has_pip"
"""
OLD = """#!/usr/bin/env bash
case "$*" in --version) echo "Python 3.10.12" ;; *) exit 1 ;; esac
"""
CUDA_TORCH = "class version: cuda, hip = '13.0', None"
CPU_TORCH = "class version: cuda = hip = None"
OURS = ("configs", "replay.channel", "weight_bus", "learner", "rollout_server.engines.sglang.cpu")


class Machine:
    """A virtual environment that sees the tests' packages; its pip only writes down what it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.venv, self.log, self.first = folder / "venv", folder / "pip.log", folder / "first"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.venv], check=True)
        (self.venv / "has_pip").touch()
        for name, text in (("pip", PIP), ("ensurepip", ENSUREPIP)):
            self.module(name, "")
            (self.first / name / "__main__.py").write_text(text)
        for name in OURS:  # what the script imports at its end, without their torch
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                self.module("/".join(parts[:end]), "def prepare_cpu(): pass\n")

    def module(self, name: str, text: str) -> None:
        (self.first / name).mkdir(parents=True, exist_ok=True)
        (self.first / name / "__init__.py").write_text(text)

    def give(self, package: str, text: str, version: str) -> None:
        self.module(package, text)
        described = self.first / f"{package}-{version}.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")

    def install(
        self, extras: str, python: str | Path = sys.executable, **environment: str
    ) -> tuple["subprocess.CompletedProcess[str]", list[str]]:
        """How it ended, and what pip was asked for."""
        path = [str(self.first), sysconfig.get_path("purelib"), str(ROOT)]
        environment |= {"PYTHONPATH": os.pathsep.join(path), "PIP_LOG": str(self.log), "PYTHON": str(python)}
        command = ["bash", ROOT / "scripts" / "install.sh", "--venv", self.venv, extras]
        self.log.write_text("")
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=350)
        return done, self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_extras_are_installed_once_and_sglang_on_a_cpu_last_without_its_dependencies(machine: Machine) -> None:
    machine.give("torch", CPU_TORCH, "2.13.0+cpu")
    machine.give("sglang", "", "0.5.20")
    both = [f"install -c CONSTRAINTS -c {PINS} -e {ROOT}[dev]", f"install --no-deps -r {PINS}"]
    for extras, expected in [
        ("wandb", [f"install -c CONSTRAINTS -e {ROOT}[wandb]"]),
        ("none", []),
        ("dev,sglang-cpu", both),
        ("wandb,sglang-cpu", []),
    ]:
        done, asked = machine.install(extras)
        assert (done.returncode, asked) == (0, expected), done.stderr
        assert ("up to date" in done.stdout) == (not expected)


def test_what_makes_no_sense_is_refused_before_anything_is_installed(machine: Machine) -> None:
    machine.give("torch", CUDA_TORCH, "2.11.0+cu130")
    for extras, *said in (
        ("dev,sglang-cpu", "torch 2.11.0+cu130", "take the extra sglang"),
        ("dve", "unknown ['dve']; there are parquet"),
        ("sglang,sglang-cpu", "take one"),
    ):
        done, asked = machine.install(extras)
        assert (done.returncode, asked) == (2, []) and all(text in done.stderr for text in said)


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_an_environment_whose_making_was_cut_off_is_made_anew(machine: Machine, tmp_path: Path) -> None:
    machine.give("torch", CPU_TORCH, "2.13.0+cpu")
    shutil.rmtree(machine.venv)
    python = executable(tmp_path / "python", VENV)
    for _ in range(2):
        done, asked = machine.install("none", python, ENDS="")
        assert (done.returncode, asked) == (2, []) and (machine.venv / "bin" / "python").exists()
        assert "making the virtual environment" in done.stderr and "apt install python3-venv; or delete" in done.stderr
    (machine.venv / "left").touch()
    done, asked = machine.install("none", python, ENDS="yes")
    assert (done.returncode, asked) == (0, [f"install -c CONSTRAINTS -e {ROOT}"]), done.stderr
    assert "half-made" in done.stdout and not (machine.venv / "left").exists()


def test_an_environment_without_pip_gets_one_and_keeps_what_it_has(machine: Machine) -> None:
    """As `uv venv` makes it."""
    machine.give("torch", CPU_TORCH, "2.13.0+cpu")
    (machine.venv / "has_pip").unlink()
    (machine.venv / "kept").touch()
    done, asked = machine.install("none")
    assert (done.returncode, asked) == (0, [f"install -c CONSTRAINTS -e {ROOT}"]), done.stderr
    assert "ensurepip" in done.stdout and (machine.venv / "kept").exists()
    (machine.venv / "has_pip").unlink()
    (machine.first / "ensurepip" / "__main__.py").write_text("raise SystemExit(1)")
    done, asked = machine.install("wandb")
    assert (done.returncode, asked) == (2, []) and "apt install python3-venv; or delete" in done.stderr


def test_the_environment_s_python_is_the_one_that_must_be_new_enough(machine: Machine, tmp_path: Path) -> None:
    machine.give("torch", CPU_TORCH, "2.13.0+cpu")
    old = executable(tmp_path / "python", OLD)
    for said in ("done: ", "up to date"):
        done, _ = machine.install("none", old)
        assert done.returncode == 0 and said in done.stdout, done.stderr
    (machine.venv / "bin" / "python").unlink()
    executable(machine.venv / "bin" / "python", OLD)
    done, asked = machine.install("none")
    assert (done.returncode, asked) == (2, [])
    assert "is Python 3.10.12" in done.stderr and "delete" in done.stderr and "--venv another folder" in done.stderr
    shutil.rmtree(machine.venv)
    done, _ = machine.install("none", old)
    assert done.returncode == 2 and "set PYTHON to a Python of 3.11" in done.stderr and not machine.venv.exists()


def test_the_list_for_a_cpu_pins_everything_and_brings_no_torch() -> None:
    lines = [line for line in PINS.read_text().splitlines() if not line.startswith("#")]
    names = [line.partition("==")[0].lower() for line in lines]
    assert all(version[:1].isdigit() for _, _, version in (line.partition("==") for line in lines))
    assert names == sorted(names) and len(names) == len(set(names))
    assert not set(names) & {"torch", "triton", "torchvision", "sgl-kernel", "sglang-kernel"}
    assert {"sglang", "transformers", "tokenizers"} <= set(names)


INSTALL = '#!/usr/bin/env bash\necho "install $*" >>"$ASKED"\n'
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *torch.version.cuda*) echo "$DEVICE" ;;
  *multiplies_bfloat16*) echo "$LACKS" ;;
  *learner.main*no.such=*) exit 2 ;;
  *) echo "python $*" >>"$ASKED" ;;
esac
"""


def asked_by(script: str, folder: Path, *arguments: str, device: str = "", lacks: str = "") -> list[str]:
    """What a script asks for, with an install.sh and a Python that only write it down."""
    (folder / "scripts").mkdir(parents=True)
    (folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / script, folder / "scripts" / script)
    (folder / "scripts" / "install.sh").write_text(INSTALL)
    (folder / "scripts" / "check.sh").touch()
    (folder / ".venv" / "bin" / "python").write_text(PYTHON)
    (folder / ".venv" / "bin" / "python").chmod(0o755)
    asked = folder / "asked"
    environment = {**os.environ, "ASKED": str(asked), "DEVICE": device, "LACKS": lacks}
    environment.pop("SLIPSTREAM_PYTHON", None)
    command = ["bash", folder / "scripts" / script, *arguments]
    subprocess.run(command, env=environment, check=True, timeout=150, stderr=subprocess.PIPE, text=True)
    return asked.read_text().splitlines()


SGLANG = ("--set", "rollout.engine=sglang")


@pytest.mark.parametrize(
    ("arguments", "device", "installs"),
    [
        ((), "", ["none"]),
        (SGLANG, "", ["none", "sglang-cpu"]),
        (SGLANG, "13.0", ["none", "sglang"]),
        ((*SGLANG, "--set", "rollout.engine=torch"), "", ["none"]),
    ],
)
def test_the_quick_start_installs_the_engine_that_it_is_told_to_use(
    arguments: tuple[str, ...], device: str, installs: list[str], tmp_path: Path
) -> None:
    asked = asked_by("quickstart.sh", tmp_path, *arguments, device=device)
    assert [line.split()[-1] for line in asked if line.startswith("install")] == installs
    (run,) = [line for line in asked if "learner.main" in line]
    assert run.endswith(" ".join(arguments))  # what the user sets comes last and wins
    assert ("evaluation.every_steps=20" in run) == (installs != ["none"])


def test_the_quick_start_leaves_the_folder_that_pages_name(tmp_path: Path) -> None:
    def names(*arguments: str) -> str:
        folder = tmp_path / "clone"
        asked = asked_by("quickstart.sh", folder, *arguments)
        shutil.rmtree(folder / "scripts")
        shutil.rmtree(folder / ".venv")
        ours = [line.split() for line in asked if "learner.main" in line or "summary" in line][-2:]
        assert ours[1][3] == f"runs/{ours[0][ours[0].index('--name') + 1]}"
        return ours[1][3]

    assert [names(), names(), names("--seed", "3")] == ["runs/quickstart", "runs/quickstart-2", "runs/quickstart-seed3"]


def test_a_run_that_is_refused_leaves_its_name_to_the_next_one(tmp_path: Path) -> None:
    kept = tmp_path / "runs" / "quickstart" / "config.yaml"
    kept.parent.mkdir(parents=True)
    kept.touch()
    with pytest.raises(subprocess.CalledProcessError) as refused:
        asked_by("quickstart.sh", tmp_path, "--set", "no.such=1")
    assert refused.value.returncode == 2 and "summary" not in (tmp_path / "asked").read_text()
    assert list((tmp_path / "runs").iterdir()) == [kept.parent] and kept.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--set", "learner.lr=1e-4", "--set", "run.dir=/scratch"),
            "--set run.dir=/scratch: this script chooses the run",
        ),
        (("--set", "run.name=x"), "learner.main --set run.name=x"),
        (("--set",), "--set needs a value: --seed N"),
        (("--real", "--seed"), "--seed needs a value"),
        (("--seed", "--real"), "--seed '--real' is no whole number"),
        (("--name", "x"), "unknown argument '--name'"),
    ],
)
def test_the_quick_start_refuses_at_once_what_it_could_not_show_at_its_end(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        asked_by("quickstart.sh", tmp_path, *arguments)
    assert refused.value.returncode == 2 and refused.value.stderr.startswith("quickstart.sh: ")
    assert said in refused.value.stderr and refused.value.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".venv", "scripts"], "nothing was asked for"


@pytest.mark.parametrize(("arguments", "preset"), [((), "smollm2-cpu"), (SGLANG, "smollm2-cpu-sglang")])
def test_the_real_quick_start_makes_model_and_prompts_and_trains_on_them(
    arguments: tuple[str, ...], preset: str, tmp_path: Path
) -> None:
    asked = asked_by("quickstart.sh", tmp_path, "--real", "--seed", "3", *arguments)
    assert asked[0].split()[-1] == "recipes"
    ours = [line for line in asked if "-m scripts." in line or "learner.main" in line]
    model, rows, run = ours
    assert "scripts.get_smollm2" in model and "scripts.make_rows chain_sum" in rows
    assert f"--config {preset} --seed 3 " in run and run.endswith(" ".join(arguments))
    config = load(preset)
    assert f"--out {config.model.path}" in model and f"--out {Path(config.data.train).parent} " in rows
    assert f"--eval-prompts {config.evaluation.num_prompts}" in rows or config.evaluation.num_prompts < 256


def test_the_real_quick_start_takes_float32_where_bfloat16_has_no_products(tmp_path: Path) -> None:
    asked = asked_by("quickstart.sh", tmp_path, "--real", lacks="bfloat16")
    (run,) = [line for line in asked if "learner.main" in line]
    assert "--set rollout.dtype=float32 --set learner.compute_dtype=float32 " in run


def test_the_tests_install_what_can_run_and_pass_arguments_on_to_pytest(tmp_path: Path) -> None:
    for device, installs in (("", ["dev", "dev,sglang-cpu"]), ("13.0", ["dev"])):
        asked = asked_by("test.sh", tmp_path / f"device{device}", device=device)
        assert [line.split()[-1] for line in asked if line.startswith("install")] == installs
        assert asked[-1].startswith("python -m pytest -p tests.lanes -n 2 ")
    assert asked_by("test.sh", tmp_path / "one", "tests/replay", "-x")[-1] == "python -m pytest tests/replay -x"
    # all marks, the slow ones too, and what follows goes to pytest
    assert (
        asked_by("test.sh", tmp_path / "all", "--all", "tests/replay")[-1]
        == "python -m pytest -m  --durations 40 tests/replay"
    )
