"""The numbers of a run: the registry, console rows as printed, metrics.jsonl and event files as read back."""

import dataclasses
import io
import json
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from asyncrl.config.run import TrainConfig
from asyncrl.observability import metrics_system as r
from asyncrl.observability import metrics_system as s
from asyncrl.observability import metrics_training as m
from asyncrl.observability import waits
from asyncrl.observability.logger import Curves, MetricsLogger
from asyncrl.observability.metrics import REGISTRY, SECTIONS, Metric, as_markdown, reduce, section_of
from asyncrl.observability.terminal import header, render
from support import ROOT
from support.event_files import curves_in, events_in

VALUES = {
    m.SUCCESS_ONCE: 0.625,
    s.LAG_MEAN: 1.23,
    s.LAG_MAX: 2.0,
    m.APPROX_KL: 0.00312,
    m.CLIP_FRACTION: 0.0413,
    m.GRAD_NORM: 0.842,
    s.GROUPS_PER_MINUTE: 11.26,
    s.LEARNER_WAITING: 0.031,
    s.ACTORS_WAITING: 0.0,
    s.LIVE_SLOTS: 0.97,
    s.USEFUL_STEPS: 1.0,
}

HEADER = (
    "update  success  lag avg/max       kl    clip     grad  groups/min  waiting l/a  live/useful       eta"
)
ROW_41 = (
    "    41    62.5%      1.2 / 2   0.0031    4.1%     0.84        11.3      3% / 0%   97% / 100%   1:52:10"
)
ROW_NONE = (
    "     7        -            -        -       -        -           -            -            -         -"
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """Says 1000, 1010, 1020, ..."""

    def __init__(self):
        self.now = 990.0

    def __call__(self):
        self.now += 10.0
        return self.now


def console(logbook_rows, tmp_path, stream=None, **settings):
    stream = stream or io.StringIO()
    with MetricsLogger(tmp_path, stream=stream, clock=Clock(), **settings) as logbook:
        for step, values in logbook_rows:
            logbook.write(step, values)
    return stream.getvalue().splitlines()


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_header_and_rows_stand_under_each_other_whatever_the_numbers():
    assert header() == HEADER
    assert render(41, VALUES, eta=6730) == ROW_41
    assert render(7, {}, math.nan) == ROW_NONE
    wild = VALUES | {m.GRAD_NORM: 123456.0, m.APPROX_KL: math.nan, m.SUCCESS_ONCE: 1.0, m.CLIP_FRACTION: 1.0}
    wild |= {s.LEARNER_WAITING: 1.0, s.ACTORS_WAITING: 1.0}
    assert render(123456, wild, 359999) == (
        "123456   100.0%      1.2 / 2      nan  100.0%  1.2e+05        11.3  100% / 100%"
        "   97% / 100%  99:59:59"
    )


def test_a_narrow_terminal_does_without_some_columns_and_a_file_has_all(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    head, row = console([(41, VALUES)], tmp_path / "a", Terminal(), updates=41)
    assert head == "update  success  lag avg/max       kl  groups/min  waiting l/a       eta"
    assert row == "    41    62.5%      1.2 / 2   0.0031        11.3      3% / 0%   0:00:00"
    monkeypatch.setenv("COLUMNS", "10")
    assert console([(41, VALUES)], tmp_path / "b", Terminal(), updates=41)[1].split()[:2] == ["41", "62.5%"]
    assert console([(41, VALUES)], tmp_path / "c", updates=41)[0] == HEADER


def test_the_console_is_plain_when_piped_and_estimates_the_end(tmp_path):
    # Opened at 1000 s, updates at 1010 s and 1020 s: ten seconds each, so 38 more take 380 s.
    lines = console([(1, VALUES), (2, VALUES)], tmp_path, updates=40)
    rest = ROW_41.removesuffix("1:52:10").removeprefix("    41")
    assert lines == [HEADER, f"     1{rest}0:06:30", f"     2{rest}0:06:20"]


def test_the_header_comes_again_every_20_rows(tmp_path):
    lines = console([(step, VALUES) for step in range(1, 42)], tmp_path, updates=100)
    assert [number for number, line in enumerate(lines) if line == HEADER] == [0, 21, 42]


def test_every_update_is_one_json_line_on_disk_at_once(tmp_path):
    with MetricsLogger(tmp_path, updates=9, stream=io.StringIO(), clock=Clock()) as logbook:
        logbook.write(1, {m.GRAD_NORM: 0.5, m.APPROX_KL: math.nan, m.IMPORTANCE_MAX: math.inf})
        expected = {
            "step": 1,
            "time": 1010.0,
            "train/actor/grad_norm": 0.5,
            "train/actor/approx_kl": None,
            "train/actor/importance_max": None,
        }
        assert rows_of(tmp_path / "metrics.jsonl") == [expected]


def test_a_resumed_run_cuts_what_came_after_its_checkpoint(tmp_path):
    console([(step, VALUES) for step in range(1, 6)], tmp_path, updates=9)
    lines = console([(4, VALUES)], tmp_path, updates=9, resume_step=3)
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert lines[1].endswith("   0:00:50")  # One update in ten seconds, five to go.


def evaluated(rate: float, low: float, high: float) -> dict:
    return {m.EVAL_SUCCESS: rate, m.EVAL_LOW: low, m.EVAL_HIGH: high, m.EVAL_EPISODES: 64.0}


def test_rows_say_the_newest_true_success_and_of_which_update_it_is(tmp_path, monkeypatch):
    stream = io.StringIO()
    with MetricsLogger(tmp_path, updates=9, stream=stream, clock=Clock(), evaluates=True) as logbook:
        logbook.write(1, VALUES)
        logbook.write_evaluation(0, evaluated(0.5, 0.38, 0.62))
        logbook.write(6, VALUES)
        logbook.write_evaluation(5, evaluated(0.75, 0.631, 0.84))
        logbook.write(7, VALUES)
    head, first, second, third = stream.getvalue().splitlines()
    assert head == f"{HEADER[:-10]}  true [95 %] @update       eta"
    assert first.split("  ")[-2].strip() != "50% [38%, 62%] @0"
    assert "  50% [38%, 62%] @0  " in second
    assert "  75% [63%, 84%] @5  " in third
    assert {len(row) for row in (head, first, second, third)} == {len(head)}
    monkeypatch.setenv("COLUMNS", "80")
    with MetricsLogger(
        tmp_path / "narrow", updates=9, stream=(narrow := Terminal()), evaluates=True
    ) as logbook:
        logbook.write_evaluation(5, evaluated(0.75, 0.631, 0.84))
        logbook.write(6, VALUES)
    rows = narrow.getvalue().splitlines()
    assert all(len(row) <= 80 for row in rows)
    assert "75% [63%, 84%] @5" in rows[-1]


def test_what_was_measured_has_a_line_of_its_own_at_its_update(tmp_path):
    with MetricsLogger(tmp_path, updates=9, stream=io.StringIO(), evaluates=True) as logbook:
        for step in (1, 2, 3):
            logbook.write(step, VALUES)
        logbook.write_evaluation(2, evaluated(0.5, 0.38, 0.62))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 2]
    assert lines[3]["eval/success_once"] == 0.5
    assert "eval/version" not in lines[3]
    assert not any("eval/success_once" in line for line in lines[:3])


def curves_of(tmp_path, *rows, **about):
    """Events of a file with rows at steps 1, 2, ... and times 101, 102, ..."""
    said = []
    curves = Curves(tmp_path, 1, said.append, **about)
    for step, row in enumerate(rows, start=1):
        curves.write(step, row, 100.0 + step)
    curves.close()
    assert said == []
    (path,) = tmp_path.iterdir()
    return events_in(path.read_bytes())


def points(tmp_path, *rows):
    """(tag, step, value, time) of rows at steps 1, 2, ..., in the order of the file."""
    return [
        (value.tag, event.step, value.simple_value, event.wall_time)
        for event in curves_of(tmp_path, *rows)
        for value in event.summary.value
    ]


@pytest.mark.parametrize(
    ("metric", "tag", "values", "shown"),
    [
        (s.RESPAWNS, "", (0.0, 0.0, 0.0), ()),
        (s.RESPAWNS, s.RESPAWNS.name, (0.0, 0.0, 2.0, 0.0), ((3, 2.0), (4, 0.0))),
        (m.SUCCESS_ONCE, "Success/imagined", (0.0,), ((1, 0.0),)),
        (m.EVAL_SUCCESS, "Success/true", (0.0,), ((1, 0.0),)),
    ],
)
def test_a_curve_begins_with_its_first_value_and_success_at_once(tmp_path, metric, tag, values, shown):
    expected = [(tag, step, value, 100.0 + step) for step, value in shown]
    assert points(tmp_path, *({metric: value} for value in values)) == expected


def test_the_file_begins_with_the_command_and_the_settings(tmp_path):
    settings = {"seed": 3, "actor.success_threshold": 0.7, "resume": False, "world": "tabletop"}
    events = curves_of(tmp_path, settings=settings, command="asyncrl train --seed 3")
    assert events[0].file_version == "brain.Event:2"
    (start,) = [event for event in events if event.HasField("session_log")]
    assert (start.step, start.session_log.status) == (1, start.session_log.START)
    values = {value.tag: value for event in events for value in event.summary.value}
    command = values["run/command/text_summary"].tensor.string_val[0].decode()
    assert command == "    asyncrl train --seed 3"
    table = values["run/settings/text_summary"].tensor.string_val[0].decode()
    assert "| actor.success_threshold | 0.7 |" in table.splitlines()


def test_a_run_without_settings_has_no_pages_about_it(tmp_path):
    assert not any(event.summary.value for event in curves_of(tmp_path))


def test_curves_can_be_read_while_the_run_goes_on(tmp_path):
    with MetricsLogger(tmp_path, updates=9, stream=io.StringIO()) as logbook:
        logbook.write(1, VALUES)
        until = time.monotonic() + 30.0
        while not (tmp_path / "tensorboard").exists() or not curves_in(tmp_path / "tensorboard"):
            assert time.monotonic() < until
    assert curves_in(tmp_path / "tensorboard")["train/actor/grad_norm"] == [(1, pytest.approx(0.842))]


PAGE = ROOT / "docs" / "metrics.md"


@pytest.mark.parametrize(
    ("reduction", "expected"), [("mean", 3.0), ("sum", 9.0), ("max", 6.0), ("min", 1.0), ("last", 2.0)]
)
def test_each_rule_folds_its_own_way(reduction: str, expected: float) -> None:
    metric = Metric("x", reduction, "1", "", "")
    assert reduce([{metric: 6.0}, {metric: 1.0}, {metric: 2.0}]) == {metric: expected}


def test_a_reading_that_is_absent_from_a_row_does_not_count() -> None:
    assert reduce([{m.LOSS: 4.0}, {}, {m.LOSS: 2.0, r.LAG_MAX: 7.0}]) == {m.LOSS: 3.0, r.LAG_MAX: 7.0}


def test_the_names_others_rely_on_are_there() -> None:
    names = (
        "train/actor/approx_kl train/actor/clip_fraction train/actor/clipped_ratio train/actor/grad_norm "
        "train/actor/lr train/actor/policy_loss train/critic/value_loss train/critic/value_clip_ratio "
        "train/critic/explained_variance train/entropy_loss train/loss rollout/advantages_max "
        "rollout/advantages_mean rollout/advantages_min rollout/rewards env/episode_len env/return "
        "env/reward env/success_once"
    )
    assert set(names.split()) <= REGISTRY.keys()


def test_the_page_in_docs_is_current() -> None:
    assert PAGE.read_text() == as_markdown(), "run: python -m asyncrl metrics > docs/metrics.md"


def test_every_metric_has_advice() -> None:
    assert [name for name, metric in REGISTRY.items() if not metric.advice.endswith(".")] == []


@pytest.mark.parametrize("metric", REGISTRY.values(), ids=lambda metric: metric.name)
def test_advice_names_only_metrics_and_flags_that_exist(metric: Metric) -> None:
    assert set(re.findall(r"`([a-z]+/[a-z_/0-9]+)`", metric.advice)) <= REGISTRY.keys()
    assert set(re.findall(r"--[a-z][a-z.-]*[a-z]", metric.advice)) <= set(flags_of(TrainConfig()))


def test_a_flag_that_does_not_exist_would_be_noticed() -> None:
    assert {"--replay.max-lag", "--log-with"} <= set(flags_of(TrainConfig()))
    assert "--replay.max-policy-lag" not in set(flags_of(TrainConfig()))


def test_every_metric_is_in_one_section_of_the_page() -> None:
    assert {section_of(name) for name in REGISTRY} == SECTIONS.keys()
    others = ("wait/", *(name[:-1] for name in REGISTRY if name.endswith("lag_0")))
    rows = [name for name in REGISTRY if not name.startswith(others) and not name.endswith("_decisions")]
    assert all(as_markdown().count(f"| `{name}` |") == 1 for name in rows)
    assert all(f"`{name}` |" in waits.as_markdown() for name in REGISTRY if name.startswith("wait/"))


def flags_of(config: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from flags_of(value, f"{name}.")
        else:
            yield f"--{name}"


def test_the_page_of_waits_is_current() -> None:
    page = PAGE.with_name("waits.md").read_text()
    assert page == waits.as_markdown(), "run: python -m asyncrl metrics --waits > docs/waits.md"
