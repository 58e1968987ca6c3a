"""How much more truly does a world imagine that begins on the way than one that begins at the start?

    python benchmarks/keyframes.py --data RUN/true/round_000006 --world tabletop

The actions of true episodes are imagined from the first frame, and from a key frame after each of the first
decisions: the true first frame, and the four true frames that lead there. A row is of the episodes that go on
after that decision. Verdicts are those of the success rule on the decisions that are left; the same episodes
imagined from the start are judged on all of their decisions, as in training. PSNR is by decision, in dB. No
world draws better than its autoencoder draws true frames again, which later decisions, where things move, are
harder for too: its PSNR of the first decision after the key frame stands beside the world's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from measuring import heading
from numpy.typing import NDArray
from tqdm import tqdm

from asyncrl.config.run import TrainConfig
from asyncrl.evaluation.audit import Models, psnr_by_decision
from asyncrl.evaluation.evaluate import SuccessRate
from asyncrl.fitting.keyframes import state_at
from asyncrl.fitting.loading import load_recordings
from asyncrl.fitting.recordings import Recordings, chosen
from asyncrl.fitting.worlds.interface import load_fitted
from asyncrl.launch.environment import with_world_defaults
from asyncrl.launch.named_models import named_reward, named_world
from asyncrl.policies.interface import SamplingParams
from asyncrl.records import CHUNK
from asyncrl.seeds import episode_seed

ROWS = 16
"""Episodes imagined together."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare key frames with starts, of the same true episodes."""

    data: tuple[Path, ...]
    """Recordings, best of the policy that is trained, of starts that the world was not fitted on."""
    world: str = "tabletop"
    """World model, with its reward model."""
    episodes: int = 128
    """At most."""
    seed: int = 0
    """Of the world's noise."""
    device: str = "cpu"
    """cpu or cuda."""
    json: str = ""
    """Also write the numbers here."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Of the episodes that go on after so many decisions."""

    after: int
    wrong: SuccessRate
    """Verdicts unlike the truth, imagined from the key frame, and..."""
    wrong_from_start: SuccessRate
    """...from the start."""
    psnr: tuple[float, ...]
    """Of the decisions that follow."""
    psnr_from_start: tuple[float, ...]
    """Of the same decisions."""
    psnr_redrawn: float
    """Of the first of them, drawn again by the autoencoder from the true frames."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One episode, imagined from somewhere."""

    judged: bool
    psnr: tuple[float, ...]


def imagine(
    models: Models, recordings: Recordings, episodes: Sequence[int], after: int, seed: int
) -> list[Drawn]:
    """Imagine the actions of true episodes behind the first `after` decisions."""
    found = []
    for first in tqdm(range(0, len(episodes), ROWS), desc=f"after {after} decisions", mininterval=2.0):
        batch = list(episodes[first : first + ROWS])
        lengths = [decisions_of(recordings, one) - after for one in batch]
        actions = np.stack([actions_of(recordings, one, after, max(lengths)) for one in batch])
        starts = [state_at(recordings, one, CHUNK * after) for one in batch]
        drawn = models.imagine_again(starts, actions, [episode_seed(seed, one, 0) for one in batch])
        for row, (one, length) in enumerate(zip(batch, lengths, strict=True)):
            true = recordings.frames[recordings.span(one)][1 + CHUNK * after :]
            frames = drawn.frames[row, : CHUNK * length]
            found.append(
                Drawn(
                    judged=models.end(drawn.scores[row, :length]) is not None,
                    psnr=psnr_by_decision(frames, true, CHUNK),
                )
            )
    return found


def redrawn(settings: Settings, recordings: Recordings, device: torch.device) -> list[tuple[float, ...]]:
    """Let the world's autoencoder draw true episodes again: PSNR by decision."""
    frames = load_fitted(named_world(settings.world, ()).folder, device).redraw(recordings)
    spans = [recordings.span(number) for number in range(len(recordings))]
    return [
        psnr_by_decision(frames[span.start + 1 : span.stop], recordings.frames[span][1:], CHUNK)
        for span in spans
    ]


