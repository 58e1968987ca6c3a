"""A world is fine-tuned alike on one rank or two, in parts or at once, and written as it was read."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyncrl import cli
from asyncrl.errors import ConfigError
from asyncrl.fitting.loop import ONE_RANK, FitRanks, Schedule
from asyncrl.fitting.sources import load_recordings
from asyncrl.fitting.wan import ImaginedMemories, WanFit, Windows, encode_recordings, window_losses
from asyncrl.fitting.world import Latents, WorldOptions
from asyncrl.learner.fsdp import make_float32_masters, spread
from asyncrl.learner.ranks import DistributedRanks
from asyncrl.policies.acceleration import recompute
from asyncrl.policies.lora import adapt
from asyncrl.simulators.tabletop.scene import TASKS
from asyncrl.storage.atomic import write_json
from asyncrl.storage.tensor_files import TensorFiles, write_folder
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig, transformer_name
from asyncrl.worlds.wan.vae import VaeConfig, WanVae
from asyncrl.worlds.wan.world import sampling_sigmas, save_world
from support.published_exports import export_world
from support.published_worlds import small_world
from support.ranks import run_ranks
from support.recorded import recorded_spec, write_recorded
from support.whole_runs import exit_code, left_over, on_two_ranks
from support.worlds import load_world

CPU = torch.device("cpu")
STEPS = ("--steps", "2", "--batch", "4", "--learning-rate", "1", "--device", "cpu")
"""The first steps of a warm-up of 200: rates of 0.005 and 0.01."""
NANO = TransformerConfig(heads=2, head_dim=24, layers=2, ffn_dim=64, channels=8, patch=2)
TRANSFORMER = "model-00001.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings, and a small world in the published layout with other files beside it."""
    folder = tmp_path_factory.mktemp("world")
    export_world(folder / "published", small_world())
    (folder / "published" / "dataset").mkdir()
    (folder / "published" / "dataset" / "traj0.npy").write_bytes(b"start states")
    (folder / "published" / ".cache").mkdir()
    write_recorded(folder / "data", recorded_spec(256, tasks=TASKS[:3]), (9, 17))
    return folder


def flags(folders: Path, out: Path, *more: str, refine: str = "published") -> list[str]:
    named = ["--data", str(folders / "data"), "--refine", str(folders / refine), "--out", str(out)]
    return ["world", *named, *STEPS, *more]


def fit(folders: Path, out: Path, *more: str, refine: str = "published") -> dict[str, torch.Tensor]:
    assert cli.run("fit", flags(folders, out, *more, refine=refine)) == 0
    return load_file(out / TRANSFORMER) if refine == "published" else {}


# ---- a step, however it is shared out ------------------------------------------------------------


def nano_windows() -> Windows:
    generator = torch.Generator().manual_seed(5)
    return Windows(
        latents=torch.randn(30, 8, 4, 4, generator=generator),
        rows=torch.randint(0, 30, (12, 4), generator=generator),
        actions=torch.rand(12, 13, 7, generator=generator),
    )


def nano() -> ActionWanTransformer:
    torch.manual_seed(3)
    return ActionWanTransformer(NANO).requires_grad_(True)


def gradients(
    micro_batch: int, precision: Any, lora: int, *, ranks: FitRanks | None = None
) -> dict[str, Any]:
    """Of one step of 8 windows; spread over the ranks of the default group, if there is one."""
    network = nano()
    if lora:
        network.requires_grad_(False)
        adapt(network, {f"blocks.{n}.attn1.to_{x}" for n in (0, 1) for x in "qkv"}, lora, 0.0)
        for name, parameter in network.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    if ranks:
        recompute(network.blocks)
        spread(network, network.blocks, CPU, precision, cast_inputs=False)
    else:
        make_float32_masters(network, precision)
    schedule = Schedule(
        steps=1, batch=8, learning_rate=1.0, seed=11, micro_batch=micro_batch, ranks=ranks or ONE_RANK
    )
    generator = torch.Generator().manual_seed(schedule.seed)
    loss_at = window_losses(network, nano_windows(), schedule, generator, WorldOptions(), 5)
    for part in range(schedule.parts):
        (loss_at(part) / schedule.parts).backward()
    found: dict[str, Any] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            grad: Any = parameter.grad
            found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


