"""Settings of a run, read from flags and files, and written. Imports no torch.

Every field's docstring is its `--help` text. A value that cannot work raises `ConfigError` where it is set. A
later file overrides earlier ones, and flags override all.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from asyncrl.config import algorithm as learning
from asyncrl.config import sections
from asyncrl.config.bounds import SECONDS, SEEDS, AtLeast, Bounded
from asyncrl.config.help import TRAIN, ShortHelp
from asyncrl.errors import ConfigError
from asyncrl.observability.trackers import check_names
from asyncrl.registry import check_name
from asyncrl.storage.untrusted import load_json, parse_json, read_bytes, shortened


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Bounded):
    """Train a vision-language-action policy inside a world model or a simulator."""

    updates: Annotated[int, AtLeast(1, "a run without updates trains nothing.", "Use 40.")] = 10
    """Optimizer updates to make in all."""
    run_dir: str = "runs/{time}"
    """Folder of the run; {time} is replaced by the date and time."""
    seed: Annotated[int, AtLeast(0, "random streams are numbered from 0.", "Use 0.", highest=SEEDS)] = 0
    """Seed of start states, episodes and noise."""
    resume: bool = False
    """Continue --run-dir, or the newest run: from its newest checkpoint."""
    inline: bool = False
    """All roles in one process, in turns: for debugging and tests. The lag is exactly --replay.max-lag, and a
    run can be repeated exactly."""
    placement: str = "auto"
    """Roles of ranks: 'learner=0,actor=1-3'. A rank may be both. auto: rank 0 learns, the others
    imagine; collocated: all do both; disaggregated: the first half learns, the rest imagines."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the models. auto: cuda if there is a GPU."""
    policy: str = "tabletop"
    """Policy to start from: 'tabletop' (shipped), a policy folder, a published OpenVLA(-OFT) folder, or your
    own package.module:Class@FOLDER."""
    world: str = "tabletop"
    """World model: 'tabletop' (shipped), a folder with world.json and weights, a folder of RLinf
    (RLinf-Wan-LIBERO-*), or your own package.module:Class@FOLDER. Or a simulator: tabletop_true (shipped),
    libero_spatial, maniskill_stack_cube ..., or your own package.module:make; a folder of that name is
    ./NAME."""
    reward: str = ""
    """Reward model of the frames: a folder, or your own class. Empty: the one in the world's folder."""
    policy_settings: tuple[str, ...] = ()
    """Settings of a published --policy folder, or of your own class, as key=value; in TOML
    [policy.settings]."""
    world_settings: tuple[str, ...] = ()
    """Settings of a simulator or of your own --world as key=value; in TOML [world.settings]."""
    reward_settings: tuple[str, ...] = ()
    """Settings of your own --reward as key=value; in TOML [reward.settings]."""
    start_states: str = "tabletop"
    """Starts of episodes: 'tabletop' (shipped), an HDF5 file of start states, or a folder of traj*.npy. By
    default a world's own: in its folder 'dataset', or shipped with it."""
    keyframes: bool = True
    """Use the keyframe files (*_kir.npy) of a folder of traj*.npy, which begin on the way to the goal."""
    checkpoint_every: Annotated[int, AtLeast(1, "it counts updates.", "Use 10.")] = 5
    """Updates between two checkpoints."""
    keep_checkpoints: Annotated[int, AtLeast(1, "the newest one must stay.", "Use 3.")] = 3
    """Newest checkpoints that are kept."""
    evaluate_every: Annotated[int, AtLeast(0, "it counts updates.", "Use 5, or 0 for never.")] = 0
    """Updates between two true measurements. Success in a simulator, besides that of the first and last
    policy. 0: never. The best version stays in checkpoints/best."""
    pictures: bool = True
    """Draw imagined successes and failures after updates 1, 2, 5, 10, 20, 50 ... and the last, into
    RUN/videos and TensorBoard."""
    log_with: tuple[str, ...] = ()
    """Trackers besides TensorBoard: wandb, trackio, mlflow, aim, comet_ml, clearml, dvclive, swanlab
    (docs/tracking.md)."""
    batch_timeout: Annotated[
        float, AtLeast(1, "imagining a batch takes time.", "Use 600.", highest=SECONDS)
    ] = 600.0
    """Seconds without progress (admitted episodes, reported decisions) while the learner waits for a batch,
    after which the run ends with a checkpoint and an error."""
    startup_timeout: Annotated[
        float, AtLeast(1, "loading models takes time.", "Use 600.", highest=SECONDS)
    ] = 600.0
    """Seconds for all processes to load their models, meet, and receive the first weights."""
    hang_timeout: Annotated[float, AtLeast(1, "an update takes time.", "Use 900.", highest=SECONDS)] = 900.0
    """Seconds for a round of an actor, or for a micro-batch of an update. Then the stacks of all processes
    are written and the process is ended: an actor is respawned, a learner is a failed rank for torchrun."""
    algorithm: learning.AlgorithmSettings = field(default_factory=learning.AlgorithmSettings)
    correction: learning.CorrectionSettings = field(default_factory=learning.CorrectionSettings)
    critic: learning.CriticSettings = field(default_factory=learning.CriticSettings)
    optimizer: sections.OptimizerSettings = field(default_factory=sections.OptimizerSettings)
    lora: sections.LoraSettings = field(default_factory=sections.LoraSettings)
    learner: sections.LearnerSettings = field(default_factory=sections.LearnerSettings)
    replay: sections.ReplaySettings = field(default_factory=sections.ReplaySettings)
    actor: sections.ActorSettings = field(default_factory=sections.ActorSettings)
    imagination: sections.ImaginationSettings = field(default_factory=sections.ImaginationSettings)
    simulator: sections.SimulatorSettings = field(default_factory=sections.SimulatorSettings)
    evaluation: sections.EvaluationSettings = field(default_factory=sections.EvaluationSettings)
    guard: sections.GuardSettings = field(default_factory=sections.GuardSettings)
    weights: sections.WeightSettings = field(default_factory=sections.WeightSettings)
    monitor: sections.MonitorSettings = field(default_factory=sections.MonitorSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.evaluate_every and self.inline:
            raise ConfigError(
                f"--evaluate-every is {self.evaluate_every}, but it takes a process of its own, and --inline "
                "is one process. Leave one of them out; `asyncrl evaluate RUN` measures afterwards."
            )
        if self.guard.kind == "lasting" and self.actor.success_frames not in (1, "last"):
            raise ConfigError(
                f"--guard.kind is lasting and --actor.success-frames is {self.actor.success_frames}, but a "
                "success is found by one rule: lasting looks at a decision's last frame. Leave one out."
            )
        if self.weights.listen and not self.replay.listen:
            raise ConfigError(
                f"--weights.listen is {self.weights.listen}, but actors join by --replay.listen first, "
                "which is not set. Set --replay.listen tcp://ADDRESS:PORT too, or leave --weights.listen out."
            )
        if self.weights.transport != "auto":
            check_name("transport", self.weights.transport)
        learning.check_recipe(self.algorithm, self.correction, self.critic)
        check_names(self.log_with)

    @property
    def success_frames(self) -> sections.SuccessFrames:
        """`ActorSettings.success_frames`, unless --guard.kind overrides it."""
        return "last" if self.guard.kind == "lasting" else self.actor.success_frames

    @property
    def trust_region(self) -> float:
        """`CorrectionSettings.trust_region`, with `auto` resolved."""
        chosen = self.correction.trust_region
        small, large = learning.TRUST_REGIONS
        return chosen if chosen != "auto" else small if self.replay.max_lag <= learning.SMALL_LAG else large


SUFFIXES: Final = (".toml", ".json")
PARTS: Final = ("policy", "world", "reward")
"""Settings that may be a table: ``[world] name = "my.worlds:Mine@DIR"`` and ``[world.settings]``."""
_OFF: Final = (False, 0, -1, "", "none", "auto", "stored", [], None)
"""Values of removed settings that can be ignored without effect."""
_NO_FILE: Final = re.compile(r"--|[\w.-]+=")


# --- command line ---


def split_files(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split a command line into files of settings (neither flags nor key=value), and other words."""
    is_file = [word.lower().endswith(SUFFIXES) and not _NO_FILE.match(word) for word in arguments]
    files = [Path(word) for word, found in zip(arguments, is_file, strict=True) if found]
    return files, [word for word, found in zip(arguments, is_file, strict=True) if not found]


def parse(arguments: Sequence[str], help_text: ShortHelp = TRAIN) -> TrainConfig:
    """Parse `[CONFIG.toml ...] [--flags]`. Help and invalid flags exit."""
    files, flags = split_files(arguments)
    return help_text.parse(TrainConfig, flags, load_files(files))


# --- files ---


def to_toml(config: TrainConfig) -> str:
    """Format all settings as TOML."""
    table = dataclasses.asdict(config)
    parts = {name: value for name, value in table.items() if isinstance(value, dict)}
    lines = [_toml_line(name, value) for name, value in table.items() if name not in parts]
    for name, settings in parts.items():
        lines += ["", f"[{name}]", *(_toml_line(key, value) for key, value in settings.items())]
    return "\n".join(lines) + "\n"


def _toml_line(name: str, value: object) -> str:
    # Texts, numbers, booleans and lists of texts are as in JSON, except one character.
    return f"{name} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")


def to_json(config: TrainConfig) -> str:
    """Format all settings as JSON."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def load_file(path: Path) -> TrainConfig:
    """Load settings from TOML, or a run's config.json; absent ones keep their defaults."""
    return load_files([path])


def load_files(paths: Sequence[Path]) -> TrainConfig:
    """Load settings from several files: names and types are checked per file, combinations in the result."""
    return _overlaid(TrainConfig(), [(str(path), _read(path)) for path in paths], "")


def _read(path: Path) -> dict[str, Any]:
    of_run = path.suffix.lower() == ".json"
    try:
        raw = read_bytes(path)
        table = parse_json(raw) if of_run else tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}). The shipped ones are in configs/."
        ) from None
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(
            f"{path} is not valid {path.suffix[1:] or 'TOML'}: {why}. Correct it, or give another file."
        ) from None
    return existing_settings(table)[0] if of_run else table


