"""Encode a run's numbers for TensorBoard: one record per update, in the format of its event files.

What a curve means, how the run was started and with which settings is in the file too.

A record is the length of an `Event` message, a checksum of the length, the message, a checksum of it.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from asyncrl.observability.metrics import Metric

HPARAM_METRICS: Final = ("env/success_once", "eval/success_once", "train/actor/approx_kl", "env/return")
"""What the page HPARAMS compares runs by."""
_FLOAT: Final = 1
"""DT_FLOAT among TensorFlow's types."""
_RGB: Final = 3
"""Colour channels of a picture."""


def event_file(folder: Path) -> Path:
    """Name a new event file in `folder`."""
    return folder / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"


class Curves:
    """The curves of one event file.

    A curve begins with its metric's first value other than 0, and with the 0 before it: most counts of a run
    that is well stay at 0, and their empty cards hide the others; of a result (`is_result`) also 0 is shown.
    metrics.jsonl has every value.
    """

    def __init__(self) -> None:
        self._begun = set[Metric]()
        self._zeros = dict[Metric, tuple[int, float]]()
        """Held back -> update and time of its newest 0."""

    def scalars(self, step: int, values: Mapping[Metric, float], now: float) -> bytes:
        """Encode one update's numbers.

        Args:
            step: The update.
            values: Its numbers.
            now: Seconds since 1970.
        """
        event, before = _messages().Event(wall_time=now, step=step), list[bytes]()
        for metric, value in values.items():
            if metric not in self._begun:
                if value == 0 and not is_result(metric.name):
                    self._zeros[metric] = (step, now)
                    continue
                if metric in self._zeros:
                    at, then = self._zeros.pop(metric)
                    zero = _messages().Event(wall_time=then, step=at)
                    self._add(zero, metric, 0.0)
                    before.append(_record(zero))
            self._add(event, metric, value)
        return b"".join([*before, _record(event)])

    def _add(self, event: Any, metric: Metric, value: float) -> None:
        # A tensor without dimensions: of a simple_value TensorBoard forgets the description.
        found = event.summary.value.add(tag=metric.name)
        found.tensor.dtype = _FLOAT
        found.tensor.float_val.append(float(value))
        found.tensor.tensor_shape.SetInParent()
        if metric not in self._begun:  # TensorBoard takes what it is told with a curve's first value.
            self._begun.add(metric)
            found.metadata.summary_description = description(metric)
            found.metadata.plugin_data.plugin_name = "scalars"


def picture(step: int, tag: str, content: bytes, now: float) -> bytes:
    """Encode a picture, for TensorBoard's page IMAGES; a GIF moves there.

    Args:
        step: Update that it is about.
        tag: Name of its card.
        content: Of a PNG or GIF file.
        now: Seconds since 1970.

    Raises:
        ValueError: It is no such file.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(content), formats=("PNG", "GIF")) as opened:
            width, height = opened.size
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"no PNG or GIF: {error}") from error
    event = _messages().Event(wall_time=now, step=step)
    image = event.summary.value.add(tag=tag).image
    image.width, image.height, image.colorspace = width, height, _RGB
    image.encoded_image_string = content
    return _record(event)


def is_result(name: str) -> bool:
    """Whether a metric of this name says how good the policy is: there a 0 is news."""
    return name.startswith(("env/", "eval/", "audit/"))


def description(metric: Metric) -> str:
    """Say what a metric means and what to do about it, in Markdown: what TensorBoard shows with its curve."""
    return f"{metric.meaning} Unit: {metric.unit}. *Healthy, and otherwise:* {metric.advice}"


def beginning(
    step: int, now: float, *, settings: Mapping[str, object] = MappingProxyType({}), command: str = ""
) -> bytes:
    """Encode the begin of a file: its version, that what was written from `step` on is void, and the run.

    Args:
        step: First update of the file.
        now: Seconds since 1970.
        settings: Name -> value, for the pages TEXT and HPARAMS; none of either without.
        command: With which the run was started.
    """
    version = _messages().Event(wall_time=now, file_version="brain.Event:2")
    start = _messages().Event(wall_time=now, step=step)
    start.session_log.status = _messages().SessionLog.START
    about = [_messages().Event(wall_time=now, step=step, summary=x) for x in _about(settings, command)]
    return b"".join(map(_record, [version, start, *about]))


def _about(settings: Mapping[str, object], command: str) -> Iterator[Any]:
    """Yield what the file says about the run."""
    from tensorboardX.summary import hparams, text

    if command:
        yield text("run/command", f"    {command}")
    if settings:
        rows = "\n".join(f"| {name} | {str(value).replace('|', ' ')} |" for name, value in settings.items())
        yield text("run/settings", f"| setting | value |\n|---|---|\n{rows}")
        # Its third part says that the run is over, which nobody knows here.
        plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in settings.items()}
        yield from hparams(plain, dict.fromkeys(HPARAM_METRICS))[:2]


def _messages() -> Any:
    """The generated classes, which appear when the module is imported."""
    from tensorboardX.proto import event_pb2

    return event_pb2


def _record(event: Any) -> bytes:
    from tensorboardX.record_writer import masked_crc32c

    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    return b"".join(
        (length, struct.pack("<I", masked_crc32c(length)), content, struct.pack("<I", masked_crc32c(content)))
    )
