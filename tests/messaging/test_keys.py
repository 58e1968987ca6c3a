"""Keys: private files that are never overwritten, and a replay that admits listed clients only."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from asyncrl import cli
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ReplaySettings
from asyncrl.errors import ConfigError, ReplayError
from asyncrl.launch import endpoints
from asyncrl.launch.job import Hosts, Job
from asyncrl.launch.placement import Placement
from asyncrl.messaging.keys import ClientKeys, create_keys, load_client_keys, load_server_keys
from asyncrl.messaging.sockets import bind_router, check_endpoint
from asyncrl.messaging.wire import encode
from asyncrl.replay.client import ZmqActorPort, ZmqLearnerPort
from support.replay import next_batch
from support.replay_server import CONFIG, Served, acquire, push_group, until
from support.sockets import connect_dealer
from support.whole_runs import free_port


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    create_keys(folder, ["learner", "actor-0"])
    return folder


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_secrets_are_private_and_complete(keys: Path) -> None:
    assert mode(keys) == mode(keys / "clients") == 0o700
    secrets = {path.name: mode(path) for path in keys.glob("*.secret")}
    assert secrets == {"server.secret": 0o600, "learner.secret": 0o600, "actor-0.secret": 0o600}
    server, client = load_server_keys(keys), load_client_keys(keys, "actor-0")
    assert len(server.allowed) == 2
    assert client.public in server.allowed
    assert client.server == server.public
    assert client.secret.decode() not in repr(client)
    assert server.secret.decode() not in repr(server)


def test_keys_are_never_overwritten(keys: Path) -> None:
    before = {path: path.read_bytes() for path in keys.rglob("*.*")}
    written = create_keys(keys, ["learner", "actor-0", "actor-1"])
    assert [path.name for path in written] == ["actor-1.secret"]
    assert all(path.read_bytes() == content for path, content in before.items())
    (keys / "actor-0.secret").unlink()  # Moved to another host: its public key stays the admitted one.
    assert create_keys(keys, ["actor-0"]) == []
    assert not (keys / "actor-0.secret").exists()


@pytest.mark.parametrize("name", ["actor-0.secret", "."])
def test_a_secret_that_others_can_reach_is_refused(keys: Path, name: str) -> None:
    (keys / name).chmod(0o755)
    with pytest.raises(ConfigError, match="chmod"):
        load_client_keys(keys, "actor-0")


@pytest.mark.parametrize("content", [b"", b"x" * 39, b"x" * 41, b"#" * 40, b"~" * 40, b"\xff" * 40])
def test_a_damaged_key_is_refused(keys: Path, content: bytes) -> None:
    (keys / "server.public").write_bytes(content)
    with pytest.raises(ConfigError, match=r"server\.public"):
        load_server_keys(keys)
    with pytest.raises(ConfigError, match=r"server\.public"):
        load_client_keys(keys, "actor-0")


def test_a_server_key_of_another_pair_and_an_empty_allow_list_are_refused(keys: Path) -> None:
    (keys / "server.public").write_bytes(zmq.curve_keypair()[0])
    with pytest.raises(ConfigError, match="does not belong"):
        load_server_keys(keys)
    (keys / "server.public").write_bytes(zmq.curve_public((keys / "server.secret").read_bytes().strip()))
    for path in (keys / "clients").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match="no client would be admitted"):
        load_server_keys(keys)


@pytest.mark.parametrize("name", ["../x", "server", "", "a b", ".hidden", "2"])
def test_a_client_name_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--clients"):
        create_keys(tmp_path / "k", [name])


def test_the_command_makes_keys_and_says_what_to_copy(tmp_path, capsys) -> None:
    assert cli.run("keys", [str(tmp_path / "k"), "--clients", "learner", "actor-0", "actor-1"]) == 0
    out = capsys.readouterr().out
    assert "4 key pairs made" in out
    assert "server.public" in out
    assert (tmp_path / "k" / "actor-1.secret").exists()
    assert cli.run("keys", [str(tmp_path / "k"), "--clients", "learner", "camera"]) == 0
    assert "1 key pairs made, 2 were there" in capsys.readouterr().out


def test_beyond_loopback_needs_a_server_key_and_an_allow_list(keys: Path) -> None:
    server = load_server_keys(keys)
    far = "tcp://10.0.0.5:5555"
    with pytest.raises(ConfigError, match="server key and an allow-list"):
        check_endpoint(far)
    with pytest.raises(ConfigError, match="allow-list of client keys is empty"):
        check_endpoint(far, replace(server, allowed=frozenset()))
    assert check_endpoint(far, server) == far
    assert check_endpoint(far, load_client_keys(keys, "learner")) == far
    for vague in ("tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://224.0.0.1:5", "tcp://host:1"):
        with pytest.raises(ConfigError, match="one address"):
            check_endpoint(vague, server)


def config(**settings: str) -> TrainConfig:
    return replace(CONFIG, replay=ReplaySettings(**settings))  # type: ignore[arg-type]


def test_a_run_that_would_listen_openly_is_refused_before_it_starts(tmp_path, keys: Path, capsys) -> None:
    arguments = ["--replay.listen", "tcp://0.0.0.0:5555", "--run-dir", str(tmp_path / "run")]
    assert cli.run("train", arguments) == 2
    assert "allow-list" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    alone, two = Placement(learners=(0,), actors=(0,)), Placement(learners=(0,), actors=(0, 1))
    secured = config(listen=f"tcp://127.0.0.1:{free_port()}", keys=str(keys))
    endpoints.check(secured, alone, Hosts(), Job())
    with pytest.raises(ConfigError, match=r"actor-1\.secret"):
        endpoints.check(secured, two, Hosts(), Job())
    (keys / "clients" / "actor-0.public").unlink()
    with pytest.raises(ConfigError, match="actor-0 is not in"):
        endpoints.check(secured, alone, Hosts(), Job())
    with pytest.raises(ConfigError, match=r"--replay\.listen"):
        config(keys=str(keys))


@contextmanager
def served(folder: Path, keys: Path | None) -> Iterator[str]:
    """A replay on loopback tcp; yields its endpoint."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with Served(folder / "replay", endpoint, security=load_server_keys(keys) if keys else None):
        yield endpoint