def existing_settings(
    table: dict[str, Any], config: Any = None, section: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the settings of a run's config.json into existing ones, and flag -> value of removed ones."""
    known, gone = dict[str, Any](), dict[str, Any]()
    config = TrainConfig() if config is None else config
    names = {field.name for field in dataclasses.fields(config)}
    for name, value in table.items():
        part, flag = getattr(config, name, None), f"{section}{name}".replace("_", "-")
        if name not in names:
            table_of = value if isinstance(value, dict) else {"": value}
            gone |= {f"{flag}.{key}".rstrip("."): one for key, one in table_of.items()}
        elif dataclasses.is_dataclass(part) and isinstance(value, dict):
            known[name], others = existing_settings(value, part, f"{flag}.")
            gone |= others
        else:
            known[name] = value
    return known, gone


def gone_settings(path: Path) -> str:
    """Name the settings of a run's config.json that no longer exist, unless they were off; empty if none."""
    try:
        gone = existing_settings(load_json(path))[1]
    except (OSError, ValueError):  # Reported where the file is loaded.
        return ""
    return ", ".join(f"--{flag} {value}" for flag, value in gone.items() if value not in _OFF)


def overlay(config: Any, table: Any, where: str) -> Any:
    """Return `config` with the settings of a nested table from `where`."""
    return _overlaid(config, [(where, table)], "")


def _overlaid(config: Any, layers: Sequence[tuple[str, Any]], section: str) -> Any:
    # Tables with the names of their origins, the lowest first.
    known = {f.name: f for f in dataclasses.fields(config)}
    hints = typing.get_type_hints(type(config))
    changes: dict[str, Any] = {}
    parts: dict[str, list[tuple[str, Any]]] = {}
    for where, table in layers:
        if not isinstance(table, dict):
            raise ConfigError(f"{where} must be a table of settings, found {type(table).__name__}.")
        for key, value in _opened_parts(table, where, section).items():
            name = key.replace("-", "_")
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"Perhaps you meant {near[0]!r}." if near else f"Known: {', '.join(sorted(known))}."
                raise ConfigError(f"{where} sets {key!r}, which does not exist. {hint}")
            current = getattr(config, name)
            if dataclasses.is_dataclass(current):
                parts.setdefault(name, []).append((f"{where} [{key}]", value))
            else:
                changes[name] = _typed(value, current, f"{where}: {key}", typing.get_args(hints[name]))
    for name, of_part in parts.items():
        changes[name] = _overlaid(getattr(config, name), of_part, f"{section}{name}.")
    return dataclasses.replace(config, **changes)


def _opened_parts(table: dict[str, Any], where: str, section: str) -> dict[str, Any]:
    # ``[world] name, settings`` are the settings `world` and `world_settings`.
    found = dict(table)
    for key, value in table.items():
        if not section and key in PARTS and isinstance(value, dict):
            if unknown := sorted(value.keys() - {"name", "settings"}):
                raise ConfigError(f"{where} [{key}] sets {unknown[0]!r}; it takes name and [{key}.settings].")
            del found[key]
            found |= {key: value["name"]} if "name" in value else {}
            found[f"{key}_settings"] = value.get("settings", {})
    return found


def _typed(value: Any, current: Any, where: str, choices: tuple[Any, ...]) -> Any:
    if isinstance(current, tuple) and isinstance(value, dict):
        return tuple(f"{key}={json.dumps(one)}" for key, one in value.items())
    if isinstance(current, tuple) and isinstance(value, list) and all(isinstance(x, str) for x in value):
        return tuple(value)
    if isinstance(current, float) and type(value) is int and abs(value) < 2**63:
        return float(value)
    words = [word for choice in choices for word in typing.get_args(choice)]
    if words and (value in words or type(value) in choices):  # A union of a type and words.
        return value
    if type(value) is not type(current):
        more = f", or {', '.join(map(repr, words))}" if words else ""
        raise ConfigError(
            f"{where} is {shortened(value)}, expected {type(current).__name__} like {current!r}{more}."
        )
    if choices and not isinstance(current, tuple) and value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"Perhaps you meant {near[0]!r}." if near else f"Choose one of: {', '.join(choices)}."
        raise ConfigError(f"{where} is {value!r}, which does not exist. {hint}")
    return value
