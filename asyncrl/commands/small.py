"""Commands of a few lines.

`asyncrl actor --join ENDPOINT`: join a running run as one more actor, from any host.
`asyncrl simulators list|lite NAME`: list the simulators; make light scenes of a LIBERO suite.
`asyncrl keys DIR`: make keys for a replay that other hosts can reach.
`asyncrl metrics [--waits]`: print the reference page of all metrics, or of all waits.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from asyncrl import registry
from asyncrl.config.bounds import Bounded
from asyncrl.config.help import subcommands
from asyncrl.errors import AsyncRLError, ConfigError, first_line
from asyncrl.launch import join
from asyncrl.launch.join import JoinOptions
from asyncrl.messaging.keys import ALLOWED, create_keys


@dataclass(frozen=True, kw_only=True)
class KeysConfig:
    """Make the key pairs of a replay and of the processes that it admits. Existing keys are kept."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder for the keys, for example ~/.asyncrl/keys; made private (mode 0700)."""
    clients: tuple[str, ...] = ("learner", "actor-0")
    """Names of the processes: learner, and an actor-N for each rank N that imagines."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Print the reference page of all metrics (docs/metrics.md)."""

    waits: bool = False
    """The page of all waits instead (docs/waits.md)."""


@dataclass(frozen=True, kw_only=True)
class ListSimulators:
    """List the simulators that `--simulator` knows by name, and their tasks."""

    def run(self) -> int:
        """Print a line per simulator; unusable ones last, grouped by the reason."""
        from asyncrl.observability.terminal import hanging
        from asyncrl.simulators.interface import SimulatorSource

        unusable: dict[str, list[str]] = {}
        for name in {**registry.BUILT_IN["simulator"], **registry.registered("simulator")}:
            try:
                spec = SimulatorSource(name=name).spec()
            except AsyncRLError as error:
                unusable.setdefault(first_line(error), []).append(name)
                continue
            starts = f"{spec.trials} stored starts each" if spec.trials else "random starts"
            print(f"{name:<24} {len(spec.tasks):>2} tasks, {starts}, {spec.max_steps} steps")
        for reason, names in unusable.items():
            print(hanging("not usable here: ", reason))
            print(hanging("    ", " ".join(names)))
        return 0


@dataclass(frozen=True, kw_only=True)
class LightScenes(Bounded):
    """Make light scenes of a LIBERO suite, drawn several times faster; used with scene=light.

    Purely visual shapes are simplified and textures made smaller. They go to the user's cache
    (XDG_CACHE_HOME). The physics stays the same to the bit; pictures look slightly different, so evaluate
    published policies in the stock scene.
    """

    suite: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SUITE")]
    """libero_spatial, libero_object, libero_goal, libero_10 or libero_90."""

    def run(self) -> int:
        """Make them and print the numbers of faces."""
        from asyncrl.simulators.libero.light import make_light
        from asyncrl.simulators.libero.tasks import SUITES

        if self.suite not in SUITES:
            raise ConfigError(f"there are no light scenes of {self.suite!r}. There are: {', '.join(SUITES)}.")
        report = make_light(self.suite, say=lambda text: print(text, file=sys.stderr))
        print(
            f"{report.folder}: {report.shapes} shapes of {report.faces_before} faces now have "
            f"{report.faces_after}, {report.textures} textures are smaller"
        )
        if report.kept:
            print(f"{len(report.kept)} shapes could not be simplified and stay: {', '.join(report.kept)}")
        print(f"Use them: --simulator {self.suite} --simulator-settings scene=light")
        return 0


SIMULATORS: Any = subcommands({"list": ListSimulators, "lite": LightScenes})


def actor(arguments: list[str]) -> int:
    """Join, imagine, leave."""
    return join.run(tyro.cli(JoinOptions, args=arguments, prog="asyncrl actor"))


def simulators(arguments: list[str]) -> int:
    """List them, or make light scenes."""
    return tyro.cli(SIMULATORS, args=arguments, prog="asyncrl simulators").run()


def keys(arguments: list[str]) -> int:
    """Make the missing keys, and print where each belongs."""
    config = tyro.cli(KeysConfig, args=arguments, prog="asyncrl keys")
    folder = config.folder.expanduser()
    written = create_keys(folder, config.clients)
    kept = len({*config.clients}) + 1 - len(written)
    print(f"{folder}: {len(written)} key pairs made, {kept} were there and stay as they are")
    for path in written:
        print(f"  {path.name}")
    print(
        f"\nThe replay's host needs server.secret, server.public and the folder {ALLOWED}/: who may come.\n"
        "A client on another host needs server.public and its own NAME.secret, in a folder of mode 0700:\n"
        f"scp -p {folder}/server.public {folder}/actor-0.secret HOST:DIR/\n"
        f"Clients may be added while a run goes on. To shut one out, delete {ALLOWED}/NAME.public: it cannot "
        "connect\nagain; what it has open stays until it ends or the replay restarts.\n\n"
        f"Use them: asyncrl train --replay.listen tcp://ADDRESS:PORT --replay.keys {folder}"
    )
    return 0


def metrics(arguments: list[str]) -> int:
    """Print a page."""
    from asyncrl.observability import metrics, waits

    config = tyro.cli(MetricsConfig, args=arguments, prog="asyncrl metrics")
    print((waits if config.waits else metrics).as_markdown(), end="")
    return 0
