"""The list of checks: what every start, every dry run and doctor look at on this machine, each by its code.

A check yields findings, or raises one of REFUSALS; a check that yields nothing has passed. `--dry-run` and a start show
warnings and refuse what would stop the run; doctor shows all of it, and adds what only several places tell
(examination.py).
"""

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from configs.errors import BadValue, ConfigError, Contradiction, InputMissing, NoRoom, PackageMissing
from configs.machine import NCCL_DEFAULTS, has_usable_gpu, multiplies_bfloat16
from configs.schema import Config
from learner import rules
from replay.channel import ChannelError, load_keys
from replay.data import DataError
from replay.data.rows import RowError
from replay.journal import JournalError, check_place
from rollout_server.tasks.environments import EnvironmentFailed
from rollout_server.tasks.rewards import RewardError
from slipstream.check import facts, functions, machine, memory, model_folders, prompts, teachers
from slipstream.check.finding import Finding, Severity, ok, refused, warn
from slipstream.families.sizes import Sizes
from slipstream.runtime.fingerprint import FingerprintError
from slipstream.runtime.variants import VariantFails

REFUSALS = (ConfigError, DataError, FingerprintError, ChannelError, JournalError)
KINDS = {frozenset({"disk", "journal", "shared-memory", "host-memory"}): NoRoom, frozenset({"kernel"}): PackageMissing}
"""By codes of findings that are no refusals themselves, the error of a start."""
TRIAL_STEPS = 10
"""A run of so few steps tries something out, and needs no learning rate."""
WRITTEN = ("*/", "*.jsonl", "config.yaml", "journal/*", "logs/*.log")
"""Of a run folder: what a run that goes on writes to, some of it only after hours."""


@dataclass(frozen=True)
class Subject:
    """What is checked."""

    config: Config
    has_input: bool = True
    """False: the dry run of a quick start that is yet to make its model and data."""

    @cached_property
    def sizes(self) -> Sizes | None:
        """Of the policy; None where its config.json cannot be read, which `model` names."""
        return memory.sizes_of(self.config)

    @property
    def serves(self) -> bool:
        """Whether rollout servers run on this machine; elsewhere, their files may lie on the rollout nodes alone."""
        return self.config.placement.local_rollouts and self.config.needs_servers

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of this machine."""
        return ("learner", "rollout") if self.serves else ("learner",)


Look = Callable[[Subject], Iterable[Finding]]


def model(subject: Subject) -> Iterator[Finding]:
    """Model folder, critic's and reference's, and whether the run's lengths and mesh fit the model."""
    if not subject.has_input:
        yield ok("model", "a run makes the quick start's model and prompts first (about 10 s)")
        return
    model_folders.check_policy(subject.config)


def data(subject: Subject) -> Iterator[Finding]:
    """The first rows of every data file, rendered and tokenised; and teachers, with what they ask of the rows."""
    if subject.has_input and Path(subject.config.model.path, "config.json").is_file():
        yield from prompts.files(subject.config)
        yield from teachers.check(subject.config)


def reward(subject: Subject) -> Iterator[Finding]:
    """Functions, environments and tools of the user's own."""
    if not subject.serves:
        return
    try:
        functions.load(subject.config)
    except (RewardError, EnvironmentFailed) as error:
        raise InputMissing(str(error)) from error
    yield ok("reward", " + ".join(part.label for part in subject.config.reward.parts))


def algorithm(subject: Subject) -> Iterator[Finding]:
    """Loss, advantage, correction and filter: whether they are there, and suit each other and the run."""
    parts = rules.chosen(subject.config)
    for problem in rules.problems(subject.config, parts):
        raise Contradiction(problem)
    if subject.config.learner.facts.from_data:
        yield ok("algorithm", str(subject.config.learner.objective))
        if idle := 0 if subject.config.needs_servers else subject.config.num_rollout_devices:
            what, mend = f"{idle} devices of the placement serve nothing", "give the learner all of them: split 0:L"
            yield warn("algorithm", what, why="neither training nor evaluation samples an answer", mend=mend)
        return
    functions.try_advantage(subject.config, parts)
    try:
        functions.try_loss(subject.config, parts)
    except VariantFails as error:
        if not (machine.on_gpus(subject.config) and isinstance(error.__cause__, functions.ON_GPUS)):
            raise
        why = "it was tried on a CPU and alone; what is made for GPUs or for several ranks may fail only there"
        yield warn("algorithm", str(error), why=why)
    names = [parts.loss.name, parts.advantage.name, *([parts.correction.name] if parts.correction else [])]
    yield ok("algorithm", ", ".join(names))


