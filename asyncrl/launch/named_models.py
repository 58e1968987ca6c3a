"""The models that --policy, --world and --reward name, the policies of a run, and its settings.

A name is a shipped one, a folder that a built-in class reads, or 'package.module:Class@FOLDER'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncrl import registry
from asyncrl.config.run import TrainConfig, load_file
from asyncrl.errors import AsyncRLError, CheckpointError, ConfigError
from asyncrl.policies.acceleration import enable_gradient_checkpointing
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.policies.lora import add_lora
from asyncrl.policies.openvla.files import PublishedOptions, open_folder
from asyncrl.records import ModelSummary
from asyncrl.rewards.resnet import ResNetReward
from asyncrl.storage import assets, checkpoint
from asyncrl.storage.atomic import read_json
from asyncrl.worlds.files import world_class, world_title
from asyncrl.worlds.start_states import load_start_states


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A named model that is not read yet."""

    kind: type[Any]  # Its class, with everything that its protocol requires
    folder: Path
    settings: Mapping[str, Any]  # keywords of its `check` and `load`

    def check(self, *arguments: Any) -> ModelSummary:
        """Check that `load` can read a world's or reward model's folder; loads no weights."""
        return self.kind.check(self.folder, *arguments, **self.settings)

    def load(self, device: torch.device, *arguments: Any) -> Any:
        """Load the model to a device."""
        return self.kind.load(self.folder, device, *arguments, **self.settings)


def named_policy(text: str, settings: Iterable[str] = ()) -> NamedModel:
    """Resolve --policy."""
    if registry.names_code(text):
        return _of_user("policy", text, settings)
    if (title := world_title(Path(text))) and text not in assets.shipped("policy"):  # It may look like one.
        raise CheckpointError(f"--policy {text} is a world model ({title}'s). Give it as --world.")
    folder, keywords = assets.policy_folder(text), registry.keywords("--policy-settings", settings)
    saved = read_json(folder / "config.json").get("asyncrl")  # openvla.files.SECTION
    decoding = keywords.get("decoding") or (saved.get("decoding") if isinstance(saved, dict) else "")
    name = "openvla" if decoding == "autoregressive" else "openvla_oft"
    return NamedModel(kind=registry.resolve("policy", name), folder=folder, settings=keywords)


def named_world(text: str, settings: Iterable[str] = ()) -> NamedModel:
    """Resolve --world; see `named_policy`."""
    if registry.names_code(text):
        return _of_user("world", text, settings)
    folder, keywords = assets.world_folder(text), registry.keywords("--world-settings", settings)
    return NamedModel(kind=world_class(folder), folder=folder, settings=keywords)


def named_reward(text: str, world_folder: Path, settings: Iterable[str] = ()) -> NamedModel:
    """Resolve --reward, by default the model in the world's folder; see `named_policy`."""
    if registry.names_code(text):
        return _of_user("reward", text, settings)
    folder = Path(text) if text else world_folder
    keywords = registry.keywords("--reward-settings", settings)
    return NamedModel(kind=ResNetReward, folder=folder, settings=keywords)


def _of_user(kind: str, text: str, settings: Iterable[str]) -> NamedModel:
    name, folder = registry.split(text)
    return NamedModel(
        kind=registry.resolve(kind, name),
        folder=(checkpoint.latest(Path(folder)) if kind == "policy" else None) or Path(folder),
        settings=registry.keywords(f"--{kind}-settings", settings),
    )


def folder_part(text: str) -> str:
    """Return the folder in a name: the part after the @ of a class, else the name itself."""
    name, folder = registry.split(text)
    return folder if name else text


def refuse_foreign_code(
    config: TrainConfig, own: TrainConfig, source: str, kinds: Iterable[str] = registry.PARTS_OF_A_RUN
) -> None:
    """Refuse classes that a run names and the user did not: a file or peer must not name code."""
    for flag, text in registry.own_code(config, kinds):
        if (flag, text) not in registry.own_code(own, kinds):
            raise ConfigError(
                f"{source} names {text}, which is code. Code is named on the command line only: if you trust "
                f"that class and have it here, add {flag} {text}"
            )


# ---- policies ------------------------------------------------------------------------------------


def policy_chunk(config: TrainConfig) -> int:
    """Return the steps per decision of --policy, without loading it; 1 if only its class knows them."""
    if registry.names_code(config.policy):
        return 1
    named = named_policy(config.policy, config.policy_settings)
    known = {field.name for field in fields(PublishedOptions)}
    options = {key: value for key, value in named.settings.items() if key in known}
    return open_folder(named.folder, PublishedOptions(**options)).config.chunk


