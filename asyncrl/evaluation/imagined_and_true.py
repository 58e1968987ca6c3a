"""Compare imagined episodes with the true outcome of the same actions; imagine a stored group once more.

Policy, world and reward model act as in training, closed loop; the simulator then plays the same actions from
the same start, for as many decisions. With `true_decisions`, imagination begins after so many. Where the
verdicts differ, the imagination was wrong.

Letters: B episodes of a batch, C steps of a decision, N decisions of an episode, A numbers of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.config.sections import SuccessFrames
from asyncrl.devices.tensors import require_finite
from asyncrl.evaluation.contact_sheet import scores_of, start_of
from asyncrl.evaluation.success_rate import SuccessRate, acting
from asyncrl.policies.interface import Policy, SamplingParams
from asyncrl.records import Episode, StartState, episode_seed, noise_seed, sampling_seed
from asyncrl.rewards.interface import RewardModel, deciding_step
from asyncrl.simulators.pool import SimulatorPool
from asyncrl.simulators.rollout import Observations, Play, SimulatedEpisode, rollout
from asyncrl.worlds.interface import World, imagine

TO_THE_END: Final = 1_000_000  # Decisions past a success: the simulator carries out all that was imagined.


@dataclass(frozen=True, kw_only=True)
class Imagined:
    """Closed-loop episodes of a batch; each continues until all have ended."""

    frames: NDArray[np.uint8]  # [B, N * C, H, W, 3]: frame i was made by action i.
    actions: NDArray[np.float32]  # [B, N, C, A].
    scores: NDArray[np.float32]  # [B, N, C] probability of success of each frame.


@dataclass(frozen=True, kw_only=True)
class AuditModels:
    """The models that imagine, and the rule that ends an episode."""

    policy: Policy
    world: World[Any]
    reward: RewardModel
    sampling: SamplingParams
    max_decisions: int
    threshold: float
    success_frames: SuccessFrames
    true_decisions: int = 0  # Decisions in the simulator before imagination begins
    policy_name: str = "policy"  # In errors

    def end(self, scores_NC: NDArray[np.float32]) -> int | None:
        """Return the decision, from 0, in which an episode succeeds; None if it does not."""
        found = deciding_step(scores_NC, self.threshold, self.success_frames)
        return None if found is None else found[0]

    @torch.inference_mode()
    def imagine(self, starts: Sequence[StartState], seeds: Sequence[int]) -> Imagined:
        """Imagine ``B`` episodes, with seeds of `records.episode_seed`, until all have succeeded or ended."""
        tasks, shown = [start.task for start in starts], np.stack([start.present_frame for start in starts])
        state = self.world.start(starts, decisions=self.max_decisions)
        drawn, chosen, scored = [], [], []
        for decision in range(self.max_decisions - min(start.elapsed for start in starts)):
            noise = [noise_seed(seed, decision) for seed in seeds]
            inputs = self.policy.preprocess(shown, tasks)
            acted = self.policy.act(inputs, self.sampling, [sampling_seed(one) for one in noise])
            require_finite(self.policy_name, actions=acted.actions, log_probs=acted.logprob)
            chosen.append(acted.actions.float().cpu().numpy())
            actions = torch.from_numpy(chosen[-1]).to(self.world.device)
            frames, state = imagine(self.world, state, actions, noise)
            require_finite("world model", frames=state.finite)
            scored.append(scores_of(self.reward, frames, tasks))
            drawn.append(frames.cpu().numpy())
            shown = drawn[-1][:, -1]
            if all(self.end(scores_NC) is not None for scores_NC in np.stack(scored, axis=1)):
                break
        return Imagined(
            frames=np.concatenate(drawn, axis=1),
            actions=np.stack(chosen, axis=1),
            scores=np.stack(scored, axis=1),
        )

    @torch.inference_mode()
    def score_true(self, episode: SimulatedEpisode, decisions: int) -> NDArray[np.float32]:
        """Score the true frames of imagined decisions: ``[N, C]``, zero after the simulator's last step."""
        chunk, first = self.world.action_spec.chunk, 1 + self.true_decisions * self.world.action_spec.chunk
        true = torch.from_numpy(episode.frames[first : first + decisions * chunk]).to(self.world.device)
        scores = np.zeros(decisions * chunk, np.float32)
        if len(true):
            scores[: len(true)] = scores_of(self.reward, true[None], [episode.task])[0]
        return scores.reshape(decisions, chunk)