def bus(subject: Subject) -> Iterator[Finding]:
    """The backend of the weight bus, and the environment that rollout servers of a shell bring to it."""
    config = subject.config
    if config.weight_bus.on_gpus and config.placement.device == "cpu":
        raise Contradiction("weight_bus.backend: 'nccl' needs GPUs, placement.device is 'cpu'; take 'gloo'")
    if not subject.serves and config.needs_servers:
        yield from shell(config)


def shell(config: Config, severity: Severity = "warn") -> Iterator[Finding]:
    """Rollout servers that a shell starts take NCCL's environment from it, not from the plan."""
    for name, default in NCCL_DEFAULTS.items() if config.weight_bus.on_gpus else ():
        value = config.network.env.get(name, default)
        if os.environ.get(name, value) != value:
            yield Finding(
                severity,
                "environment",
                f"{name} is {os.environ[name]} in this shell and {value} in the run",
                why="a rollout server that is started from such a shell is refused by the weight bus",
                mend=f"unset {name} here, or --set 'network.env={{{name}: \"{os.environ[name]}\"}}' for the whole run",
            )


def trackers(subject: Subject) -> Iterator[Finding]:
    """Packages of trackers and of Prometheus, and a variable that wandb refuses."""
    tracking = subject.config.tracking
    if "wandb" in tracking.trackers and os.environ.get("WANDB_MODE") == "":
        raise BadValue("tracking.trackers: WANDB_MODE is set, but empty, which wandb refuses; unset WANDB_MODE")
    needed = {name: (f"tracking.trackers: {name}", name.replace("_", "-")) for name in map(str, tracking.trackers)}
    if tracking.prometheus is not None:
        needed["prometheus_client"] = (f"tracking.prometheus: {tracking.prometheus}", "prometheus")
    for package, (key, extra) in needed.items():
        if importlib.util.find_spec(package) is None:
            raise PackageMissing(
                f"{key}, and {package} is not installed; install the extra: pip install 'slipstream-rl[{extra}]', or"
                " leave it out"
            )
    yield ok("trackers", ", ".join(needed) or "none")


def keys(subject: Subject) -> Iterator[Finding]:
    """network.keys is a folder of keys with which this node can serve, and its own key is admitted."""
    found = load_keys(subject.config.network.keys)
    if found is None:
        return
    found.serving_secret()
    if found.client_public not in found.clients:
        raise InputMissing(
            f"network.keys: {found.folder / 'clients'} admits {', '.join(found.clients.values())}, but not the key"
            f" {found.name!r} that this node connects with; copy the whole folder that `python -m replay.keys` made"
        )
    yield ok("keys", f"{len(found.clients)} clients are admitted")


