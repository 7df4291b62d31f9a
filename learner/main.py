"""`python -m learner.main`: the launcher of a run. Alone, it runs the quick start on one CPU machine.

It checks the configuration and the files it names, starts replay, the learner ranks and the local rollout
servers, shows how the run goes, and ends everything it started. The last line says how the run ended; after it comes
only what the trace shows, and which picture or trace could not be written.
"""

import argparse
import logging
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from configs.loading import ConfigError, add_arguments, find, from_arguments, overrides_of
from configs.schema import Config
from replay.channel import ChannelError
from replay.data import DataError
from replay.journal import JournalError
from slipstream.check import checks
from slipstream.check.memory import host_budget, memory_budget, unknown
from slipstream.launch import earlier_run
from slipstream.launch.launcher import Launcher
from slipstream.launch.quickstart import input_is_missing, make_input
from slipstream.launch.run_folder import claim_run_dir, with_free_name
from slipstream.launch.servers import RunFailed
from slipstream.launch.terminal import EVENTS, Interrupted, catch_signals, ignore_signals, keep_events, say
from slipstream.plan.processes import Role, table
from slipstream.runtime import ending as endings
from slipstream.runtime import hang, packages
from slipstream.runtime.fingerprint import FingerprintError
from slipstream.runtime.lifeline import TRY_AGAIN, die_with_parent
from slipstream.runtime.program import program
from slipstream.runtime.vitals.watch import Vitals
from slipstream.translate.refusals import AnsweringParser, refused
from slipstream.view.live_view import LiveView

REFUSALS = (ConfigError, DataError, FingerprintError, ChannelError, JournalError)
"""Errors reported in one line, with exit code 2."""
REPORT_S = 120.0
"""How long the picture or the trace may take after the run."""


def main() -> int:
    """Entry point; exit code 0 only for a run that completed all steps."""
    parser = AnsweringParser(prog=program("learner.main"), description=__doc__)
    add_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the arithmetic, start nothing")
    parser.add_argument("--parent", type=int, default=None, help="pid of the process that started this: end with it")
    parser.add_argument("--resume", metavar="RUN_DIR", help="go on with it from its newest checkpoint and journal")
    parser.add_argument("--replay", metavar="RUN_DIR", help="train again what its journal holds, without any engine")
    args = parser.parse_args()
    if args.parent is not None:
        die_with_parent(args.parent)
    logging.basicConfig(level=logging.WARNING, format="slipstream: %(message)s")
    try:
        config = prepare(args)
        say(config.arithmetic())
        launcher = Launcher(
            config, args.resume is not None, LiveView(config, "off"), play=args.replay, is_dry=args.dry_run
        )
        plan = launcher.plan()
        if args.dry_run:
            roles: tuple[Role, ...] = ("replay", "learner", "teacher", "rollout")
            sys.stdout.write(table(plan, roles if config.placement.local_rollouts else roles[:3]) + "\n")
            sys.stdout.write(memory_budget(config))
            sys.stdout.write(f"{host_budget(config)[1]}\n".lstrip())
            if launcher.lacks_gpus:
                unseen = ["gpu", "kernels", *unknown(config)]
                say(f"not looked at, without a usable GPU here: {', '.join(unseen)}")
            say(f"dry run: configuration and files are in order; the run folder would be {config.run_dir}")
            return 0
        if args.resume is not None:
            folder, overrides = Path(args.resume), overrides_of(args)
            earlier_run.check_ended(folder)
            earlier_run.log_changes(folder, earlier_run.changes(folder, overrides, config))
        launcher.config = claim_run_dir(config, new=args.resume is None)
        if launcher.config.run_dir != config.run_dir:
            say(f"{config.run_dir} was taken meanwhile; this run is {launcher.config.run_dir}")
        launcher.view = LiveView(launcher.config, config.tracking.live)
        code = run(launcher)
        return earlier_run.report(launcher.config, code) if args.replay is not None else code
    except REFUSALS as error:
        say(refused(error))
        return 2
    except RunFailed as failure:
        say(f"not resumed: {failure}")
        return TRY_AGAIN