@dataclass(frozen=True, kw_only=True)
class AuditedEpisode:
    """Imagined and true outcome of an episode."""

    start: str
    task: str
    decisions: int  # Imagined ones, until the imagined end.
    imagined: bool  # Imagined success.
    true: bool  # True success at any of these steps.
    judged_true: bool  # Verdict of the reward model on the true frames of these steps.
    psnr: tuple[float, ...]  # dB of the imagined frames of each decision against the true ones.


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Rates over audited episodes, with their 95 % intervals."""

    imagined_success: SuccessRate
    true_success: SuccessRate  # Of the same actions
    wrong: SuccessRate  # Imagined verdicts that differ from the truth
    false: SuccessRate  # Imagined successes that are true failures
    missed: SuccessRate  # True successes that are imagined failures
    wrong_on_true_frames: SuccessRate  # Reward model's verdicts on true frames that differ from truth
    correlation: float  # Of imagined and true success; nan if either is always the same
    psnr: tuple[float, ...]  # dB by decision, mean over the episodes that have it

    @classmethod
    def of(cls, episodes: Sequence[AuditedEpisode]) -> Audit:
        """Compute the rates."""
        imagined = np.array([episode.imagined for episode in episodes], bool)
        true = np.array([episode.true for episode in episodes], bool)
        judged = np.array([episode.judged_true for episode in episodes], bool)
        longest = max((len(episode.psnr) for episode in episodes), default=0)
        by_decision = [[e.psnr[n] for e in episodes if len(e.psnr) > n] for n in range(longest)]
        varied = bool(imagined.any() and true.any() and not imagined.all() and not true.all())

        def rate(outcomes: NDArray[np.bool_]) -> SuccessRate:
            return SuccessRate.of(int(outcomes.sum()), len(outcomes))

        return cls(
            imagined_success=rate(imagined),
            true_success=rate(true),
            wrong=rate(imagined != true),
            false=rate(~true[imagined]),
            missed=rate(~imagined[true]),
            wrong_on_true_frames=rate(judged != true),
            correlation=float(np.corrcoef(imagined, true)[0, 1]) if varied else float("nan"),
            psnr=tuple(float(np.mean(values)) for values in by_decision),
        )


def audit(
    models: AuditModels,
    pool: SimulatorPool,
    plays: Sequence[Play],
    *,
    rows: int,
    seed: int = 0,
    progress: Callable[[int], object] = lambda _: None,
) -> list[AuditedEpisode]:
    """Audit an episode from every start, in the order of `plays`.

    Episodes that are over within the `true_decisions` leave nothing to imagine and are left out.
    """
    audited = list[AuditedEpisode]()
    try:
        for first in range(0, len(plays), rows):
            batch = list(plays[first : first + rows])
            numbers = [first + (row if row < len(batch) else 0) for row in range(rows)]
            audited += _audit_batch(models, pool, batch, [episode_seed(seed, n, 0) for n in numbers])
            progress(len(batch))
    except KeyboardInterrupt as ended:
        if audited:
            wrong = sum(episode.imagined != episode.true for episode in audited)
            ended.add_note(f"{wrong} of {len(audited)} verdicts were wrong")
        raise
    return audited


def _audit_batch(
    models: AuditModels, pool: SimulatorPool, plays: list[Play], seeds: list[int]
) -> Iterator[AuditedEpisode]:
    chunk = models.world.action_spec.chunk
    before = models.true_decisions * chunk

    # Rows of one: which slots answer together is a matter of time, and would change last digits.
    act = acting(models.policy, models.sampling, 1, models.policy_name)

    def begin(shown: Observations) -> list[NDArray[np.float32] | None]:
        early = [decision < models.true_decisions for decision in shown.decisions]
        chosen = act(shown) if any(early) else [None] * len(early)
        return [actions if one else None for actions, one in zip(chosen, early, strict=True)]

    def follow(shown: Observations) -> list[NDArray[np.float32] | None]:
        places = zip(shown.plays, shown.decisions, strict=True)
        return [next(iter(script[play.key][decision : decision + 1]), None) for play, decision in places]

    begun = _in_order(plays, rollout(pool, begin, plays, keep_frames=True))
    going_on = [n for n, episode in enumerate(begun) if len(episode.frames) > before and not episode.solved]
    if not going_on:
        return
    filled = going_on + going_on[:1] * (len(seeds) - len(going_on))
    imagined = models.imagine([start_of(begun[n], before) for n in filled], [seeds[n] for n in filled])
    ends = [models.end(scores_NC) for scores_NC in imagined.scores[: len(going_on)]]
    lengths = [imagined.scores.shape[1] if end is None else end + 1 for end in ends]
    script = {}
    for row, n in enumerate(going_on):
        first = begun[n].actions[1:].reshape(-1, *imagined.actions.shape[2:])
        script[plays[n].key] = np.concatenate([first, imagined.actions[row, : lengths[row]]])
    audited = [plays[n] for n in going_on]
    played = rollout(pool, follow, audited, keep_frames=True, extra_decisions=TO_THE_END)
    for row, episode in enumerate(_in_order(audited, played)):
        length, steps = lengths[row], slice(1 + before, 1 + before + lengths[row] * chunk)
        yield AuditedEpisode(
            start=episode.start.name,
            task=episode.task,
            decisions=length,
            imagined=ends[row] is not None,
            true=bool(episode.success[steps].any()),
            judged_true=models.end(models.score_true(episode, length)) is not None,
            psnr=psnr_by_decision(imagined.frames[row, : length * chunk], episode.frames[steps], chunk),
        )


def _in_order(plays: Sequence[Play], played: Iterator[SimulatedEpisode]) -> list[SimulatedEpisode]:
    found = {(episode.start.name, episode.repeat): episode for episode in played}
    return [found[play.key] for play in plays]


def psnr_by_decision(drawn: NDArray[np.uint8], true: NDArray[np.uint8], chunk: int) -> tuple[float, ...]:
    """Compute the PSNR of ``[N * C, H, W, 3]``, mean over each decision with a true frame; at most 78 dB."""
    difference = drawn[: len(true)].astype(np.float32) - true.astype(np.float32)
    error = np.square(difference).mean(axis=(1, 2, 3))
    values = 10 * np.log10(255**2 / np.maximum(error, 1e-3))
    return tuple(float(values[at : at + chunk].mean()) for at in range(0, len(values), chunk))


ROWS: Final = {
    "imagined_success": ("imagined success", "imagined"),
    "true_success": ("true success of the same actions", "true"),
    "wrong": ("wrong verdicts", "wrong"),
    "false": ("false, of imagined successes", "false"),
    "missed": ("missed, of true successes", "missed"),
    "wrong_on_true_frames": ("reward model wrong on the true frames", "reward wrong"),
}
"""Rate of `Audit` -> its titles in a table of one version and of several."""


def table(head: str, audited: Mapping[str, Sequence[AuditedEpisode]]) -> str:
    """Format audits by version: one in full, several as a row each."""
    found = {name: Audit.of(episodes) for name, episodes in audited.items()}
    if len(found) == 1:
        return "\n".join([head, *_whole(next(iter(found.values())))])
    width = max(map(len, found))
    titles = " ".join(f"{short:>21}" for _, short in ROWS.values())
    rows = [f"{'':<{width}} {titles} {'correlation':>12}"]
    for name, one in found.items():
        rates = (getattr(one, field_name) for field_name in ROWS)
        cells = " ".join(f"{rate.rate:7.1%} [{rate.low:4.0%}, {rate.high:4.0%}]" for rate in rates)
        rows.append(f"{name:<{width}} {cells} {_number(one.correlation):>12}")
    return "\n".join([head, *rows])


def _whole(audit: Audit) -> list[str]:
    width = max(len(title) for title, *_ in ROWS.values())
    rows = [f"{title:<{width}}  {getattr(audit, field_name)}" for field_name, (title, *_) in ROWS.items()]
    rows.append(f"{'correlation of both successes':<{width}}  {_number(audit.correlation)}")
    numbers = "".join(f"{number:>7}" for number in range(1, 1 + len(audit.psnr)))
    decibels = "".join(f"{value:7.1f}" for value in audit.psnr)
    return [*rows, f"{'decision':<{width}}{numbers}", f"{'PSNR, dB':<{width}}{decibels}"]


def _number(value: float) -> str:
    return f"{'-':>6}" if math.isnan(value) else f"{value:6.3f}"


# --- a stored group once more ---


@torch.inference_mode()
def imagine_group(
    world: World[Any], reward: RewardModel, start: StartState, episodes: Sequence[Episode], *, rows: int = 0
) -> list[tuple[NDArray[np.uint8], NDArray[np.float32]]]:
    """Imagine stored actions again with the stored noise: frames ``[N * C, H, W, 3]`` and scores ``[N, C]``.

    `rows`: size of every pass, padded with copies of row 0; 0: one row per running member.
    """
    size = rows or len(episodes)
    parts = [episodes[first : first + size] for first in range(0, len(episodes), size)]
    return [found for part in parts for found in _imagine_members(world, reward, start, part, rows)]


def _imagine_members(
    world: World[Any], reward: RewardModel, start: StartState, episodes: Sequence[Episode], rows: int
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.float32]]]:
    drawn: list[list[NDArray[np.uint8]]] = [[] for _ in episodes]
    scored: list[list[NDArray[np.float32]]] = [[] for _ in episodes]
    decisions = max(len(episode.actions) for episode in episodes)
    in_state = list(range(max(rows, len(episodes))))
    state = world.start([start] * len(in_state), decisions=decisions)
    for n in range(decisions):
        going_on = [member for member, episode in enumerate(episodes) if n < len(episode.actions)]
        members = going_on + going_on[:1] * (rows - len(going_on))
        if members != in_state:
            state = state.select([in_state.index(member) for member in members])
        actions_BCA = torch.from_numpy(np.stack([episodes[member].actions[n] for member in members]))
        seeds = [int(episodes[member].noise_seeds[n]) for member in members]
        frames, state = imagine(world, state, actions_BCA.to(world.device), seeds)
        require_finite("world model", frames=state.finite)
        scores_BC = scores_of(reward, frames, [start.task] * len(members))
        frames_BCHW3, in_state = frames.cpu().numpy(), members
        for row, member in enumerate(going_on):
            drawn[member].append(frames_BCHW3[row])
            scored[member].append(scores_BC[row])
    for frames_of_one, scores_of_one in zip(drawn, scored, strict=True):
        yield np.concatenate(frames_of_one), np.stack(scores_of_one)


@torch.no_grad()
def logprobs_again(policy: Policy, episode: Episode, decisions: Sequence[int]) -> NDArray[np.float32]:
    """Compute a policy's log-probs ``[len(decisions), C, A]`` in nats of stored samples of some decisions."""
    chosen = list(decisions)
    inputs = policy.preprocess(episode.frames[chosen], [episode.task] * len(chosen))
    sample = {
        name: torch.from_numpy(array[chosen]).to(policy.device) for name, array in episode.sample.items()
    }
    sampling = SamplingParams(temperature=episode.temperature, top_k=episode.top_k)
    logprob = policy.evaluate(inputs, sample, sampling).logprob.float()
    require_finite("policy", log_probs=logprob)
    return logprob.cpu().numpy()