def run_folder(subject: Subject) -> Iterator[Finding]:
    """A file can be created where the run folder would be, its own be written, and its disk has room."""
    config = subject.config
    folder = Path(config.run_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise not_writable(config, folder, error) from error
    for path in sorted(found for pattern in WRITTEN for found in Path(config.run_dir).glob(pattern)):
        if not os.access(path, os.W_OK):
            raise NoRoom(f"run.dir: this user may not write to {path}, and the run will; give it to this user (chown)")
    yield ok("run-folder", config.run_dir)
    yield machine.disk(config, subject.sizes)


def journal(subject: Subject) -> Iterator[Finding]:
    """replay.journal_dir is a folder that can be written to, with room, and has the journal of a run that goes on."""
    config, folder = subject.config, subject.config.replay.journal_dir
    check_place(config.run_dir, folder)
    if folder is None:
        return
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise NoRoom(
            f"replay.journal_dir: {folder!r}: {error.strerror}; name a folder that is there on the first learner node"
            " and that this user may write to"
        ) from error
    yield machine.journal_disk(config)


def not_writable(config: Config, folder: Path, error: OSError) -> NoRoom:
    """The refusal of a folder that a run cannot write to."""
    why = "is a file" if folder.is_file() else f"is not writable ({error.strerror})"
    return NoRoom(f"run.dir: {config.run.dir!r}: {folder} {why}; name a folder that this user may write to")


def port(subject: Subject) -> Iterator[Finding]:
    """Replay's port is free."""
    host, number = subject.config.network.host, subject.config.network.replay_port
    if problem := machine.problem_with_port(host, number):
        raise NoRoom(
            f"network.replay_port: {number} on {host} cannot be bound ({problem}); another run may use it; choose"
            " another port, or 0 for a free one"
        )
    yield ok("port", f"{host}:{number}" if number else "a free one")


def gpu_memory(subject: Subject) -> Iterator[Finding]:
    """An engine's weights, and the learner's budget with its figures."""
    memory.check_engine(subject.config)
    budget = memory.memory_budget(subject.config) if subject.sizes is not None else ""
    last = budget.strip().splitlines()[-1] if budget else "the model is on a CPU, or config.json is not here"
    yield ok("gpu-memory", " ".join(last.split()))


def learning_rate(subject: Subject) -> Iterator[Finding]:
    """A learning rate that no step has."""
    learner = subject.config.learner
    if learner.warmup_steps >= learner.total_steps > TRIAL_STEPS:
        what = f"learner.warmup_steps {learner.warmup_steps} of learner.total_steps {learner.total_steps}"
        why = "a run that never reaches its learning rate looks fine and learns little"
        mend = f"--set learner.warmup_steps={learner.total_steps // 10}"
        yield warn("learning-rate", f"{what}: it ends below learner.lr {learner.lr:g}", why=why, mend=mend)


def shared_memory(subject: Subject) -> Iterator[Finding]:
    """/dev/shm beside what this machine's engines take of it."""
    if subject.serves:
        engines = machine.engines_on(subject.config, subject.config.shares[0].node)
        yield machine.shared_memory(subject.config, subject.sizes, facts.shared_memory(), engines, "")


def host_memory(subject: Subject) -> Iterator[Finding]:
    """What the learner's ranks pin of this machine's memory; without a GPU that the run has, it is another machine."""
    if subject.sizes is not None and (has_usable_gpu(os.environ) or not machine.on_gpus(subject.config)):
        needs, said = memory.host_budget(subject.config)
        there = psutil.virtual_memory()
        yield machine.host_memory(needs, said, there.total, there.available)


def limits(_subject: Subject) -> Iterator[Finding]:
    """Of this process, which its children inherit."""
    yield machine.limits(facts.open_files(), "")


def processor(subject: Subject) -> Iterator[Finding]:
    """Products of bfloat16 where a run on a CPU asks for them."""
    config = subject.config
    asked = {"rollout.dtype": config.rollout.dtype, "learner.compute_dtype": config.learner.compute_dtype}
    keys = [key for key, dtype in asked.items() if dtype == "bfloat16"]
    if config.placement.device == "cpu" and keys and multiplies_bfloat16() is False:
        what = f"{' and '.join(keys)}: bfloat16, of which this processor has no products (avx512_bf16, amx_bf16)"
        mend = " ".join(f"--set {key}=float32" for key in keys)
        yield warn("processor", what, why="on one without them a step in float32 took a quarter of the time", mend=mend)


def versions(_subject: Subject) -> Iterator[Finding]:
    """Packages of other versions than the pins ask for."""
    for pin in facts.broken_pins():
        yield warn("versions", pin, mend="bash scripts/install.sh --venv .venv installs what fits")


def kernels(subject: Subject) -> Iterator[Finding]:
    """Modules with kernels that are not installed; elsewhere than on a GPU, this is not the machine of the run."""
    names = {name for role in subject.roles for name in machine.needed_kernels(subject.config, role)}
    absent = {name: "it is not installed" for name in sorted(names) if importlib.util.find_spec(name) is None}
    if absent and has_usable_gpu(os.environ):
        yield from machine.kernels(absent, facts.compiler(), "")


def packages(subject: Subject) -> Iterator[Finding]:
    """The engine and the backend of the bus are installed."""
    check_available(subject.config, runs_servers=subject.serves)
    yield ok("packages", f"engine {subject.config.rollout.engine}, bus {subject.config.weight_bus.medium}")


def check_available(config: Config, *, runs_servers: bool) -> None:
    """Raises ConfigError: the engine is not installed where servers run, or the bus asks for a UCC that is not here."""
    if config.weight_bus.medium == "ucc":
        from weight_bus import WeightBusError  # here, because it imports torch, which the launcher does without
        from weight_bus.transports import resolve_ucc

        try:
            resolve_ucc()
        except WeightBusError as error:
            raise PackageMissing(str(error)) from error
    package = config.rollout.facts.package
    if runs_servers and package is not None and importlib.util.find_spec(package) is None:
        raise PackageMissing(
            f"rollout.engine: {config.rollout.engine!r} is not installed here; install the extra: pip install"
            f" 'slipstream-rl[{package}]', or take 'torch' for a small model"
        )


OF_THE_RUN: tuple[Look, ...] = (model, data, reward, algorithm, bus, trackers, keys, gpu_memory, learning_rate)
"""What does not depend on the machine that the run will have."""
OF_THIS_MACHINE: tuple[Look, ...] = (
    run_folder,
    journal,
    port,
    shared_memory,
    host_memory,
    limits,
    processor,
    versions,
    kernels,
)
CHECKS: tuple[Look, ...] = (*OF_THE_RUN, *OF_THIS_MACHINE)
AT_START: tuple[Look, ...] = (*CHECKS, packages)
"""A dry run may be made on another machine than the run."""


ABSENT = (InputMissing, PackageMissing, DataError, FingerprintError)
"""What may be on the machines of a run though it is not here."""


def found(
    config: Config, checks: Iterable[Look] = CHECKS, *, has_input: bool = True, unseen: list[str] | None = None
) -> Iterator[Finding]:
    """What these checks find, one after the other; one cause that several checks meet is named once.

    With `unseen`, what is absent here is added to it: the files of the run may lie elsewhere.
    """
    subject, causes = Subject(config, has_input), set[str]()
    for check in checks:
        try:
            yield from check(subject)
        except REFUSALS as error:
            if unseen is not None and isinstance(error, ABSENT) and not isinstance(error, RowError):
                unseen.append(f"{name_of(check)} ({str(error).partition('; ')[0]})")
            elif str(error) not in causes:
                yield refused(name_of(check), error)
            causes.add(str(error))


def name_of(check: Look) -> str:
    """Its code."""
    return check.__name__.replace("_", "-")


def require_elsewhere(config: Config, say: Callable[[str], None], *, sees_files: bool, has_input: bool = True) -> None:
    """The checks of a run that other machines will have; says which could not be made from here.

    Args:
        config: of the run.
        say: gets a line for each thing to know.
        sees_files: whether those machines have the files and packages of this one.
        has_input: see Subject.

    Raises:
        ConfigError: as `require`.
    """
    config = config.model_copy(update={"placement": config.placement.model_copy(update={"local_rollouts": True})})
    unseen = [name_of(check) for check in (*OF_THIS_MACHINE, packages)] + memory.unknown(config)
    try:
        require(config, say, OF_THE_RUN, has_input=has_input, unseen=None if sees_files else unseen)
    finally:
        say(f"not looked at from here: {', '.join(unseen)}")


def require(
    config: Config,
    say: Callable[[str], None],
    checks: Iterable[Look] = CHECKS,
    *,
    has_input: bool = True,
    unseen: list[str] | None = None,
) -> None:
    """Say what is to be looked at. Raises ConfigError with a line for everything that would stop the run."""
    findings = list(found(config, checks, has_input=has_input, unseen=unseen))
    for finding in findings:
        if finding.severity == "warn":
            say(finding.line)
        elif finding.code == "data" and finding.severity == "ok":
            say(finding.text)  # how the rows are read
    stops = [finding for finding in findings if finding.severity == "stop"]
    if stops:
        codes = {finding.code for finding in stops}
        kind = next((kind for some, kind in KINDS.items() if codes <= some), ConfigError)
        raise kind("\n".join(finding.text for finding in stops))