def decisions_of(recordings: Recordings, episode: int) -> int:
    """Count the decisions of an episode; the last one may not have been carried out to its end."""
    span = recordings.span(episode)
    return -(-(span.stop - span.start - 1) // CHUNK)


def actions_of(recordings: Recordings, episode: int, after: int, decisions: int) -> NDArray[np.float32]:
    """Return the actions behind the first decisions, ``[N, C, A]``; the last one fills up what lacks."""
    taken = recordings.actions[recordings.span(episode)][1 + CHUNK * after :].astype(np.float32)
    lacking = CHUNK * decisions - len(taken)
    return np.concatenate([taken, np.repeat(taken[-1:], lacking, 0)]).reshape(decisions, CHUNK, -1)


def row_of(
    after: int,
    truth: NDArray[np.bool_],
    drawn: Sequence[Drawn],
    whole: Sequence[Drawn],
    again: Sequence[tuple[float, ...]],
) -> Row:
    """Compare episodes imagined from a key frame with the same ones imagined from the start, and redrawn."""
    count = len(truth)
    wrong, before = (
        SuccessRate.of(int(sum(one.judged != true for one, true in zip(some, truth, strict=True))), count)
        for some in (drawn, whole)
    )
    return Row(
        after=after,
        wrong=wrong,
        wrong_from_start=before,
        psnr=mean_by_decision([one.psnr for one in drawn]),
        psnr_from_start=mean_by_decision([one.psnr[after:] for one in whole]),
        psnr_redrawn=float(np.mean([one[after] for one in again])),
    )


def mean_by_decision(values: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Mean over the episodes that have the decision."""
    longest = max((len(one) for one in values), default=0)
    return tuple(float(np.mean([one[n] for one in values if len(one) > n])) for n in range(longest))


def measure(settings: Settings) -> list[Row]:
    """Imagine all, from everywhere."""
    recordings, device = load_recordings(settings.data), torch.device(settings.device)
    models, found = models_of(settings, recordings, device), list[Row]()
    spread = np.linspace(0, len(recordings) - 1, min(settings.episodes, len(recordings))).round().astype(int)
    lengths = {int(one): decisions_of(recordings, int(one)) for one in spread}
    whole = dict(zip(lengths, imagine(models, recordings, list(lengths), 0, settings.seed), strict=True))
    again = dict(zip(lengths, redrawn(settings, chosen(recordings, list(lengths)), device), strict=True))
    for after in range(max(lengths.values())):
        some = [one for one, length in lengths.items() if length > after]
        drawn = [whole[one] for one in some]
        if after:
            drawn = imagine(models, recordings, some, after, settings.seed)
        others = [whole[one] for one in some], [again[one] for one in some]
        found.append(row_of(after, recordings.solved()[some], drawn, *others))
    return found


def models_of(settings: Settings, recordings: Recordings, device: torch.device) -> Models:
    """Load world and reward model; the actions are known, so that no policy decides."""
    config, _ = with_world_defaults(TrainConfig(world=settings.world))
    world = named_world(settings.world, ())
    reward = named_reward("", world.folder, ())
    nobody: Any = None
    return Models(
        policy=nobody,
        world=world.kind.load(world.folder, device, config.imagination, **world.settings),
        reward=reward.kind.load(reward.folder, device, sorted(set(recordings.tasks)), **reward.settings),
        sampling=SamplingParams(temperature=1.0),
        max_decisions=config.actor.max_decisions,
        threshold=config.actor.success_threshold,
        success_frames=config.success_frames,
    )


def table(rows: Sequence[Row]) -> str:
    """Write Markdown."""
    titles = [
        "after",
        "wrong verdicts, %",
        "from the start",
        "PSNR of the decisions that follow",
        "from the start",
        "the first redrawn",
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        rates = [
            f"{100 * rate.rate:.1f} [{100 * rate.low:.1f}, {100 * rate.high:.1f}]"
            for rate in (row.wrong, row.wrong_from_start)
        ]
        some = (row.psnr, row.psnr_from_start, (row.psnr_redrawn,))
        psnr = [" ".join(f"{value:.1f}" for value in each) for each in some]
        lines.append(f"| {' | '.join([f'{row.after} ({row.wrong.episodes} episodes)', *rates, *psnr])} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table."""
    settings = tyro.cli(Settings, description=__doc__)
    print(heading(torch.device(settings.device)), flush=True)
    found = measure(settings)
    print(table(found))
    if settings.json:
        Path(settings.json).write_text(json.dumps([asdict(row) for row in found], indent=1))


if __name__ == "__main__":
    main()
