"""The learner's loop among in-memory ports: its order, what it waits for, how it ends and how it goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.devices.tensors import host_peak
from asyncrl.errors import ReplayError, RunError, WeightSyncError
from asyncrl.observability import metrics_system as s
from asyncrl.observability import metrics_training as m
from asyncrl.observability import process_status
from asyncrl.replay.interface import NothingToLearn
from asyncrl.storage import checkpoint
from support.memory_learner import Run


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("*"))


def test_the_first_version_is_taken_before_a_batch_is_asked_for_and_each_new_one_is_published_at_once(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, updates=2)
    run.learner.run()
    assert run.events == [
        "publish 0",
        "report 0",
        "first 0 within 30 s",
        "sample at 0",
        "publish 1",
        "report 1",
        "log 1",
        "sample at 1",
        "publish 2",
        "report 2",
        "log 2",
        "save 2",
        "stop",
    ]


def test_a_broken_weight_link_ends_the_run_before_the_first_batch(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.publisher.broken = True
    with pytest.raises(WeightSyncError):
        run.learner.run()
    assert run.replay.timeouts == []


def test_checkpoints_come_at_their_interval_and_at_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path, updates=5, every=2)
    run.learner.run()
    assert saved(tmp_path) == ["update_000002", "update_000004", "update_000005"]
    assert run.events.count("save 4") == 1


def test_a_stop_request_is_seen_within_a_second_of_waiting(tmp_path: Path) -> None:
    asked = iter([False, False, False, True])
    run = Run(tmp_path, seconds_to_fill=1000.0, stop=lambda: next(asked))
    run.learner.run()
    assert run.replay.timeouts == [1.0, 1.0, 1.0]
    assert run.events[-2:] == ["save 0", "stop"]


def test_waiting_too_long_ends_the_run_with_what_the_replay_holds(tmp_path: Path) -> None:
    run = Run(tmp_path, batch_timeout=2.5, seconds_to_fill=1000.0)
    message = r"waited 2\.5 s \(--batch-timeout\) for 2 groups at version 0.*7 were dropped for their lag"
    with pytest.raises(RunError, match=message):
        run.learner.run()
    assert run.replay.timeouts == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(("moving", "seconds_to_fill"), [("episodes", 40.0), ("decisions", 80.0)])
def test_a_batch_that_moves_on_is_waited_for_longer_than_the_timeout(
    tmp_path: Path, moving: str, seconds_to_fill: float
) -> None:
    """6 decisions per episode, 4 episodes, one batch ahead: 24 decisions at most."""
    run = Run(tmp_path, updates=1, batch_timeout=5.0, seconds_to_fill=seconds_to_fill)
    nothing = {"groups": 0, "episodes": 0, "decisions": 0}
    run.replay.filling = lambda seconds: nothing | {moving: int(seconds // 4)}
    run.learner.run()
    assert run.learner.version == 1


def test_episodes_that_never_arrive_do_not_keep_a_run_alive(tmp_path: Path) -> None:
    run = Run(tmp_path, batch_timeout=5.0, seconds_to_fill=10_000.0)
    run.replay.filling = lambda seconds: {
        "groups": 0,
        "episodes": int(seconds) % 3,
        "decisions": int(seconds),
    }
    with pytest.raises(RunError, match=r"nothing moved on: no episode was admitted"):
        run.learner.run()
    # Two episodes at most, then as many decisions as a whole batch has, then the timeout.
    assert run.clock.now - 100.0 == pytest.approx(2 + 24 + 5, abs=2)


def test_a_wait_that_moves_on_renews_the_deadline_that_the_watchdog_sees(tmp_path: Path) -> None:
    process_status.publish_as(tmp_path, "learner-0")
    run = Run(tmp_path, updates=1, batch_timeout=5.0, seconds_to_fill=3.0)
    allowed: list[float] = []

    def filling(seconds: float) -> dict[str, int]:
        (process,) = process_status.read(tmp_path)
        allowed.extend(a.allowed for a in process.activities if a.what == "waiting for a batch")
        return {"groups": 0, "episodes": int(seconds), "decisions": 0}

    run.replay.filling = filling
    run.learner.run()
    assert allowed[0] == 5.0 + process_status.GRACE
    assert allowed == sorted(set(allowed)), "each second of it moved the deadline"


def test_every_micro_batch_renews_the_deadline_of_an_update(tmp_path: Path) -> None:
    process_status.publish_as(tmp_path, "learner-0")
    run = Run(tmp_path, updates=1, micro_batch=1)
    allowed: list[float] = []

    def look() -> None:
        (process,) = process_status.read(tmp_path)
        allowed.extend(a.allowed for a in process.activities if a.what.startswith("updating"))

    run.policy.on_evaluate = look
    run.learner.run()
    assert len(allowed) > 2
    assert allowed == sorted(set(allowed))


def test_ctrl_c_while_waiting_saves_and_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.replay.interrupt = True
    run.learner.run()
    assert run.events[-2:] == ["save 0", "stop"]


def test_a_row_has_the_metrics_of_every_part_and_its_times_and_rates_cover_all_of_it(tmp_path: Path) -> None:
    run = Run(tmp_path, updates=2, seconds_to_fill=6.0)
    run.learner.run()
    for row in run.log.rows.values():  # 6 s of waiting, then two calls of the policy (gradient, movement)
        assert row[s.UPDATE_SECONDS] == 2.0
        assert row[s.LEARNER_WAITING] == pytest.approx(6 / 8)
        assert row[s.GROUPS_PER_MINUTE] == pytest.approx(60 * 2 / 8)
    row = run.log.rows[1]
    assert row[s.GROUPS_READY] == 5.0
    assert row[s.WEIGHTS_VERSION] == 1.0
    assert row[m.SUCCESS_ONCE] == 0.5
    assert row[s.LAG_MAX] == 0.0
    assert row[m.LEARNING_RATE] == 0.05
    assert row[s.PEAK_MEMORY] == pytest.approx(host_peak(), rel=0.2)
    assert row[s.PEAK_MEMORY] > 1e7
    assert {m.LOSS, m.GRAD_NORM, m.APPROX_KL, s.UPDATE_SECONDS, s.CHECKPOINT_WAITING} <= row.keys()


def test_a_resumed_run_ends_with_the_very_same_weights_as_one_that_never_stopped(tmp_path: Path) -> None:
    through = Run(tmp_path / "a", updates=6)
    through.learner.run()
    Run(tmp_path / "b", updates=3).learner.run()
    folder = checkpoint.latest(tmp_path / "b")
    assert folder is not None

    again = Run(tmp_path / "b", updates=6)
    again.policy.load_state_dict(load_file(folder / "model.safetensors"))
    again.learner.restore(folder)
    assert (again.learner.version, again.learner.groups_used) == (3, 6)
    again.learner.run()
    assert again.events[:4] == ["publish 3", "report 3", "first 3 within 30 s", "sample at 3"]
    for name, tensor in through.policy.trainable_tensors().items():
        assert torch.equal(again.policy.trainable_tensors()[name], tensor)
    assert again.log.rows[6][m.LOSS] == through.log.rows[6][m.LOSS]


def weights_after(run: Run, version: int) -> Tensor:
    return run.publisher.published[version]


@pytest.mark.parametrize("part", ["batch", "child", "start states", "bug", "status"])
def test_whatever_ends_the_run_the_last_finished_update_is_saved(tmp_path: Path, part: str) -> None:
    stop = [False]

    def stop_requested() -> bool:
        if stop[0] and part == "child":
            raise RunError("actor-1 died 6 times in a row")
        return False

    run = Run(tmp_path, updates=9, every=1000, batch_timeout=3.0, stop=stop_requested)
    errors = {
        "batch": RunError,
        "child": RunError,
        "start states": ReplayError,
        "bug": RuntimeError,
        "status": ReplayError,
    }

    written = list[int]()

    def at_version_3(step: int, values: object) -> None:
        written.append(step)
        if step == 3:
            stop[0] = True
            run.replay.still = 1000.0 if part == "batch" else 0.0
            if part in ("start states", "bug"):
                run.replay.fails = errors[part]("no start state is left")
        if step == 2 and part == "status":
            run.replay.status_fails = ReplayError("the replay died too often")

    run.log.write = at_version_3  # type: ignore[method-assign]
    with pytest.raises(errors[part]):
        run.learner.run()
    assert saved(tmp_path) == ["update_000003"]
    assert written == [1, 2, 3], "an update that is saved has a row"
    assert torch.equal(weights_in(tmp_path / "checkpoints" / "update_000003"), weights_after(run, 3))
    assert "stop" not in run.events


def test_an_update_that_fails_before_its_first_step_leaves_the_version_before(tmp_path: Path) -> None:
    run = Run(tmp_path, updates=9, every=1000)

    def run_out_of_memory() -> None:
        if run.learner.version == 2:
            raise torch.OutOfMemoryError("no memory for the first micro-batch")

    run.policy.on_evaluate = run_out_of_memory
    with pytest.raises(torch.OutOfMemoryError):
        run.learner.run()
    assert saved(tmp_path) == ["update_000002"]
    assert torch.equal(weights_in(tmp_path / "checkpoints" / "update_000002"), weights_after(run, 2))


def test_a_checkpoint_that_cannot_be_written_does_not_hide_why_the_run_ended(tmp_path, caplog) -> None:
    run = Run(tmp_path, updates=9, every=1000)
    run.replay.fails = ReplayError("no start state is left")
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(ReplayError, match="no start state is left"):
        run.learner.run()
    assert "version 0 could not be saved" in caplog.text


def test_a_run_with_nothing_to_learn_ends_well_and_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, updates=9, every=1000)
    run.replay.fails = NothingToLearn("every episode of the last 20 groups succeeded")
    run.learner.run()
    assert run.learner.early_end == "every episode of the last 20 groups succeeded"
    assert run.events[-2:] == ["save 0", "stop"]


def weights_in(folder: Path) -> Tensor:
    return load_file(folder / "model.safetensors")["logits"]


def test_after_too_many_bad_gradients_the_last_good_weights_are_in_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, updates=20)
    # From version 2 on there is no number in the gradient.
    run.policy.logits.register_hook(lambda grad: grad * (float("nan") if run.learner.version >= 2 else 1))
    newest = tmp_path / "checkpoints" / "update_000005"
    with pytest.raises(RunError, match=rf"3 updates in a row.*--resume.*The newest checkpoint is {newest}\."):
        run.learner.run()
    assert saved(tmp_path) == ["update_000005"]
    assert run.log.rows[5][m.BAD_UPDATES] == 3
    for version in (2, 3, 4, 5):
        assert torch.equal(weights_in(newest), run.publisher.published[version])
    assert "stop" not in run.events


@pytest.mark.parametrize("every", [1, 100])
def test_weights_that_are_not_finite_are_neither_published_nor_saved(tmp_path: Path, every: int) -> None:
    run = Run(tmp_path, updates=20, every=every)

    def poison(*_: Any) -> None:
        if run.learner.version == 2:  # The gradient was finite, and so was its norm.
            run.policy.logits.data[3, 2, 1, 0] = float("inf")

    run.learner.update.optimizer.register_step_post_hook(poison)
    newest = tmp_path / "checkpoints" / "update_000002"
    where = f"The newest checkpoint is {newest}." if every == 1 else "There is no checkpoint yet."
    with pytest.raises(
        RunError, match=r"1 of 3 tensors \(logits\), after the update from version 2"
    ) as caught:
        run.learner.run()
    assert str(caught.value).endswith(where)
    assert max(run.publisher.published) == 2
    assert saved(tmp_path) == (["update_000001", "update_000002"] if every == 1 else [])
    if every == 1:
        assert weights_in(newest).isfinite().all()
        again = Run(tmp_path, updates=3)
        again.learner.restore(newest)
        again.learner.run()
        assert max(again.publisher.published) == 3


def test_a_policy_that_is_not_finite_from_the_beginning_is_not_published(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.policy.unused.data[1] = float("nan")
    with pytest.raises(RunError, match=r"\(unused\), before the update from version 0.*--policy"):
        run.learner.run()
    assert run.publisher.published == {}
