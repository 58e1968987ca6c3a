"""`asyncrl keys DIR`: make keys for a replay that other hosts can reach."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import tyro

from asyncrl.errors import ConfigError
from asyncrl.messaging.keys import ALLOWED, create_keys


@dataclass(frozen=True, kw_only=True)
class KeysConfig:
    """Make the key pairs of a replay and of the processes that it admits. Existing keys are kept."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder for the keys, for example ~/.asyncrl/keys; made private (mode 0700)."""
    clients: tuple[str, ...] = ("1",)
    """One number N: the learner and actor-0 to actor-(N-1), one actor per rank. Or names: learner actor-0."""


ARGUMENTS: Final = KeysConfig
"""What the command takes; tab completion reads it too."""


def main(arguments: list[str]) -> int:
    """Make what is missing and say what to copy where."""
    config = tyro.cli(ARGUMENTS, args=arguments, prog="asyncrl keys")
    folder = config.folder.expanduser()
    names = _names(config.clients)
    written = create_keys(folder, names)
    kept = len(names) + 1 - len(written)
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


def _names(clients: tuple[str, ...]) -> list[str]:
    if len(clients) == 1 and clients[0].isdecimal():
        count = int(clients[0][:6])
        if not 1 <= count <= 1024:
            raise ConfigError(f"--clients is {clients[0]}, but it counts actors. Use 1 to 1024, or names.")
        return ["learner", *(f"actor-{number}" for number in range(count))]
    if not clients:
        raise ConfigError("--clients is empty, so nobody would be admitted. Give a number, or names.")
    return list(dict.fromkeys(clients))
