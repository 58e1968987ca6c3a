"""Clones recordings into a policy, fresh or refined: `asyncrl fit policy`."""

from __future__ import annotations

from pathlib import Path

from asyncrl.commands.fit_world import redrawn
from asyncrl.fitting.recordings import Recordings
from asyncrl.fitting.settings import FitPolicy
from asyncrl.launch.own_device import take_device
from asyncrl.launch.rendezvous import local_rank, world_size
from asyncrl.storage.asset_paths import policy_folder, world_folder


def fit_policy_command(config: FitPolicy, recordings: Recordings) -> None:
    """Clone the recordings and write the policy."""
    import torch

    from asyncrl.fitting.fit_policy import check_imitable, fit_policy
    from asyncrl.fitting.fresh_models import fresh_policy, write_statistics
    from asyncrl.policies.openvla.autoregressive import load_policy

    if config.refine and _fine_tunes(config):
        return _fine_tune(config, recordings)
    torch.manual_seed(config.seed)
    device = take_device(config.device)
    if config.refine:
        policy = load_policy(policy_folder(config.refine))
    else:
        policy = fresh_policy(config.size, recordings, config.statistics)
    check_imitable(policy, recordings)
    policy.to(device).requires_grad_(True)
    drawn = redrawn(world_folder(config.world), recordings, device) if config.world else None
    loss = fit_policy(
        policy,
        recordings,
        steps=config.steps,
        batch=config.batch,
        learning_rate=config.learning_rate,
        seed=config.seed,
        drawn=drawn,
        compiled=config.compile,
        average=config.average,
    )
    policy.save(config.out, dtype=torch.bfloat16)
    write_statistics(config.out, policy, recordings)
    print(f"policy in {config.out}: {loss:.3f} nats per action token")


def _fine_tunes(config: FitPolicy) -> bool:
    """Tell whether a large policy may be meant: it is then written in the type that it computes in."""
    asked = bool(config.asked_of_fine_tuning()) or config.statistics != "auto" or world_size() > 1
    return asked or _is_published(policy_folder(config.refine))


def _is_published(folder: Path) -> bool:
    """Return True if a folder has all published tensors; those that asyncrl saves lack the unused ones."""
    from asyncrl.policies.openvla.names import UNUSED_NORM
    from asyncrl.storage.tensor_reader import TensorFiles

    return UNUSED_NORM in TensorFiles(folder).names()


def _fine_tune(config: FitPolicy, recordings: Recordings) -> None:
    from asyncrl.launch.fine_tune_policy import fine_tune_policy

    device = take_device(config.device, local_rank())
    drawn = redrawn(world_folder(config.world), recordings, device) if config.world else None
    if told := fine_tune_policy(config, recordings, device, drawn):
        print(told, flush=True)