def gradients_of_rank(micro_batch: int, precision: Any, lora: int) -> dict[str, Any]:
    ranks = DistributedRanks(20.0)
    return gradients(
        micro_batch, precision, lora, ranks=FitRanks(rank=ranks.rank, size=ranks.size, sum=ranks.sum)
    )


def test_memories_that_the_network_draws_follow_each_other_and_fill_a_share_of_a_batch() -> None:
    generator = torch.Generator().manual_seed(5)
    windows = replace(nano_windows(), rows=torch.tensor([[0, 1, 2, 3], [0, 3, 4, 5], [0, 5, 6, 7]]))
    network, memories = nano(), ImaginedMemories(windows, 0.5, 2)
    wanted, noise = windows.latents.clone(), torch.randn(3, 1, 8, 2, 4, 4, generator=generator)
    first, second = sampling_sigmas(2)[:2]
    for decision in range(3):
        memories.draw(network, torch.tensor([decision]), noise[decision])
        new = noise[decision]
        for sigma, step in ((first, second - first), (second, -second)):
            given = wanted[windows.rows[decision, :2]].transpose(0, 1)[None]
            times = torch.tensor([[0.0, 0.0, 1000 * sigma, 1000 * sigma]])
            with torch.no_grad():
                drawn = network(torch.cat([given, new], dim=2), times, windows.actions[decision, None])
            new = new + step * drawn[:, :, 2:]
        wanted[2 * decision + 3] = new[0, :, 1]
    torch.testing.assert_close(memories.latents, wanted)
    chosen = torch.tensor([2, 1, 1, 2])
    filled = memories.fill(windows.take(chosen)[0], chosen)
    assert torch.equal(filled[:2, :, 1], wanted[[5, 3]]), "half of them imagined"
    assert torch.equal(filled[2:], windows.take(chosen[2:])[0]), "half as recorded"
    assert torch.equal(filled[:, :, [0, 2, 3]], windows.take(chosen)[0][:, :, [0, 2, 3]])


def test_losses_take_imagined_memories_after_a_fifth_of_the_steps() -> None:
    schedule = Schedule(steps=20, batch=8, learning_rate=1.0, seed=11)
    network = nano()
    own, recorded = (
        window_losses(network, nano_windows(), schedule, torch.Generator().manual_seed(11), options, 2)
        for options in (WorldOptions(imagined_memory=1.0), WorldOptions())
    )
    losses = [(own(step).item(), recorded(step).item()) for step in range(20)]
    assert [one == other for one, other in losses[:9]] == [True] * 9
    assert any(one != other for one, other in losses[9:])


