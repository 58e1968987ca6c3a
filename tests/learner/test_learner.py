"""The learner's loop among in-memory ports: its order, what it waits for, how it ends and how it goes on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.devices.memory import host_peak
from asyncrl.errors import RunError, WeightSyncError
from asyncrl.observability import metrics_replay as r
from asyncrl.observability import metrics_system as s
from asyncrl.observability import metrics_training as m
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


def test_every_published_version_differs_from_the_one_before(tmp_path: Path) -> None:
    run = Run(tmp_path, updates=3)
    run.learner.run()
    published = run.publisher.published
    assert list(published) == [0, 1, 2, 3]
    assert not any(torch.equal(published[v], published[v + 1]) for v in range(3))
    assert torch.equal(published[3], run.policy.logits)


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


def test_a_run_that_ends_on_its_interval_saves_once(tmp_path: Path) -> None:
    run = Run(tmp_path, updates=4, every=2)
    run.learner.run()
    assert [event for event in run.events if event.startswith("save")] == [
        "save 2",
        "save 4",
    ]


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


def test_each_batch_has_the_whole_waiting_time(tmp_path: Path) -> None:
    run = Run(tmp_path, updates=3, batch_timeout=5.0, seconds_to_fill=4.5)
    run.learner.run()
    assert run.learner.version == 3


def test_ctrl_c_while_waiting_saves_and_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.replay.interrupt = True
    run.learner.run()
    assert run.events[-2:] == ["save 0", "stop"]


def test_ctrl_c_during_an_update_waits_for_its_end(tmp_path: Path) -> None:
    run, undisturbed = Run(tmp_path / "a"), Run(tmp_path / "b", updates=1)
    run.policy.on_evaluate = lambda: signal.raise_signal(signal.SIGINT) if not run.policy.evaluated else None
    run.learner.run()
    undisturbed.learner.run()
    assert saved(tmp_path / "a") == ["update_000001"]
    assert torch.equal(run.policy.logits, undisturbed.policy.logits)
    assert run.events[-1] == "stop"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_cuts_the_update_and_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    run = Run(tmp_path, updates=9, every=2)

    def at_every_call_from_the_fourth_update_on() -> None:
        if run.learner.version == 3:
            signal.raise_signal(signal.SIGINT)

    run.policy.on_evaluate = at_every_call_from_the_fourth_update_on
    run.learner.run()
    assert saved(tmp_path) == ["update_000002"]
    assert run.events[-1] == "stop"


def test_times_and_rates_cover_the_whole_row(tmp_path: Path) -> None:
    run = Run(tmp_path, updates=2, seconds_to_fill=6.0)
    run.learner.run()
    for row in run.log.rows.values():  # 6 s of waiting, then two calls of the policy (gradient, movement)
        assert row[s.UPDATE_SECONDS] == 2.0
        assert row[s.LEARNER_WAITING] == pytest.approx(6 / 8)
        assert row[s.GROUPS_PER_MINUTE] == pytest.approx(60 * 2 / 8)


def test_a_row_has_the_metrics_of_every_part(tmp_path: Path) -> None:
    run = Run(tmp_path, updates=1)
    run.learner.run()
    row = run.log.rows[1]
    assert row[r.GROUPS_READY] == 5.0
    assert row[s.WEIGHTS_VERSION] == 1.0
    assert row[m.SUCCESS_ONCE] == 0.5
    assert row[r.LAG_MAX] == 0.0
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


# ---- what is not finite --------------------------------------------------------------------------


def weights_in(folder: Path) -> Tensor:
    return load_file(folder / "model.safetensors")["logits"]


def test_after_too_many_bad_gradients_the_last_good_weights_are_in_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, updates=20)
    # From version 2 on there is no number in the gradient.
    run.policy.logits.register_hook(lambda grad: grad * (float("nan") if run.learner.version >= 2 else 1))
    newest = tmp_path / "checkpoints" / "update_000005"
    with pytest.raises(RunError, match=rf"3 steps in a row.*--resume.*The newest checkpoint is {newest}\."):
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


def test_ctrl_c_in_the_update_that_breaks_the_weights_saves_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, updates=2)

    def poison(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        run.policy.logits.data.fill_(float("nan"))

    run.learner.update.optimizer.register_step_post_hook(poison)
    with pytest.raises(RunError, match="not finite"):
        run.learner.run()
    assert saved(tmp_path) == []
