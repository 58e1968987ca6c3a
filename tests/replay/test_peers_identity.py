"""Who belongs to another run, or to an earlier start of this one, changes nothing at the replay."""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.errors import AttemptEnded, ReplayError
from asyncrl.launch.roles import open_run_replay
from asyncrl.messaging.sockets import IDENTITY
from asyncrl.replay.client import ZmqActorPort, ZmqLearnerPort
from asyncrl.replay.connection import JoinSettings, ask_settings
from asyncrl.replay.server import serve_replay
from asyncrl.storage.run_owner import NO_RUN, RunIdentity
from support.replay import next_batch
from support.replay_server import acquire, push_group, until

CONFIG = TrainConfig(algorithm=AlgorithmSettings(group_size=2, groups_per_update=2))
OURS = RunIdentity(secret="a" * 64, attempt=3)
THEIRS = RunIdentity(secret="b" * 64, attempt=3)


@contextmanager
def served(folder: Path, endpoint: str) -> Iterator[None]:
    ready, stop = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=serve_replay,
        args=(open_run_replay(folder / "replay", CONFIG), endpoint),
        kwargs={
            "identity": OURS,
            "settings": JoinSettings(config="{}", weights="w", identity=OURS),
            "stop_event": stop,
            "ready": ready.set,
        },
    )
    thread.start()
    try:
        assert ready.wait(10)
        yield
    finally:
        stop.set()
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("who", [THEIRS, NO_RUN], ids=["another run", "a stranger"])
def test_another_runs_learner_takes_nothing_over(tmp_path, endpoint: str, who: RunIdentity, caplog) -> None:
    with served(tmp_path, endpoint):
        learner, actor = ZmqLearnerPort(endpoint, identity=OURS), ZmqActorPort(endpoint, "a", identity=OURS)
        learner.status()
        for _ in range(2):
            push_group(actor, acquire(actor), "a", 0)
        until(actor, 0)
        files = sorted(path.name for path in (tmp_path / "replay").rglob("*.h5"))
        assert len(files) == 2

        other = ZmqLearnerPort(endpoint, version=0, identity=who)
        with pytest.raises(ReplayError, match="belongs to another run than this replay"):
            next_batch(other, groups=2, version=0, timeout=10.0)
        with contextlib.suppress(ReplayError):  # It is refused again.
            other.stop()
        other.close()
        assert any("learner 'learner' belongs to another run" in line for line in caplog.messages)
        assert sorted(path.name for path in (tmp_path / "replay").rglob("*.h5")) == files
        assert len(next_batch(learner, groups=2, version=0, timeout=10.0)) == 2, "our own learner goes on"
        assert not actor.stopped
        actor.close(1.0)
        learner.close()


def test_another_runs_actor_gets_no_grant(tmp_path: Path, endpoint: str) -> None:
    with served(tmp_path, endpoint):
        learner, actor = ZmqLearnerPort(endpoint, identity=OURS), ZmqActorPort(endpoint, "a", identity=THEIRS)
        learner.status()
        with pytest.raises(ReplayError, match="actor 'a' belongs to another run"):
            actor.acquire_groups(1, 10.0)
        actor.close(0.0)
        learner.close()


def test_an_actor_of_an_earlier_start_is_told_so(tmp_path: Path, endpoint: str) -> None:
    with served(tmp_path, endpoint):
        actor = ZmqActorPort(endpoint, "a", identity=replace(OURS, attempt=2))
        with pytest.raises(AttemptEnded, match="start 3 of the run"):
            actor.acquire_groups(1, 10.0)
        actor.leave(0.0)
        late = ZmqActorPort(endpoint, "b", identity=replace(OURS, attempt=4))
        with pytest.raises(ReplayError, match="newer start"):
            late.acquire_groups(1, 10.0)
        late.close(0.0)


def test_the_settings_are_for_who_can_read_the_private_folder(tmp_path: Path, endpoint: str) -> None:
    beside = Path(endpoint.removeprefix("ipc://")).with_name(IDENTITY)
    with served(tmp_path, endpoint):
        with pytest.raises(ReplayError, match="visitor 'far' belongs to another run"):
            ask_settings(endpoint, "far", None, 5.0)
        beside.write_text(THEIRS.secret)
        with pytest.raises(ReplayError, match="visitor 'far' belongs to another run"):
            ask_settings(endpoint, "far", None, 5.0)
        beside.write_text(OURS.secret)
        assert ask_settings(endpoint, "far", None, 5.0).identity == OURS
        beside.unlink()