def test_an_admitted_clients_episodes_arrive(tmp_path: Path, keys: Path) -> None:
    with served(tmp_path, keys) as endpoint:
        learner = ZmqLearnerPort(endpoint, security=load_client_keys(keys, "learner"))
        actor = ZmqActorPort(endpoint, "actor-0", security=load_client_keys(keys, "actor-0"))
        learner.status()
        for _ in range(2):
            push_group(actor, acquire(actor), "actor-0", 0)
        until(actor, 0)
        batch = next_batch(learner, groups=2, version=0, timeout=10.0)
        assert [len(group) for group in batch] == [2, 2]
        actor.close(1.0)
        learner.close()


def admitted(endpoint: str, keys: Path, name: str) -> bool:
    """Whether a new connection with the keys of `name` gets an answer."""
    learner = ZmqLearnerPort(endpoint, security=load_client_keys(keys, name))
    try:
        learner.status()
        return True
    except ReplayError as error:
        if "not on its allow-list" not in str(error):
            raise
        return False
    finally:
        learner.close()


def test_a_key_that_is_added_or_taken_away_counts_for_the_next_connection(tmp_path, keys, caplog) -> None:
    caplog.set_level("WARNING", "asyncrl.messaging.keys")
    late, gone = tmp_path / "late", keys / "clients" / "actor-0.public"
    create_keys(late, ["actor-7"])
    late_public = (late / "clients" / "actor-7.public").read_bytes()
    (late / "server.public").write_bytes((keys / "server.public").read_bytes())
    with served(tmp_path, keys) as endpoint:
        actor = ZmqActorPort(endpoint, "actor-0", security=load_client_keys(keys, "actor-0"))
        assert admitted(endpoint, keys, "learner")
        assert not admitted(endpoint, late, "actor-7")
        half = keys / "clients" / "actor-7.public"
        half.write_bytes(late_public[:20])
        assert not admitted(endpoint, late, "actor-7")
        assert any("admits no client" in line for line in caplog.messages)
        half.write_bytes(late_public)
        assert admitted(endpoint, late, "actor-7")

        gone.unlink()
        assert not admitted(endpoint, keys, "actor-0")
        grant = acquire(actor)
        push_group(actor, grant, "actor-0", 0)
        until(actor, 0)  # What is connected stays.
        gone.write_bytes(half.read_bytes())
        assert not admitted(endpoint, keys, "actor-0"), "another key under its name"
        shutil.rmtree(keys / "clients")
        assert not admitted(endpoint, keys, "learner"), "without a list nobody is admitted"
        create_keys(keys, ["actor-9"])
        assert admitted(endpoint, keys, "actor-9"), "the replay did not end of it"
        actor.close(1.0)


def unknown(keys: Path) -> ClientKeys:
    public, secret = zmq.curve_keypair()
    return replace(load_client_keys(keys, "actor-0"), public=public, secret=secret)


def wrong_server(keys: Path) -> ClientKeys:
    return replace(load_client_keys(keys, "actor-0"), server=zmq.curve_keypair()[0])


@pytest.mark.parametrize(
    ("security", "secured", "why"),
    [
        (unknown, True, "not on its allow-list"),
        (lambda keys: None, True, "one side uses keys"),
        (wrong_server, True, "is not its public key"),
        (lambda keys: load_client_keys(keys, "actor-0"), False, "one side uses keys"),
    ],
    ids=["unknown key", "no keys", "wrong server key", "replay without keys"],
)
def test_who_is_not_admitted_is_told_before_the_deadline(tmp_path, keys, security, secured, why) -> None:
    with served(tmp_path, keys if secured else None) as endpoint:
        actor = ZmqActorPort(endpoint, "actor-0", security=security(keys))
        with pytest.raises(ReplayError, match=why):
            actor.acquire_groups(1, 10.0)
        actor.close(0.0)
        learner = ZmqLearnerPort(endpoint, security=security(keys))
        with pytest.raises(ReplayError, match=why):
            next_batch(learner, groups=1, version=0, timeout=10.0)
        learner.close()


def test_without_its_authenticator_a_server_with_keys_admits_nobody(keys: Path) -> None:
    contexts: list[zmq.Context[zmq.Socket[bytes]]] = [zmq.Context(), zmq.Context()]
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    router = bind_router(contexts[0], endpoint, load_server_keys(keys))
    dealer = connect_dealer(contexts[1], endpoint, b"actor", load_client_keys(keys, "actor-0"))
    dealer.send_multipart(encode("ping"))
    assert not router.poll(500)
    for context in contexts:
        context.destroy(linger=0)