def load_policy_version(config: TrainConfig, folder: Path | None, device: torch.device) -> Policy:
    """Load a run's policy at a checkpoint; without `folder`, the one that the run began with."""
    name, _ = registry.split(config.policy)
    text = config.policy if folder is None else f"{name}@{folder}" if name else str(folder)
    # They are of a published folder, which has fewer settings of its own than a checkpoint, or of a class.
    named = named_policy(text, config.policy_settings if folder is None or name else ())
    return named.load(device)


def build_policy(config: TrainConfig, device: torch.device, *, learns: bool = False) -> Policy:
    """Load the policy that the run begins with: for an actor, or with `learns` as the learner trains it."""
    policy = load_policy_version(config, None, device)
    wanted = config.critic.level if learns and config.algorithm.kind == "ppo" else "none"
    if hasattr(policy, "add_critic"):
        if wanted == "none":
            policy.drop_critic()
        elif policy.critic != wanted:
            policy.add_critic(wanted)
    elif wanted != "none":
        raise ConfigError(
            f"--algorithm.kind is ppo, but {type(policy).__name__} has no critic (add_critic, values). Use "
            "--algorithm.kind grpo, or add the methods."
        )
    if config.lora.rank:
        add_adapters(config, policy)
    if learns and config.learner.gradient_checkpointing:
        enable_gradient_checkpointing(policy, every=config.learner.gradient_checkpointing_every)
    if not isinstance(policy, nn.Module):
        raise ConfigError(
            f"--policy is a {type(policy).__name__}, which is no torch.nn.Module. Derive it from one."
        )
    return policy.eval()


def add_adapters(config: TrainConfig, policy: Policy) -> None:
    """Add adapters to the policy, in bfloat16 if it and the learner's passes are."""
    if not hasattr(policy, "lora_layers"):
        raise ConfigError(
            f"--lora.rank is {config.lora.rank}, but {type(policy).__name__} has no lora_layers, so it is "
            "not known where adapters go. Use --lora.rank 0, or add the method."
        )
    half = config.learner.precision == "bf16" and policy.dtype == torch.bfloat16
    dtype = torch.bfloat16 if half else torch.float32
    add_lora(policy, config.lora.rank, config.lora.alpha, config.lora.targets, dtype=dtype)


def sampling_of(config: TrainConfig) -> SamplingParams:
    """Return the sampling parameters of a run's actors."""
    return SamplingParams(temperature=config.algorithm.temperature, top_k=config.algorithm.top_k)


# ---- the settings of a run -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a run that its evaluation shares."""

    config: TrainConfig
    tasks: tuple[str, ...] = ()
    """Instructions of its start states; empty if unknown here, or if the run trained in a simulator."""
    simulator: str = ""  # Built-in simulator that has these tasks, or that it trained in; empty if unknown
    simulator_settings: tuple[str, ...] = ()


def run_of(text: str) -> Path | None:
    """Return the run folder that a policy's name refers to: itself, or that of its checkpoint."""
    path = Path(folder_part(text))
    for folder in (path, path.parent.parent):
        if (folder / "config.json").is_file() and (folder / checkpoint.FOLDER).is_dir():
            return folder
    return None


def settings_of_run(run_dir: Path) -> RunSettings:
    """Read a run's settings for evaluation, without a user's simulator: a folder must not name code."""
    config = load_file(run_dir / "config.json")
    if registry.names_code(config.world):
        return RunSettings(config=config)
    tasks, simulator, settings = (), assets.simulator_named(config.world), config.world_settings
    if not simulator:
        with suppress(AsyncRLError, OSError):  # A run can be evaluated where its start states are not.
            path = assets.start_states_path(config.start_states, folder_part(config.world))
            states = load_start_states(path, keyframes=config.keyframes)
            tasks = tuple(sorted({state.task for state in states}))
        simulator, settings = config.evaluation.simulator, config.evaluation.simulator_settings
        if registry.names_code(simulator) or not simulator:
            from asyncrl.evaluation.success_rate import simulator_of_tasks

            simulator, settings = simulator_of_tasks(tasks), ()
    return RunSettings(
        config=config, tasks=tasks, simulator=simulator, simulator_settings=without_code(settings)
    )


def without_code(settings: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out settings that name a module: a folder must not name code."""
    return tuple(text for text in settings if not registry.names_module(text))