def prepare(args: argparse.Namespace) -> Config:
    """The checked configuration, with a free run folder or that of the resumed run."""
    has_input = True
    if args.resume is not None:
        source = os.path.abspath(find(args.config)) if args.is_config_given else None
        folder, overrides = earlier_run.go_where_it_started(Path(args.resume)), overrides_of(args)
        args.resume = str(folder)
        config = earlier_run.resumed(folder, overrides, source)
        changed = earlier_run.described(earlier_run.changes(folder, overrides, config))
        for line in changed:
            say(f"changed: {line}")
        say(earlier_run.goes_on(folder) + (", with what is changed" if changed else ""))
    elif args.replay is not None:
        args.replay = str(earlier_run.go_where_it_started(Path(args.replay)))
        config = earlier_run.played_back(Path(args.replay), overrides_of(args))
    else:
        config = from_arguments(args)
        if args.dry_run and input_is_missing(config, args.config):
            has_input = False
            folder = Path(config.model.path).parent
            say(f"a run would first make the quick start's model and prompts in {folder} (once, about 10 s)")
        else:
            make_input(config, args.config)
        taken, config = config.run_dir, with_free_name(config)
        if config.run_dir != taken:
            say(f"{taken} exists; this run is {config.run_dir}")
    checks.require(config, say, checks.CHECKS if args.dry_run else checks.AT_START, has_input=has_input)
    return config


def run(launcher: Launcher) -> int:
    """Run to the end; everything that was started is ended, whatever happens."""
    config, view = launcher.config, launcher.view
    catch_signals()
    keep_events(config.run_dir)
    endings.clear(config.run_dir)
    hang.begin("launcher", config.run_dir, keys=config.network.keys)
    started = time.monotonic()
    code, ending = 1, ""
    vitals = ExitStack()
    try:
        vitals.enter_context(Vitals(config, "launcher", "launcher"))
        launcher.start()
        if not config.placement.local_rollouts and config.needs_servers:
            view.event(f"replay listens at {launcher.address}: start rollout servers with --replay {launcher.address}")
        launcher.watch()
        launcher.leave()
        code, ending = 0, f"finished {config.learner.total_steps} steps in {time.monotonic() - started:.1f} s"
    except RunFailed as failure:
        ending = f"run stopped: {failure}"
    except Interrupted as interruption:
        code, ending = 130, f"run stopped: {interruption}"
    except Exception as error:
        ending = f"run stopped: {type(error).__name__}: {error}"
        raise
    finally:
        if code == 130:
            with suppress(Interrupted):
                launcher.write_checkpoint(ending.removeprefix("run stopped: "))
        ignore_signals()
        launcher.stop()
        if code == 130:
            ending += f"; {earlier_run.goes_on(Path(config.run_dir))}"
        EVENTS.log(logging.ERROR if code == 1 else logging.INFO, "%s", ending)
        endings.write(config.run_dir, code, ending)
        vitals.close()
        view.close(ending)
    say(f"{ending} (run folder: {config.run_dir})")
    write_reports(config)
    return code


def write_reports(config: Config) -> None:
    """Draw the picture and merge the trace; what is not written is said, and does not change the exit code."""
    due = []
    if config.tracking.plot and (Path(config.run_dir) / "metrics.jsonl").exists():
        due.append(("plots/summary.png", "slipstream.view.plot"))
    if config.tracking.profile:
        due.append(("the trace", "slipstream.view.trace"))
    interrupted = ""
    catch_signals()
    for what, module in due:
        try:
            why = interrupted or write_report(module, config.run_dir)
        except Interrupted as interruption:
            why = interrupted = str(interruption)
        if why:
            say(f"{what} was not written: {why}; python -m {module} {config.run_dir} writes it")
    ignore_signals()


def write_report(module: str, run_dir: str) -> str:
    """Write one of them and show what it says of the trace; returns why it was not written, if so."""
    command, environment = [sys.executable, "-m", module, run_dir], os.environ | packages.environment()
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=REPORT_S, env=environment)
    except subprocess.TimeoutExpired:
        return f"it was not ready after {REPORT_S:g} s"
    if made.returncode != 0:
        return made.stderr.strip().removeprefix("slipstream: ")[-300:] or f"exit code {made.returncode}"
    if module == "slipstream.view.trace":
        for line in made.stdout.strip().splitlines():
            say(line)
    return ""


if __name__ == "__main__":
    sys.exit(main())
