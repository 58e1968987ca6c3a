"""An actor of tiny real models."""

from pathlib import Path

from asyncrl.actors.actor import Actor
from asyncrl.actors.imagination import WorldBackend
from asyncrl.config.algorithm import AlgorithmSettings
from asyncrl.config.run import TrainConfig
from asyncrl.config.sections import ActorSettings, ReplaySettings
from asyncrl.launch.roles import open_run_replay
from asyncrl.records import StartState
from asyncrl.replay.buffer import Replay
from asyncrl.replay.inline_ports import InProcessLearnerPort
from asyncrl.weights.packing import WholeTensors
from asyncrl.weights.transports.in_process import build_in_process
from asyncrl.worlds.start_states import StartStateStream
from support.tiny_models import start_state

TASKS = ("put the red cube on the white plate", "put the blue cube on the yellow plate")
GROUP = 2


def start(number: int) -> StartState:
    return start_state(number, task=TASKS[number % 2])


def actor_with(
    models: WorldBackend, folder: Path, *, slots: int, stages: int = 1, decisions: int = 1, groups: int = 1
) -> tuple[Actor, Replay, InProcessLearnerPort]:
    config = TrainConfig(
        algorithm=AlgorithmSettings(
            group_size=GROUP,
            groups_per_update=groups,
            temperature=models.sampling.temperature,
            top_k=models.sampling.top_k,
        ),
        replay=ReplaySettings(max_lag=0, keep_video_every=1),
    )
    replay = open_run_replay(folder, config)
    learner = InProcessLearnerPort(replay)
    publisher, receiver = build_in_process()
    publisher.publish(WholeTensors(models.policy.trainable_tensors()), 0)
    settings = ActorSettings(slots=slots, pipeline_stages=stages, max_decisions=decisions)
    rule = ActorSettings(max_decisions=decisions, success_threshold=1.0)
    parts = models.policy, models.world, models.reward, models.sampling
    fresh = WorldBackend(*parts, rule=rule, device=models.device)
    starts = StartStateStream([start(0), start(1)], seed=0)
    port = learner.actor_port()
    actor = Actor("inline", fresh, starts, port, receiver, settings, group_size=GROUP, run_seed=0)
    return actor, replay, learner
