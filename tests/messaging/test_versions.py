"""Two versions of asyncrl that meet: both sides say which ones, and nothing else happens."""

import logging
from pathlib import Path

import pytest
import zmq

from asyncrl import __version__
from asyncrl.episode_layout import SCHEMA_VERSION
from asyncrl.errors import ReplayError, WireError
from asyncrl.messaging.sockets import bind_router
from asyncrl.messaging.wire import decode, encode
from asyncrl.observability import metrics_system as m
from asyncrl.replay.client import ZmqActorPort, ZmqLearnerPort
from support.episodes import pack, unpack
from support.replay_server import NOBODY, Served


def of_another_schema(kind: str, **fields: object) -> list[bytes]:
    """A message as the next schema version would send it."""
    header, _ = unpack(encode(kind, **fields))
    return pack(header | {"schema": SCHEMA_VERSION + 1, "package": "9.9"})


def test_another_package_version_is_refused_and_named_on_both_sides(
    tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Served(tmp_path, endpoint), caplog.at_level(logging.WARNING):
        actor = ZmqActorPort(endpoint, "actor-0")

        def introduce() -> None:
            with monkeypatch.context() as patch:
                patch.setattr("asyncrl.messaging.wire.__version__", "0.0.1")  # What encode says this is.
                actor.serve()
            actor.acquire_groups(1, 10.0)

        with pytest.raises(ReplayError) as seen:  # By either call: the refusal may come at once.
            introduce()
        actor.close(0.0)
        learner = ZmqLearnerPort(endpoint)
        assert learner.status()[m.WIRE_ERRORS] == 1
        learner.close()
    for text in (str(seen.value), caplog.text):
        assert "'0.0.1'" in text
        assert repr(__version__) in text


@pytest.mark.parametrize("port", [ZmqActorPort, ZmqLearnerPort])
def test_a_replay_of_another_package_version_is_refused_by_the_client(endpoint: str, port: type) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    replay = bind_router(context, endpoint)
    client = ZmqActorPort(endpoint, "actor-0") if port is ZmqActorPort else ZmqLearnerPort(endpoint)
    client._link.exchange(0)
    assert replay.poll(5000)
    peer, *_ = replay.recv_multipart()
    replay.send_multipart([peer, *encode("welcome", boot="b", known=True, package="9.9")])
    with pytest.raises(ReplayError, match=rf"runs asyncrl 9\.9, this process {__version__}"):
        client._link.exchange(5.0)
    client._link.close()
    context.destroy(linger=0)


def test_another_schema_version_is_named_on_both_sides(tmp_path, endpoint: str, monkeypatch) -> None:
    with Served(tmp_path, endpoint):
        actor = ZmqActorPort(endpoint, "actor-0")
        actor._link.send_frames(
            list(of_another_schema("hello", role="actor", name="actor-0", session="s", version=0, **NOBODY))
        )
        with pytest.raises(ReplayError) as seen:  # What the replay says, in words this side understands.
            actor._link.exchange(5.0)
        actor._link.close()
    text = str(seen.value)
    assert f"schema version {SCHEMA_VERSION + 1}, this side {SCHEMA_VERSION}" in text
    assert f"'9.9' there, {__version__!r} here" in text
    with pytest.raises(WireError, match=rf"'9\.9' there, {__version__!r} here"):  # And the other way round.
        decode(of_another_schema("refused", reason="you speak another version"))
