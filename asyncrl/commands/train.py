"""`asyncrl train [CONFIG.toml ...] [--flags]`: improve a policy inside a world model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from asyncrl import __version__
from asyncrl.config.help import DRY_RUN, TRAIN, ShortHelp
from asyncrl.config.run import TrainConfig, gone_settings, load_file, parse, split_files, to_toml
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.launch.job import Hosts, read_job
from asyncrl.launch.placement import checked_placement, ranks_named, sizes_of_hosts
from asyncrl.storage import run_folder


def dry_run(config: TrainConfig) -> int:
    """Check a run without starting it, and print its settings with the world's defaults; 0 if it would start.

    First the refusals of `asyncrl train`, then the doctor's checks that start no process and write no file.
    Standard output gets the settings and nothing else, so that it can be a file. Other ranks do nothing.
    """
    from asyncrl.doctor.checks import Examination, Verdict, examine, one_line, render
    from asyncrl.launch import console  # Loads torch, which --help must not.

    if read_job().rank:
        return 0
    refused, said, checks = [], [*console.notes(config)], 0
    for check in _refusals(config):
        try:
            check()
        except AsyncRLError as error:
            refused.append(one_line(error))
    examination = Examination(config=config)
    for finding in examine(examination, reading_only=True):
        checks += 1
        if finding.verdict is Verdict.BROKEN:
            refused.append(f"{finding.seen} {finding.advice}".rstrip())
        if finding.verdict is Verdict.WARNING:
            said.append(render(finding))
    for line in said:
        print(line, file=sys.stderr)
    print(f"# asyncrl {__version__}: all settings of a run. Start it: asyncrl train FILE")
    print(to_toml(examination.config), end="", flush=True)
    if refused:
        raise ConfigError("\n".join(dict.fromkeys(refused)))
    print(f"{checks} checks passed. Nothing was started or written.", file=sys.stderr)
    return 0


def _refusals(config: TrainConfig) -> list[Callable[[], object]]:
    """List the checks before a run; each raises by itself, so that every problem is reported."""
    from asyncrl.launch import console, endpoints
    from asyncrl.launch.build import check_resumed
    from asyncrl.launch.environment import check_environment
    from asyncrl.launch.named_models import named_policy
    from asyncrl.learner.recipe import build_recipe
    from asyncrl.simulators.interface import SimulatorSource

    def placed() -> None:
        ranks = read_job().size if "RANK" in os.environ else ranks_named(config.placement)
        placement = checked_placement(config, ranks)
        hosts = Hosts.of_sizes(sizes_of_hosts(config.placement) or (ranks,))
        endpoints.check(config, placement, hosts, read_job())

    simulator, keywords = config.evaluation.simulator, config.evaluation.simulator_settings
    return [
        partial(build_recipe, config.algorithm, config.correction, config.critic),
        *([] if config.inline else [placed]),
        partial(_check_folder, config),
        partial(check_resumed, config),
        partial(console.check_sinks, config),
        partial(named_policy, config.policy, config.policy_settings),
        partial(check_environment, config),
        *([SimulatorSource(name=simulator, settings=keywords).spec] if simulator else []),
    ]


def _check_folder(config: TrainConfig) -> None:
    from asyncrl.doctor.host import existing_parent

    folder = run_folder.locate(config)
    if not os.access(above := existing_parent(folder), os.W_OK | os.X_OK):
        raise ConfigError(f"--run-dir {folder} cannot be made: {above} is read-only. Choose another folder.")


def main(arguments: list[str]) -> int:
    """Run this process's part of a run, or start torchrun when the placement needs more ranks."""
    only_check = DRY_RUN in arguments
    arguments = [argument for argument in arguments if argument != DRY_RUN]
    config = read_settings(arguments)
    if only_check:
        return dry_run(config)
    ranks = ranks_named(config.placement)
    if ranks > 1 and "RANK" not in os.environ and not config.inline:
        checked_placement(config, ranks)  # Errors come before torchrun starts.
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        os.execv(sys.executable, [sys.executable, *torchrun, "-m", "asyncrl", "train", *arguments])  # noqa: S606
    if os.environ.get("RANK", "0") == "0":
        # The first sign of life: importing torch and loading models takes seconds.
        print(f"asyncrl {__version__}: loads world {config.world} and policy {config.policy}", flush=True)
    from asyncrl.launch import rank

    return rank.run_inline(config) if config.inline else rank.run(config)


def read_settings(arguments: list[str], help_text: ShortHelp = TRAIN) -> TrainConfig:
    """Read `[CONFIG.toml ...] [--flags]`; with --resume, they override those of the resumed run."""
    config = parse(arguments, help_text)
    if not config.resume:
        return _with_decay(config, config)
    # Rank 0 alone decides which run goes on; by now it may have made it one that is in use.
    return config if read_job().rank else _with_settings_of_run(config, arguments)


def _with_settings_of_run(config: TrainConfig, arguments: list[str]) -> TrainConfig:
    path = Path(config.run_dir).expanduser()
    if run_folder.TIME in config.run_dir and run_folder.TIME not in str(path.parent):
        path = run_folder.newest(path.parent)
    settings = path / "config.json"
    files, _ = split_files(arguments)
    if settings.is_file() and not files:
        if gone := gone_settings(settings):
            print(f"{settings}: left out, as they no longer exist: {gone}", file=sys.stderr)
        named_here = config
        config = parse([str(settings), *arguments])
        from asyncrl.launch.named_models import refuse_foreign_code

        refuse_foreign_code(config, named_here, str(settings))
    before = load_file(settings) if settings.is_file() else config
    return _with_decay(replace(config, run_dir=str(path)), before)


def _with_decay(config: TrainConfig, begun: TrainConfig) -> TrainConfig:
    """Fix the update at which the learning-rate decay ends; a resume with more updates keeps it."""
    chosen, before = config.optimizer, begun.optimizer
    if chosen.schedule == "constant" or chosen.decay_updates:
        return config
    falls_already = before.schedule != "constant"
    end = (before.decay_updates or begun.updates) if falls_already else config.updates
    return replace(config, optimizer=replace(chosen, decay_updates=end))
