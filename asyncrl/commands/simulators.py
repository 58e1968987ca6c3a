"""`asyncrl simulators list|lite NAME`: list the simulators; make light scenes of a LIBERO suite."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import tyro

from asyncrl import registry
from asyncrl.config.bounds import AtLeast, Bounded
from asyncrl.errors import AsyncRLError, ConfigError, first_line

_named = tyro.conf.subcommand


@dataclass(frozen=True, kw_only=True)
class List:
    """List the simulators that `--simulator` knows by name, and what each of them plays."""

    def run(self) -> int:
        """Print a line each; those that cannot be used here stand below, by the reason."""
        from asyncrl.observability.console import hanging
        from asyncrl.simulators.build import SimulatorSource

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
class Lite(Bounded):
    """Make light scenes of a LIBERO suite, drawn several times faster; used with scene=light.

    Shapes that are only looked at are simplified and textures made smaller. They go to the user's cache
    (XDG_CACHE_HOME). The physics stays the same to the bit; pictures look slightly different, so evaluate
    published policies in the stock scene.
    """

    SECTION: ClassVar[str] = ""

    suite: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SUITE")]
    """libero_spatial, libero_object, libero_goal, libero_10 or libero_90."""
    faces: Annotated[int, AtLeast(50, "a shape needs faces.", "Use 3600.", highest=1_000_000)] = 3600
    """Faces that a shape keeps at most; one of loose parts keeps three times as many."""
    texture: Annotated[int, AtLeast(16, "a texture needs pixels.", "Use 512.", highest=16_384)] = 512
    """Pixels that a texture's longer side keeps at most."""

    def run(self) -> int:
        """Make them and print the numbers of faces."""
        import difflib

        from asyncrl.simulators.libero.light import make_light
        from asyncrl.simulators.libero.tasks import SUITES

        if self.suite not in SUITES:
            near = difflib.get_close_matches(self.suite, SUITES, n=1)
            hint = f"Perhaps you meant {near[0]!r}. " if near else ""
            raise ConfigError(
                f"there are no light scenes of {self.suite!r}. {hint}There are: {', '.join(SUITES)}."
            )
        report = make_light(
            self.suite, faces=self.faces, texture=self.texture, say=lambda text: print(text, file=sys.stderr)
        )
        print(
            f"{report.folder}: {report.shapes} shapes of {report.faces_before} faces now have "
            f"{report.faces_after}, {report.textures} textures are smaller"
        )
        if report.kept:
            print(f"{len(report.kept)} shapes could not be simplified and stay: {', '.join(report.kept)}")
        print(f"Use them: --simulator {self.suite} --simulator-settings scene=light")
        return 0


ARGUMENTS: Any = Annotated[List, _named(name="list")] | Annotated[Lite, _named(name="lite")]


def main(arguments: list[str]) -> int:
    """Run one of them."""
    wanted: Any = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl simulators")
    return wanted.run()
