"""Every fact through every door: what comes in is read rightly, or refused in one sentence."""

import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from PIL import Image

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.facts import plain_task
from asyncrl.simulators.interface import SimulatorSpec
from asyncrl.simulators.libero.tasks import INSTRUCTIONS
from asyncrl.simulators.maniskill.tasks import TASKS as MANISKILL
from asyncrl.simulators.tabletop.scene import TASKS as TABLE
from support.doors import DOORS, PICTURE, TASK, Unstorable, doors_of, picture_as, play

REFUSED: Final = "refused"
SAME: Final = (
    f"{TASK}.", f"  {TASK} . ", TASK.upper(), TASK.replace(" ", "  "), TASK.replace(" ", "\u00a0"),
    TASK.replace(" the", "\tthe"), TASK.replace(" the", "\n the"), f"\ufeff{TASK}", f"{TASK}\u200b",
    TASK.replace("\u00e9", "e\u0301").replace("\u00e8", "e\u0300"), f"\u202e{TASK}\u202c", f"{TASK}\x07",
    TASK.replace("cube", "cu\u00adbe"), f"{TASK}\ufe0f", f"{TASK}\u3002",
)  # fmt: skip
"""Spellings of one instruction."""
NOTHING: Final = (
    "", "  ", ".", "\u200b", "?!", f"{TASK}\ufffd", "\ud800", b"\xff", 7, 0.5, None, [TASK, TASK], {"a": 1},
)  # fmt: skip
ENDLESS: Final = (float("nan"), float("inf"), float("-inf"))
NO_NUMBERS: Final = ("False", "True", "", None, [1, 0], 1j, {"a": 1})
VERDICTS: Final = [
    *((value, value > 0.5) for value in (True, False, 1, 0, 1.0, 0.0, 0.1, 0.5, 0.6, 2)),
    *((value, REFUSED) for value in (*ENDLESS, -1, -0.6, *NO_NUMBERS)),
]
RGB, FULL = Image.fromarray(PICTURE), np.full(PICTURE.shape[:2], 255, np.uint8)
LOSSLESS: Final[list[tuple[str, dict[str, Any]]]] = [("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True})]
UPRIGHT: Final = {3: PICTURE[::-1, ::-1], 6: np.rot90(PICTURE, -1), 8: np.rot90(PICTURE), 2: PICTURE[:, ::-1]}
"""Orientation that a file declares -> the picture."""
TURNED: Final = {number: Image.Exif() for number in UPRIGHT}
for number, declared in TURNED.items():
    declared[0x112] = number
DEEP: Final = (PICTURE[..., 0].astype(np.uint16) * 257, np.dstack([PICTURE, FULL // 2]))
"""16 bits of grey, and half transparent."""
VALUES: Final[dict[str, list[tuple[Any, Any]]]] = {
    "instruction": [*((text, TASK) for text in SAME), *((value, REFUSED) for value in NOTHING)],
    "success": VERDICTS,
    "end": VERDICTS,
    "reward": [
        *((value, True) for value in (0.0, -3, 2.5, True)),
        *((value, REFUSED) for value in (*ENDLESS, *NO_NUMBERS) if value is not None),
    ],
    "picture": [
        *((picture, picture.tobytes()) for picture in (PICTURE, PICTURE[::-1], np.zeros_like(PICTURE))),
        *((PICTURE.astype(kind), REFUSED) for kind in ("f4", "f8", "f2", "i8", "i4", "u2", "i1", "?")),
        (PICTURE / np.float32(255), REFUSED),
        *((picture, REFUSED) for picture in (PICTURE[..., 0], PICTURE[..., :1], PICTURE[..., [0, 1, 2, 0]])),
        *((value, REFUSED) for value in (PICTURE.transpose(2, 0, 1), PICTURE[:0], None, 7, "picture")),
    ],
    "picture_file": [
        *((picture_as(kind, **lossless), PICTURE.tobytes()) for kind, lossless in LOSSLESS),
        (picture_as(picture=Image.fromarray(np.dstack([PICTURE, FULL]))), PICTURE.tobytes()),
        *((picture_as("PNG", exif=TURNED[n]), turned.tobytes()) for n, turned in UPRIGHT.items()),
        (picture_as("WEBP", exif=TURNED[6], lossless=True), UPRIGHT[6].tobytes()),
        *((picture_as(picture=Image.fromarray(found)), REFUSED) for found in DEEP),
        (picture_as("JPEG", RGB.convert("CMYK")), REFUSED),
        (picture_as(picture=RGB.quantize(64), transparency=3), REFUSED),
        (picture_as(transparency=tuple(PICTURE[0, 0].tolist())), REFUSED),
        *(
            (picture_as(kind, save_all=True, append_images=[RGB.rotate(90)]), REFUSED)
            for kind in ("PNG", "WEBP")
        ),
        *(
            (content, REFUSED)
            for content in (picture_as("GIF"), picture_as("TIFF"), picture_as()[:99], b"picture")
        ),
    ],
}
"""Fact -> values, each with what is read of it, as `READS` has it, or `REFUSED`."""
READS: Final = {
    "instruction": "task",
    "success": "solved",
    "end": "terminated",
    "reward": "solved",
    "picture": "picture",
    "picture_file": "picture",
}
FAST: Final = ("recordings", "own_simulator", "prompt", "robomimic_attributes", "picture_folders")
"""Doors at which the default run of the tests tries each third value."""


def outcome(folder: Path, name: str, fact: str, value: Any) -> Any:
    """What a door reads of a value, or `REFUSED` if it says so in one sentence, or `Unstorable`."""
    folder.mkdir()
    try:
        return getattr(DOORS[name](folder, **{fact: value}), READS[fact])
    except Unstorable:
        return Unstorable
    except AsyncRLError as error:
        return REFUSED if "\n" not in str(error) else error


def tried(folder: Path, name: str, fact: str, step: int) -> list[str]:
    """Try each `step`-th value at a door; return a line for each that comes out wrong."""
    wrong, through = [], 0
    for number, (value, expected) in enumerate(VALUES[fact][::step]):
        found = outcome(folder / str(number), name, fact, value)
        through += found is not Unstorable
        if found not in (expected, Unstorable):
            wrong.append(f"{value!a}: {found!a}, expected {expected!a}")
    assert through, "nothing can come in here"
    return wrong


@pytest.mark.parametrize("name", FAST)
def test_some_values_of_each_fact_are_read_rightly_or_refused(tmp_path: Path, name: str) -> None:
    for fact in VALUES:
        if name in doors_of(fact):
            (tmp_path / fact).mkdir()
            assert not tried(tmp_path / fact, name, fact, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("fact", "name"), [(fact, name) for fact in VALUES for name in doors_of(fact)])
def test_a_fact_is_read_rightly_or_refused_at_a_door(tmp_path: Path, fact: str, name: str) -> None:
    assert not tried(tmp_path, name, fact, 1)


@pytest.mark.parametrize("name", ["own_world", "own_simulator", "one_by_one", "vector_env"])
def test_pictures_of_another_size_than_was_said_are_refused(tmp_path: Path, name: str) -> None:
    for picture in (PICTURE[::2, ::2], PICTURE[:, ::2], np.tile(PICTURE, (2, 2, 1))):
        assert outcome(tmp_path / str(picture.shape), name, "picture", picture) is REFUSED


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            {"tasks": ("open the drawer",)},
            "begins own/seed-1 with 'put .*', which is none of its 1 spec.tasks",
        ),
        (
            {"all_tasks": TASK},
            "tasks after a reset: the instructions are 'put .*', expected a tuple of 1 texts",
        ),
        ({"tasks": TASK}, "spec.tasks of the simulator own: the instructions are 'put .*', expected a tuple"),
    ],
)
def test_a_reset_says_one_of_the_tasks_of_the_spec(facts: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        play("Own", **facts)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, (0, -1, 8.0, "8", True, None, 2**40)) for name in ("max_steps", "places")),
        ("image_size", (-32, 32.0, "32", True, None)),
        ("trials", (-1, 1.5, None)),
        ("name", (None, 3)),
        ("cameras", ((), "main", ("main", 1))),
        ("reward", ("sparse", None)),
        ("action_low", ((0,) * 6, (2,) * 7, (float("nan"),) * 7, (-1,) * 8, ("-1",) * 7, (), None, -1)),
        ("action_high", ((float("inf"),) * 7, (-2,) * 7, (1,) * 6, (True,) * 7)),
        ("idle", ((float("nan"),) * 7, ("0",) * 7, ())),
    ],
)
def test_a_spec_that_cannot_be_is_refused(name: str, values: tuple[Any, ...]) -> None:
    right: dict[str, Any] = {"name": "own", "tasks": [TASK], "trials": 0, "max_steps": 8, "image_size": 32}
    assert SimulatorSpec(**right).tasks == (TASK,)
    for value in values:
        with pytest.raises(ConfigError, match=r"^spec of the simulator .*Correct its class\.$"):
            SimulatorSpec(**right | {name: value})


def test_what_is_shipped_is_in_the_normal_form() -> None:
    texts = {*TABLE, *(text for tasks in INSTRUCTIONS.values() for text in tasks)}
    texts |= {task.instruction for task in MANISKILL.values()} - {""}
    assert {text for text in texts if plain_task(text) != text} == set()


@pytest.mark.slow
def test_the_normal_form_is_its_own_for_every_character() -> None:
    for number in range(0, sys.maxunicode + 1):
        text = plain_task(f"a{chr(number)}b {chr(number)}c{chr(number)}")
        assert plain_task(text) == text, hex(number)


@pytest.mark.parametrize("fact", VALUES)
def test_a_fact_is_tried_with_enough_values_at_enough_doors(fact: str) -> None:
    assert sum(expected is REFUSED for _, expected in VALUES[fact]) >= 8
    assert len(doors_of(fact)) >= 2
