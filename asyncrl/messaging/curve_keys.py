"""Make and read key pairs for CURVE.

    DIR/                   mode 0700
      server.secret        mode 0600; stays on the replay's host
      server.public        every client needs it to know the replay by
      NAME.secret          mode 0600; belongs to the process NAME: learner, actor-0, ...
      clients/NAME.public  the allow-list: whoever holds the matching secret is admitted, nobody else;
                           files may come and go while the replay runs

A key file is one line of 40 characters in ZeroMQ's Z85 alphabet. Files are never overwritten.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from asyncrl.errors import ConfigError
from asyncrl.storage.private_files import check_private

LEARNER: Final = "learner"
"""Name of the learner's key."""
ALLOWED: Final = "clients"
"""Folder of the public keys that are admitted."""
_SERVER: Final = "server"
_KEY: Final = re.compile(rb"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class ServerKeys:
    """What the replay needs: its own pair and whom it admits. Keys are 40 bytes of Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed: frozenset[bytes]
    """Public keys of the clients when they were read; nobody else is admitted."""
    folder: Path
    """Holds the allow-list, which may change: see `authentication.AllowList`."""
    learner: bytes = b""
    """Public key of the one client that may speak as the learner, and as nothing else; empty: nobody may."""


@dataclass(frozen=True, kw_only=True)
class ClientKeys:
    """What a peer of the replay needs: its own pair and the replay's public key, each 40 bytes of Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes


Security = ServerKeys | ClientKeys


def create_keys(folder: Path, clients: Sequence[str]) -> list[Path]:
    """Make the key pairs that are not there yet; what is there stays as it is.

    Args:
        folder: Made with mode 0700 when it is not there.
        clients: Names of the processes that may connect: letters, digits, '-' and '_'.

    Returns:
        The secret files that were written.

    Raises:
        ConfigError: A name cannot be used, others can enter the folder, a key there is damaged or cannot be
            written.
    """
    for name in clients:
        if not _NAME.fullmatch(name) or name == _SERVER:
            raise ConfigError(
                f"--clients names {name!r}, which cannot name a key file. Use letters, digits, '-' and '_', "
                f"and not {_SERVER!r}."
            )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder)
        (folder / ALLOWED).mkdir(mode=0o700, exist_ok=True)
        pairs = {_SERVER: folder / f"{_SERVER}.public"}
        pairs |= {name: folder / ALLOWED / f"{name}.public" for name in clients}
        written = [_create_pair(folder / f"{name}.secret", public) for name, public in pairs.items()]
    except OSError as error:
        raise ConfigError(f"keys cannot be written to {folder}: {error}. Choose another folder.") from None
    return [path for path in written if path is not None]


def load_server_keys(folder: Path) -> ServerKeys:
    """Read the replay's keys and the allow-list.

    Raises:
        ConfigError: A file is missing, damaged or open to others, or nobody would be admitted.
    """
    secret = _read_secret(folder, _SERVER)
    public = read_key(folder / f"{_SERVER}.public")
    if zmq.curve_public(secret) != public:
        raise ConfigError(
            f"{folder / 'server.public'} does not belong to server.secret beside it, so no client would find "
            "this server. Make new keys in an empty folder: asyncrl keys DIR"
        )
    allowed = frozenset(read_key(path) for path in sorted((folder / ALLOWED).glob("*.public")))
    if not allowed:
        raise ConfigError(
            f"{folder / ALLOWED} holds no public keys, so nobody would be admitted. "
            f"Make some: asyncrl keys {folder} --clients learner actor-0"
        )
    of_learner = folder / ALLOWED / f"{LEARNER}.public"
    return ServerKeys(
        public=public,
        secret=secret,
        allowed=allowed,
        folder=folder / ALLOWED,
        learner=read_key(of_learner) if of_learner.exists() else b"",
    )


def load_client_keys(folder: Path, name: str) -> ClientKeys:
    """Read the keys of the process `name`: NAME.secret and server.public are enough.

    Raises:
        ConfigError: A file is missing, damaged or open to others.
    """
    secret = _read_secret(folder, name)
    return ClientKeys(
        public=zmq.curve_public(secret), secret=secret, server=read_key(folder / f"{_SERVER}.public")
    )


def _create_pair(secret_path: Path, public_path: Path) -> Path | None:
    """Complete one pair; None when its secret was there."""
    if secret_path.exists():
        secret, made = _read_secret(secret_path.parent, secret_path.stem), None
    elif public_path.exists():  # The secret was moved to its client's host.
        read_key(public_path)
        return None
    else:
        secret, made = zmq.curve_keypair()[1], secret_path
        _write_new(secret_path, secret, 0o600)
    if not public_path.exists():
        _write_new(public_path, zmq.curve_public(secret), 0o644)
    return made


def _write_new(path: Path, key: bytes, mode: int) -> None:
    """Write a key durably; the name appears with the whole content, and never replaces another file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(key + b"\n")
            file.flush()
            os.fsync(handle)
        os.link(temporary, path)
    finally:
        temporary.unlink()


def _read_secret(folder: Path, name: str) -> bytes:
    path = folder / f"{name}.secret"
    _check_private(folder)
    _check_private(path)
    return read_key(path)


def _check_private(path: Path) -> None:
    mode = "700" if path.is_dir() else "600"
    remedy = f"Make it private: chmod {mode} {path} (and make new keys when it was open for long)."
    try:
        check_private(path, remedy)
    except OSError as error:
        raise _unreadable(path, error) from None


def read_key(path: Path) -> bytes:
    """Read one key file: 40 bytes of Z85.

    Raises:
        ConfigError: It is missing or damaged.
    """
    try:
        with path.open("rb") as file:
            key = file.read(64).strip()
    except OSError as error:
        raise _unreadable(path, error) from None
    if not _KEY.fullmatch(key) or len(_decoded(key)) != 32:
        raise ConfigError(
            f"{path} holds no key (one line of 40 characters in Z85). Copy it again from where it was made."
        )
    return key


def _decoded(key: bytes) -> bytes:
    try:
        return z85.decode(key)
    except struct.error:  # Five characters stand for more than 32 bits.
        return b""


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the key file {path} cannot be read ({error.strerror}). Make keys with `asyncrl keys DIR`, or copy "
        "this file from where they were made."
    )
