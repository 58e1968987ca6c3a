"""`asyncrl fit decoder`: distil a tiny decoder for a world from its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from asyncrl.config.bounds import SEEDS, AtLeast, Bounded, Within
from asyncrl.errors import ConfigError
from asyncrl.fitting.settings import Examples, LearningRate, Steps
from asyncrl.launch.own_device import take_device
from asyncrl.storage.assets import policy_folder, start_states_path, world_folder

if TYPE_CHECKING:
    import torch

    from asyncrl.fitting.fit_decoder import Imagined, Likeness
    from asyncrl.rewards.interface import RewardModel


_Count = Annotated[int, AtLeast(1, "it counts from 1.", "Leave it out for the default.", highest=1_000_000)]


@dataclass(frozen=True, kw_only=True)
class FitDecoder(Bounded):
    """A tiny decoder, distilled from the world's own on episodes that the world imagines."""

    world: str = "tabletop"
    """World folder, or 'tabletop' (shipped)."""
    policy: str = "tabletop"
    """Policy that acts in the imagined episodes."""
    start_states: str = "tabletop"
    """Where they begin."""
    out: str = ""
    """Folder for decoder.safetensors and decoder.json; empty: the world's folder."""
    episodes: _Count = 256
    """Episodes to learn from."""
    held_out: _Count = 64
    """Further episodes, from other start states, to measure on."""
    decisions: _Count = 6
    """Length of an episode; as long as those of training (--actor.max-decisions)."""
    imagine_batch: Examples = 32
    """Episodes imagined side by side."""
    steps: Steps = 3_000
    """Optimizer steps."""
    batch: Examples = 4
    """Episodes per step."""
    learning_rate: LearningRate = 3e-3
    """Peak learning rate."""
    temperature: Annotated[float, Within(0, 1000, "it must lie in 0..1000.", "Use 1.0.")] = 1.0
    """Sampling temperature of the policy, as in training."""
    threshold: Annotated[float, Within(0, 1, "it is a probability.", "Use 0.7.")] = 0.7
    """Probability from which a frame counts as success, for the agreement of the verdicts."""
    device: str = "auto"
    """cpu, cuda, or auto. On a GPU world and policy compute in bfloat16, as they do in training."""
    seed: Annotated[int, AtLeast(0, "random streams are numbered from 0.", "Use 0.", highest=SEEDS)] = 0
    """Of weights, episodes and the order of examples."""
    compile: bool = False
    """Compile the tiny decoder first: a minute at the start, then faster on a GPU."""


def fit_decoder_command(config: FitDecoder) -> None:
    """Imagine, distil, measure and write."""
    import torch

    from asyncrl.fitting.fit_decoder import compare, fit_decoder
    from asyncrl.fitting.loop import Schedule

    device = take_device(config.device)
    folder = world_folder(config.world)
    out = Path(config.out) if config.out else folder
    fitted = _distillable(folder, device)
    learned, held_out = _episodes(config, fitted.world, device)
    reward = _reward(folder, set(learned.tasks) | set(held_out.tasks), device)
    torch.manual_seed(config.seed)
    decoder = fitted.fresh_decoder().to(device)
    schedule = Schedule(
        steps=config.steps,
        batch=config.batch,
        learning_rate=config.learning_rate,
        seed=config.seed,
        compiled=config.compile,
    )
    loss = fit_decoder(decoder, learned, schedule)
    decoder.to(torch.bfloat16)  # as it is stored: halves the file, and what is measured is what will be used
    decoder.to(_dtype(device))
    likeness = compare(decoder, held_out, reward, threshold=config.threshold)
    made = {name: getattr(config, name) for name in ("episodes", "decisions", "steps", "batch", "seed")}
    made |= {"learning_rate": config.learning_rate, "loss": round(loss, 5)} | likeness.as_dict()
    fitted.save_decoder(out, decoder.to(torch.bfloat16), made)
    print(report(likeness, len(held_out), config.threshold))
    print(f"tiny decoder in {out}")


def _dtype(device: torch.device) -> torch.dtype:
    import torch

    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _distillable(folder: Path, device: torch.device) -> Any:
    """Read the world, which must be of a kind with tiny decoders."""
    from asyncrl.fitting.world import load_fitted

    fitted = load_fitted(folder, device, _dtype(device))
    if not fitted.distils:
        raise ConfigError(
            f"--world {folder} holds a world whose frames are decoded one by one; a tiny decoder takes the "
            "place of one that draws causal video, and there is none for this kind. Use the world as it is."
        )
    return fitted


def _episodes(config: FitDecoder, world: Any, device: torch.device) -> tuple[Imagined, Imagined]:
    """Episodes to learn from and, from other start states, to measure on."""
    from asyncrl.fitting.fit_decoder import imagine_episodes
    from asyncrl.policies.interface import SamplingParams
    from asyncrl.policies.openvla.autoregressive import load_policy
    from asyncrl.worlds.start_states import load_start_states, start_state_at

    policy = load_policy(policy_folder(config.policy), device=device, dtype=_dtype(device)).eval()
    path = start_states_path(config.start_states, config.world)
    states = load_start_states(path, image_size=world.image_size)
    if len(states) < 2:
        raise ConfigError(
            f"--start-states {config.start_states} holds {len(states)} start state, but some are to learn "
            "from and others to measure on. Give a file with more."
        )
    apart = min(len(states) - 1, max(1, len(states) // 8, min(config.held_out, len(states) // 2)))
    parts = []
    for name, own, count, seed in (
        ("imagine", states[apart:], config.episodes, config.seed),
        ("imagine held-out", states[:apart], config.held_out, config.seed + 1),
    ):
        parts.append(
            imagine_episodes(
                world,
                policy,
                SamplingParams(temperature=config.temperature, top_k=0),
                [start_state_at(own, seed, n) for n in range(count)],
                decisions=config.decisions,
                batch=config.imagine_batch,
                seed=seed,
                name=name,
            )
        )
    return parts[0], parts[1]


def _reward(folder: Path, tasks: set[str], device: torch.device) -> RewardModel | None:
    from asyncrl.errors import CheckpointError
    from asyncrl.launch.named_models import named_reward

    try:
        named = named_reward("", folder)
        return named.kind.load(named.folder, device, sorted(tasks))
    except CheckpointError as error:
        print(f"The agreement of verdicts is not measured: {error}", flush=True)
        return None


def report(likeness: Likeness, episodes: int, threshold: float) -> str:
    """Format the figures as lines."""
    lines = [
        f"against the full decoder on {episodes} held-out episodes:",
        f"  PSNR {likeness.psnr:.2f} dB, worst hundredth of the frames below {likeness.worst_psnr:.2f} dB",
    ]
    if likeness.same_verdict == likeness.same_verdict:
        lines.append(
            f"  same verdict (threshold {threshold}) on {likeness.same_verdict:.2%} of the frames and "
            f"{likeness.same_outcome:.1%} of the episodes, of which {likeness.success:.1%} succeed"
        )
    return "\n".join(lines)
