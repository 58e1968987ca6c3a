"""What TensorBoard is told: which curves there are, what they mean, and how the run was started."""

import math

import pytest

from asyncrl.observability import metrics_system as s
from asyncrl.observability import metrics_training as m
from asyncrl.observability.curves import Curves, beginning, description
from support.event_files import events_in, number_of


def points(*rows):
    """(tag, step, value) of rows at steps 1, 2, ..., in the order of the file."""
    curves = Curves()
    content = b"".join(curves.scalars(step, row, 100.0 + step) for step, row in enumerate(rows, start=1))
    return [
        (value.tag, event.step, number_of(value))
        for event in events_in(content)
        for value in event.summary.value
    ]


def test_a_count_that_stays_at_zero_has_no_curve():
    assert points(*[{s.RESPAWNS: 0.0, s.DUPLICATES: 0.0}] * 3) == []


def test_a_curve_begins_with_its_first_value_and_the_zero_before_it():
    rows = [{s.RESPAWNS: value} for value in (0.0, 0.0, 2.0, 0.0)]
    name = s.RESPAWNS.name
    assert points(*rows) == [(name, 2, 0.0), (name, 3, 2.0), (name, 4, 0.0)]


def test_a_curve_without_a_zero_before_it_begins_at_once():
    assert points({m.GRAD_NORM: 0.5}, {m.GRAD_NORM: 0.25}) == [
        ("train/actor/grad_norm", 1, 0.5),
        ("train/actor/grad_norm", 2, 0.25),
    ]


def test_the_zero_before_a_curve_has_its_own_time():
    curves = Curves()
    content = curves.scalars(7, {s.RESPAWNS: 0.0}, 1000.0) + curves.scalars(9, {s.RESPAWNS: 1.0}, 1060.0)
    found = [(event.step, event.wall_time) for event in events_in(content) if event.summary.value]
    assert found == [(7, 1000.0), (9, 1060.0)]


def test_no_success_at_all_is_a_curve_too():
    assert points({m.SUCCESS_ONCE: 0.0}) == [("env/success_once", 1, 0.0)]
    assert points({m.EVAL_SUCCESS: 0.0}) == [("eval/success_once", 1, 0.0)]


def test_a_value_that_is_no_number_begins_a_curve():
    ((tag, step, value),) = points({m.APPROX_KL: math.nan})
    assert (tag, step) == ("train/actor/approx_kl", 1)
    assert math.isnan(value)


def test_a_curve_says_once_what_it_means_and_what_to_do():
    curves = Curves()
    content = curves.scalars(1, {m.GRAD_NORM: 1.0}, 0.0) + curves.scalars(2, {m.GRAD_NORM: 1.0}, 1.0)
    first, second = (value for event in events_in(content) for value in event.summary.value)
    assert first.metadata.summary_description == (
        "Gradient norm before clipping. Unit: 1. *Healthy, and otherwise:* Steady; of several steps the "
        "largest counts. Always above --optimizer.max-grad-norm is no harm: AdamW hardly depends on the "
        "scale. 0 means that no group differs (`replay/signal_groups`). Spikes: lower "
        "--optimizer.learning-rate or --replay.max-lag. Absent if every step was skipped "
        "(`train/bad_updates`)."
    )
    assert first.metadata.plugin_data.plugin_name == "scalars"
    assert not second.HasField("metadata")


def test_the_file_begins_with_the_command_and_the_settings():
    settings = {"seed": 3, "actor.success_threshold": 0.7, "resume": False, "world": "tabletop"}
    content = beginning(5, 9.0, settings=settings, command="asyncrl train --seed 3")
    version, start, *about = events_in(content)
    assert (version.file_version, start.step) == ("brain.Event:2", 5)
    values = {value.tag: value for event in about for value in event.summary.value}
    command = values["run/command/text_summary"].tensor.string_val[0].decode()
    assert command == "    asyncrl train --seed 3"
    table = values["run/settings/text_summary"].tensor.string_val[0].decode()
    assert "| actor.success_threshold | 0.7 |" in table.splitlines()
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    raw = values["_hparams_/session_start_info"].metadata.plugin_data.content
    told = HParamsPluginData.FromString(raw).session_start_info.hparams
    assert {name: told[name].number_value for name in ("seed", "actor.success_threshold")} == {
        "seed": 3.0,
        "actor.success_threshold": 0.7,
    }
    assert told["resume"].WhichOneof("kind") == "bool_value"
    assert told["world"].string_value == "tabletop"
    assert "_hparams_/session_end_info" not in values


def test_a_run_that_tells_nothing_has_no_pages_about_it():
    assert len(events_in(beginning(1, 0.0))) == 2


@pytest.mark.parametrize("metric", [m.APPROX_KL, s.LAG_MAX, s.RESPAWNS])
def test_a_description_has_meaning_and_advice(metric):
    assert metric.meaning in description(metric)
    assert metric.advice in description(metric)


def test_tensorboard_itself_reads_the_numbers_and_what_they_mean(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")
    curves = Curves()
    content = beginning(1, 0.0) + curves.scalars(1, {m.GRAD_NORM: 0.5}, 1.0)
    (tmp_path / "events.out.tfevents.1.a").write_bytes(content + curves.scalars(2, {m.GRAD_NORM: 0.25}, 2.0))
    reader = accumulator.EventAccumulator(str(tmp_path))
    reader.Reload()
    points = reader.Tensors("train/actor/grad_norm")
    assert [(point.step, list(point.tensor_proto.float_val)) for point in points] == [(1, [0.5]), (2, [0.25])]
    told = reader.SummaryMetadata("train/actor/grad_norm")
    assert told.summary_description.startswith("Gradient norm before clipping.")
    assert told.plugin_data.plugin_name == "scalars"