def assert_alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Up to rounding in float32; in gradients that nearly cancel, 2e-5 of their size was seen."""
    assert found.keys() == wanted.keys()
    assert wanted
    for name, tensor in wanted.items():
        assert tensor.norm() > 0, name
        assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm(), name


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_the_gradient_is_the_same_in_parts(micro_batch: int) -> None:
    assert_alike(gradients(micro_batch, "fp32", 0), gradients(0, "fp32", 0))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("ranks", "micro_batch", "lora"),
    [
        (2, 2, 0),
        (2, 2, 3),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ((2, 0, 0), (4, 1, 0), (4, 1, 3))),
    ],
)
def test_the_gradient_of_several_ranks_is_that_of_one(ranks: int, micro_batch: int, lora: int) -> None:
    wanted = gradients(0, "fp32", lora)
    for found in run_ranks(gradients_of_rank, micro_batch, "fp32", lora, ranks=ranks):
        assert_alike(found, wanted)


@pytest.mark.multiprocess
def test_in_bfloat16_the_gradient_is_that_of_float32_up_to_rounding() -> None:
    wanted = gradients(0, "fp32", 0)
    (found, _) = run_ranks(gradients_of_rank, 2, "bf16", 0)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    joined, exact = (torch.cat([g[name].flatten() for name in wanted]) for g in (found, wanted))
    assert 0 < (joined - exact).norm() < 0.05 * exact.norm()


def encoded_by_rank(data: Path) -> Latents:
    ranks = DistributedRanks(20.0)
    torch.manual_seed(0)
    vae = WanVae(VaeConfig.tiny()).eval().requires_grad_(False)
    shared = FitRanks(rank=ranks.rank, size=ranks.size, sum=ranks.sum)
    return encode_recordings(vae, load_recordings([data]), kept=CPU, ranks=shared)


@pytest.mark.multiprocess
def test_ranks_encode_a_part_each_and_have_all_latents(tmp_path: Path) -> None:
    write_recorded(tmp_path / "data", recorded_spec(32, tasks=TASKS[:3]), (9, 17, 12))
    torch.manual_seed(0)
    vae = WanVae(VaeConfig.tiny()).eval().requires_grad_(False)
    alone = encode_recordings(vae, load_recordings([tmp_path / "data"]))
    for found in run_ranks(encoded_by_rank, tmp_path / "data", ranks=2):
        assert torch.equal(found.all, alone.all)
        assert np.array_equal(found.offsets, alone.offsets)


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(folders: Path) -> dict[str, torch.Tensor]:
    """The published world after two steps with all weights, in ``folders / "fitted"``."""
    return fit(folders, folders / "fitted", "--micro-batch", "2", "--gradient-checkpointing")


def test_a_published_world_is_written_as_it_was_published(folders, fitted) -> None:
    found, out = fitted, folders / "fitted"
    before = load_file(folders / "published" / TRANSFORMER)
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in before.items()
    }
    assert list(TensorFiles(out / TRANSFORMER).names()) == list(
        TensorFiles(folders / "published" / TRANSFORMER).names()
    )
    changed = [name for name, tensor in found.items() if not torch.equal(tensor, before[name])]
    assert len(changed) > 0.9 * len(before)
    copied = ("Wan2.2_VAE.pth", "dataset/traj0.npy")
    for name in copied:
        assert (out / name).read_bytes() == (folders / "published" / name).read_bytes()
    assert not (out / ".cache").exists()
    world = load_world(out)
    assert torch.equal(world.transformer.proj_out.weight, found["head.head.weight"])
    assert world.memory == "frames", "as of a published folder"


def test_shards_stay_shards(folders: Path, fitted: dict[str, torch.Tensor], tmp_path: Path) -> None:
    source = tmp_path / "sharded"
    source.mkdir()
    (source / "Wan2.2_VAE.pth").symlink_to(folders / "published" / "Wan2.2_VAE.pth")
    files = TensorFiles(folders / "published" / TRANSFORMER)
    specs = {name: files.spec(name) for name in files.names()}
    total = sum(spec.nbytes for spec in specs.values())
    write_folder(source, specs, ((name, files.read(name)) for name in specs), shard_bytes=total // 3)
    shards = sorted(path.name for path in source.glob("*.safetensors"))
    assert len(shards) > 2
    fit(folders, tmp_path / "out", "--micro-batch", "2", refine=str(source))
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == shards
    for shard in shards:
        found = load_file(tmp_path / "out" / shard)
        assert found.keys() == load_file(source / shard).keys()
        assert all(torch.equal(tensor, fitted[name]) for name, tensor in found.items())
    load_world(tmp_path / "out")


def test_adapters_are_merged_and_also_written_alone(folders: Path, tmp_path: Path, capsys) -> None:
    found = fit(folders, tmp_path / "out", "--lora.rank", "4")
    assert "adapters of rank 4" in capsys.readouterr().out
    before = load_file(folders / "published" / TRANSFORMER)
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, before[name])}
    kinds = {name.split(".", 2)[2] for name in changed}
    attention = {f"{kind}_attn.{letter}.weight" for kind in ("self", "cross") for letter in "qkvo"}
    assert kinds == attention | {"ffn.0.weight", "ffn.2.weight"}
    adapter = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    fields = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    name = "base_model.model.blocks.1.attn1.to_q"
    delta = adapter[f"{name}.lora_B.weight"] @ adapter[f"{name}.lora_A.weight"] * fields["lora_alpha"] / 4
    merged = before["blocks.1.self_attn.q.weight"].float() + delta
    assert torch.equal(found["blocks.1.self_attn.q.weight"], merged.to(torch.bfloat16))


def test_a_world_of_our_own_keeps_its_layout_too(folders, fitted, tmp_path) -> None:
    save_world(tmp_path / "own", small_world())
    write_json(tmp_path / "own" / "note.json", {"by": "hand"})
    arguments = ["--data", str(folders / "data"), "--refine", str(tmp_path / "own"), *STEPS, "--version", "3"]
    assert cli.run("fit", ["world", *arguments, "--out", str(tmp_path / "out"), "--micro-batch", "2"]) == 0
    found, before = (load_file(tmp_path / name / "transformer.safetensors") for name in ("out", "own"))
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in before.items()}
    assert all(torch.equal(found[transformer_name(n)], t) for n, t in fitted.items())
    assert load_world(tmp_path / "out").version == 3
    assert json.loads((tmp_path / "out" / "note.json").read_text()) == {"by": "hand"}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("more", "share"),
    [((), 0.1), (("--lora.rank", "4", "--micro-batch", "1", "--gradient-checkpointing"), 0.03)],
)
def test_two_ranks_fit_what_one_does(folders: Path, tmp_path, more: tuple[str, ...], share: float) -> None:
    alone = fit(folders, tmp_path / "alone", *more)
    done = on_two_ranks(tmp_path, ["-m", "asyncrl", "fit"], flags(folders, tmp_path / "two", *more))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("velocity error") == 1, "one rank speaks"
    found = load_file(tmp_path / "two" / TRANSFORMER)
    before = load_file(folders / "published" / TRANSFORMER)
    assert found.keys() == alone.keys()
    # AdamW moves every number by as much, also one whose gradient is rounding alone: few of them may differ.
    moved, apart = (
        torch.cat([((one[name].float() - alone[name].float()).abs() > 2e-3).flatten() for name in alone])
        for one in (before, found)
    )
    assert apart.float().mean() < 2e-3
    assert moved.float().mean() > share


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_rank_that_fails_ends_the_job_with_a_sentence(folders: Path, tmp_path: Path) -> None:
    program = [str(Path(__file__).parents[1] / "support" / "failing_fit_rank.py")]
    done = on_two_ranks(tmp_path, program, flags(folders, tmp_path / "out"))
    assert done.returncode != 0
    # Behind the progress bar, where there is one.
    said = re.findall(r"asyncrl fit: (.*)", done.stderr)
    assert "The disk of rank 1 failed." in said
    assert all("rank 1 failed" in line or "another rank is gone" in line for line in said), said
    assert not (tmp_path / "out").exists()
    assert left_over(tmp_path) == []


# ---- what cannot work is said before anything is read ----------------------------------------------


def assert_refused(capsys, arguments: list[str], said: str) -> None:
    """With exit code 2 and a sentence that fits a pattern, before the recordings are read."""
    assert exit_code(arguments, "fit") == 2
    printed = capsys.readouterr()
    assert "episodes" not in printed.out
    sentence = " ".join(printed.err.replace("│", " ").split())
    assert re.search(said, sentence), sentence


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--batch", "4", "--micro-batch", "3"], "--batch is 4 for 1 ranks and --micro-batch 3"),
        (["--version", "2"], "--version is 2, but --refine .* has the published layout"),
        (["--lora.targets", "language"], "a world has no language model"),
        (
            ["--refine", "other", "--precision", "bf16"],
            "is a world of OpenSora. .* for Wan worlds only. Leave them out",
        ),
        (["--refine", ""], "torchrun started 2 ranks, but only a policy or a world of --refine"),
    ],
)
def test_what_cannot_work_is_refused(folders, tmp_path, capsys, monkeypatch, more, said) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    write_json(tmp_path / "other" / "world.json", {"kind": "opensora"})
    if more == ["--refine", ""]:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0")
    assert_refused(capsys, flags(folders, tmp_path / "out", *more), said)


def test_a_folder_that_holds_something_is_refused(folders: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "note.txt").write_text("mine")
    assert_refused(capsys, flags(folders, tmp_path), "--out .* is there already")
    assert (tmp_path / "note.txt").read_text() == "mine"


@pytest.mark.timeout(60)
def test_actions_of_another_unit_are_refused(folders: Path, tmp_path: Path) -> None:
    recordings = load_recordings([folders / "data"])
    world = WanFit.load(folders / "published", CPU)
    world.check_fine_tuning(recordings, WorldOptions())
    in_degrees = replace(recordings, actions=recordings.actions * 90)
    with pytest.raises(ConfigError, match=r"not 7 numbers between -1 and 1 .* Record them scaled"):
        world.check_fine_tuning(in_degrees, WorldOptions())
