"""CURVE keys of sockets, and the allow-list of clients.

    DIR/                   mode 0700
      server.secret        mode 0600; stays on the replay's host
      server.public        identifies the replay to its clients
      NAME.secret          mode 0600; belongs to the process NAME: learner, actor-0, ...
      clients/NAME.public  the allow-list, read at every handshake

A key file is one line of 40 characters in Z85. CURVE alone admits every client that knows the server's public
key, so a server's context runs an authenticator, without which its sockets refuse everyone.
"""

from __future__ import annotations

import logging
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from asyncrl.errors import ConfigError
from asyncrl.storage.atomic import check_private

ALLOWED: Final = "clients"
_SERVER: Final = "server"
_KEY: Final = re.compile(rb"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_DOMAIN: Final = "asyncrl"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerKeys:
    """Key pair and allow-list of a server. Keys are 40 bytes of Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed: frozenset[bytes]  # public keys of clients when loaded
    folder: Path

    def admits(self, key: bytes) -> bool:
        """Return True if the allow-list now contains a client's public key."""
        for path in self.folder.glob("*.public"):
            try:
                if read_key(path) == key:
                    return True
            except ConfigError as error:
                _LOG.warning("this entry of the allow-list admits no client: %s", error)
        return False


@dataclass(frozen=True, kw_only=True)
class ClientKeys:
    """Key pair of a client and public key of the server, each 40 bytes of Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes


Security = ServerKeys | ClientKeys


def create_keys(folder: Path, clients: Sequence[str]) -> list[Path]:
    """Make missing key pairs, and return the new secret files. Files are never overwritten."""
    for name in clients:
        if not _NAME.fullmatch(name) or name == _SERVER or name.isdecimal():
            raise ConfigError(
                f"--clients names {name!r}, which cannot name a key file. Use letters, digits, '-' and '_', "
                f"not {_SERVER!r} and no number: learner actor-0 actor-1."
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
    """Load a server's keys and its allow-list."""
    secret = _read_secret(folder, _SERVER)
    public = read_key(folder / f"{_SERVER}.public")
    if zmq.curve_public(secret) != public:
        raise ConfigError(
            f"{folder / 'server.public'} does not belong to server.secret next to it, so no client "
            "would find this server. Make new keys in an empty folder: asyncrl keys DIR"
        )
    allowed = frozenset(read_key(path) for path in sorted((folder / ALLOWED).glob("*.public")))
    if not allowed:
        raise ConfigError(
            f"{folder / ALLOWED} holds no public keys, so no client would be admitted. "
            f"Make some: asyncrl keys {folder} --clients learner actor-0"
        )
    return ServerKeys(public=public, secret=secret, allowed=allowed, folder=folder / ALLOWED)


def load_client_keys(folder: Path, name: str) -> ClientKeys:
    """Load the keys of the process `name`."""
    secret = _read_secret(folder, name)
    return ClientKeys(
        public=zmq.curve_public(secret), secret=secret, server=read_key(folder / f"{_SERVER}.public")
    )


def _create_pair(secret_path: Path, public_path: Path) -> Path | None:
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
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(key + b"\n")
        file.flush()
        os.fsync(handle)


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
    """Read a key file: 40 bytes of Z85."""
    try:
        with path.open("rb") as file:
            key = file.read(64).strip()
    except OSError as error:
        raise _unreadable(path, error) from None
    try:
        valid = bool(_KEY.fullmatch(key)) and len(z85.decode(key)) == 32
    except struct.error:  # Five characters stand for more than 32 bits.
        valid = False
    if not valid:
        raise ConfigError(
            f"{path} holds no key (one line of 40 characters in Z85). Copy it again from where it was made."
        )
    return key


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the key file {path} cannot be read ({error.strerror}). Make keys with `asyncrl keys DIR`, or copy "
        "this file from where they were made."
    )


def secure(socket: zmq.Socket[bytes], security: Security | None) -> None:
    """Set the keys of a socket before it is bound or connected."""
    if security is None:
        return
    socket.setsockopt(zmq.CURVE_PUBLICKEY, security.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, security.secret)
    if isinstance(security, ServerKeys):
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # Without the authenticator no client gets in.
    else:
        socket.setsockopt(zmq.CURVE_SERVERKEY, security.server)


@contextmanager
def admitting(context: zmq.Context[zmq.Socket[bytes]], security: ServerKeys | None) -> Iterator[None]:
    """Admit listed clients to the sockets of `context`; enter before binding, leave before destroying."""
    if security is None:
        yield
        return
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    try:
        allow_list = SimpleNamespace(callback=lambda domain, key: security.admits(key))
        authenticator.configure_curve_callback(_DOMAIN, allow_list)
        yield
    finally:
        authenticator.stop()
