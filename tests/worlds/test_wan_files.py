"""The published Wan folder: true names and shapes, variants, round trips, and what cannot be read."""

import ctypes
import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from asyncrl.config.run import TrainConfig, parse
from asyncrl.config.sections import ImaginationSettings
from asyncrl.errors import CheckpointError
from asyncrl.launch.console import world_line
from asyncrl.launch.environment import build_world_model, check_environment, with_world_defaults
from asyncrl.rewards.resnet import ResNetReward, RewardConfig, RewardNetwork, open_reward, save_reward
from asyncrl.simulators.libero.tasks import INSTRUCTIONS
from asyncrl.storage.tensor_files import TensorFiles, fill
from asyncrl.worlds.wan.files import open_world, recognise_transformer
from asyncrl.worlds.wan.transformer import ActionWanTransformer, TransformerConfig, transformer_name
from asyncrl.worlds.wan.vae import VaeConfig, WanVae
from asyncrl.worlds.wan.world import WanWorld, save_world
from support.pth import write_pth
from support.published_exports import export_reward, export_world
from support.published_worlds import SMALL, SMALL_VAE, listed_shapes, small_world, sparse_safetensors
from support.worlds import cut, load_world

SMALL_REWARD = replace(RewardConfig.full(), widths=(4, 4, 8, 8))
SPATIAL, GOAL = INSTRUCTIONS["libero_spatial"], INSTRUCTIONS["libero_goal"]
MODEL = "model-00001.safetensors"
VAE = "Wan2.2_VAE.pth"
REWARD = "resnet_rm.pth"


def small_reward(tasks: tuple[str, ...] = ()) -> ResNetReward:
    torch.manual_seed(1)
    config = replace(SMALL_REWARD, tasks=tasks)
    network = RewardNetwork(config).requires_grad_(False)
    for name, tensor in network.state_dict().items():
        if name.endswith("running_mean"):
            tensor.normal_()
    return ResNetReward(network, config, rounded=True)


def write_trajectory(path: Path, task: str, *, frames: int = 1, size: int = 256) -> None:
    random = np.random.default_rng(len(path.name))
    array = np.empty(frames, dtype=object)
    for i in range(frames):
        image = random.integers(0, 256, (size, size, 3), dtype=np.uint8)
        array[i] = {"image": image, "delta_action": random.normal(size=7), "instruction": task}
    path.parent.mkdir(exist_ok=True)
    np.save(path, array, allow_pickle=True)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like RLinf-Wan-LIBERO-Spatial, small."""
    folder = tmp_path_factory.mktemp("wan") / "RLinf-Wan-LIBERO-Spatial"
    export_world(folder, small_world())
    export_reward(folder, small_reward())
    write_trajectory(folder / "dataset" / "traj0.npy", SPATIAL[3])
    write_trajectory(folder / "dataset" / "traj1.npy", SPATIAL[4], size=100)
    write_trajectory(folder / "dataset" / "traj0_kir.npy", SPATIAL[3], frames=5)
    return folder


@pytest.fixture
def copy(published: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    target = tmp_path / "world"
    target.mkdir()
    for file in published.iterdir():
        if file.is_file():
            (target / file.name).write_bytes(file.read_bytes())
    (target / "dataset").symlink_to(published / "dataset")
    return target


def sparse_pth(path: Path, shapes: dict[str, torch.Size], wrapper: str | None = None) -> None:
    with FakeTensorMode():
        state = {name: torch.empty(shape) for name, shape in shapes.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state if wrapper is None else {wrapper: state}, path)


@pytest.mark.parametrize("wrapper", [None, "model_state"])
def test_files_of_the_true_size_are_recognised_and_checked_without_reading_them(tmp_path, wrapper) -> None:
    sparse_safetensors(tmp_path / MODEL, listed_shapes("wan_action_transformer"))
    sparse_pth(tmp_path / VAE, listed_shapes("wan_vae"), wrapper)
    assert (tmp_path / MODEL).stat().st_size > 10_000_000_000
    assert (tmp_path / VAE).stat().st_size > 2_800_000_000
    files = open_world(tmp_path)
    assert (files.transformer_size, files.vae_size) == (TransformerConfig.full(), VaeConfig.full())
    assert (files.image_size, files.schedule_steps, files.dtype) == (256, 5, torch.bfloat16)
    assert files.check() == 2 * (5_025_334_464 + 704_688_668)


@pytest.mark.parametrize(("name", "count"), [("resnet_rm", 127), ("taskemb_resnet_rm", 130)])
def test_reward_files_of_the_true_size_are_told_apart_by_their_tensors(tmp_path, name, count) -> None:
    shapes = listed_shapes(name)
    assert len(shapes) == count
    sparse_pth(tmp_path / "resnet_rm.pth", shapes, "model_state_dict")  # whatever the file is called
    files = open_reward(tmp_path, [GOAL[7], GOAL[2]])[""]
    assert files.config == RewardConfig.full(GOAL if name.startswith("taskemb") else ())
    assert files.rounded
    assert ResNetReward.check(tmp_path, [GOAL[7], GOAL[2]]).nbytes > 44_700_000


def published_shapes(*, token: int = 7, vector: int = 28) -> dict[str, torch.Size]:
    """The transformer's tensors when its actions have other numbers; 0: it lacks that input."""
    shapes = {n: s for n, s in listed_shapes("wan_action_transformer").items() if not n.startswith("action_")}
    for name, inputs, inner in (("action_mlp1", token, 3072), ("action_mlp2", vector, 12288)):
        if inputs:
            sizes = {
                "0.weight": (inner, inputs),
                "0.bias": (inner,),
                "2.weight": (3072, inner),
                "2.bias": (3072,),
            }
            shapes |= {f"{name}.{part}": torch.Size(size) for part, size in sizes.items()}
    return shapes


TEXT = {
    "text_embedding.0.weight": torch.Size([3072, 4096]),
    "text_embedding.0.bias": torch.Size([3072]),
    "text_embedding.2.weight": torch.Size([3072, 3072]),
    "text_embedding.2.bias": torch.Size([3072]),
}
SCALAR = torch.Size([])
VARIANTS = [
    (published_shapes(token=0, vector=0) | TEXT, "takes no actions"),
    (published_shapes(token=0), r"modulation only \(TI2V3: no action_mlp1\)"),
    (published_shapes(vector=0) | {"action_scale1": SCALAR}, "cross-attention only"),
    (published_shapes(token=14, vector=56), "takes actions of 14 numbers"),
    (published_shapes() | {"action_scale": SCALAR}, "scales its actions by action_scale, and how is not"),
]


@pytest.mark.parametrize(("shapes", "words"), VARIANTS)
def test_variants_that_are_steered_otherwise_are_refused_by_name(tmp_path, shapes, words) -> None:
    sparse_safetensors(tmp_path / MODEL, {f"pipe.dit.{name}": shape for name, shape in shapes.items()})
    with pytest.raises(CheckpointError, match=rf"model-00001\.safetensors .*{words}.*TI2V2"):
        recognise_transformer(TensorFiles(tmp_path / MODEL, rename=transformer_name), {})


def test_a_published_world_comes_back_bit_for_bit(published: Path) -> None:
    world, loaded = small_world(), load_world(published)
    assert (loaded.transformer.size, loaded.vae.size) == (SMALL, SMALL_VAE)
    assert (loaded.image_size, loaded.schedule_steps, loaded.version) == (256, 5, 0)
    for mine, theirs in ((world.transformer, loaded.transformer), (world.vae, loaded.vae)):
        expected, found = mine.state_dict(), theirs.state_dict()
        assert expected.keys() == found.keys()
        assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
        assert all(tensor.dtype == torch.bfloat16 for tensor in found.values())
    assert not any(parameter.requires_grad for parameter in loaded.transformer.parameters())
    assert loaded.vae.decoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert load_world(published, dtype=torch.float32).transformer.proj_out.weight.dtype == torch.float32


@pytest.mark.slow
def test_a_published_world_imagines(published: Path) -> None:
    environment = build_world_model(TrainConfig(world=str(published)), torch.device("cpu"))
    first = environment.starts[:1]  # A row takes ten seconds on a CPU: the autoencoder has its full size.
    frames, state = environment.world.imagine(environment.world.start(first), torch.zeros(1, 8, 7), [1])
    assert frames.shape == (1, 8, 256, 256, 3)
    assert state.finite.all()
    scores = environment.reward.score(frames, [start.task for start in first])
    assert set(scores.unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("layout", ["prefix", "shards", "index"])
def test_prefix_shards_and_index_hold_the_same_world(published: Path, copy: Path, layout: str) -> None:
    tensors = load_file(copy / MODEL)
    names = sorted(tensors)
    (copy / MODEL).unlink()
    if layout == "prefix":
        save_file({f"pipe.dit.{name}": tensor for name, tensor in tensors.items()}, copy / MODEL)
    else:
        files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        if layout == "index":
            files = ["model-00001.safetensors", "model-00002.safetensors"]
            weight_map = {name: files[i % 2] for i, name in enumerate(names)}
            (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        for i, file in enumerate(files):
            save_file({name: tensors[name] for name in names[i::2]}, copy / file)
    expected, found = (load_world(folder).transformer.state_dict() for folder in (published, copy))
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    if layout == "shards":
        (copy / files[1]).unlink()
        with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00002\.safetensors"):
            load_world(copy)


def test_unknown_tensors_are_reported_by_name_once_all_others_are_there(copy: Path, caplog) -> None:
    tensors = load_file(copy / MODEL)
    save_file({**tensors, "old_head.bias": torch.zeros(3)}, copy / MODEL)
    load_world(copy)
    assert "holds 1 tensors the model has no use for: old_head.bias" in caplog.text
    del tensors["blocks.1.ffn.2.bias"]
    save_file({**tensors, "old_head.bias": torch.zeros(3)}, copy / MODEL)
    with pytest.raises(CheckpointError, match=r"lacks tensor blocks\.1\.ffn\.net\.2\.bias of shape \[128\]"):
        load_world(copy)


def memory(name: str) -> int:
    """Bytes: VmRSS, what this process holds; VmHWM, the most it held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def test_tensors_are_read_one_at_a_time(tmp_path: Path) -> None:
    layers, width = 24, 1024  # 96 MiB in the files, 48 MiB in the module
    tensors = {f"{i}.weight": torch.full((width, width), float(i)) for i in range(layers)}
    path = tmp_path / "a.safetensors"
    save_file(tensors, path)
    del tensors
    with torch.device("meta"):
        module = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    ctypes.CDLL(None).malloc_trim(0)  # freed memory would be used again and count for nothing
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    fill(module, TensorFiles([path]), dtype=torch.bfloat16, device="cpu")
    grown = memory("VmHWM") - before
    assert [layer.weight[0, 0].item() for layer in module] == list(range(layers))
    assert 2**20 * 30 < grown < 2**20 * 80, f"{grown / 2**20:.0f} MiB for 48 MiB of weights"


PUBLISHED_RUN = {"imagination.context": "frames", "imagination.steps": 5, "actor.max_decisions": 32}


@pytest.mark.parametrize(
    ("flags", "changed", "said"),
    [
        ([], {}, "world  steps 5, context frames, decisions 32 (published defaults)"),
        (
            ["--actor.max-decisions", "6", "--imagination.context", "latents"],
            {"actor.max_decisions": 6, "imagination.context": "latents"},
            "world  steps 5 (published defaults)  context latents, decisions 6 (as set)",
        ),
        (["--imagination.steps", "3"], {"imagination.steps": 3}, "(published defaults)  steps 3 (as set)"),
        (["--imagination.decoder", "tiny"], {"imagination.context": "latents"}, "context latents, decisions"),
    ],
)
def test_a_published_world_brings_rlinfs_values_where_no_flag_says_otherwise(
    published: Path, flags: list[str], changed: dict[str, object], said: str
) -> None:
    asked = parse(["--world", str(published), *flags])
    config, defaults = with_world_defaults(asked)
    expected = PUBLISHED_RUN | changed
    found = {name: attrgetter(name)(config) for name in ("imagination.context", "actor.max_decisions")}
    assert found == {name: expected[name] for name in found}
    assert (config.imagination.steps or defaults.steps) == expected["imagination.steps"]
    line = world_line(asked, defaults)
    assert said in line
    assert "--algorithm.temperature 1 (published recipe: 1.6)" in line
    for enough in (["--algorithm.temperature", "1.6"], ["--algorithm.kind", "ppo"]):
        assert "temperature" not in world_line(parse(["--world", str(published), *flags, *enough]), defaults)


def test_a_world_is_loaded_with_the_memory_that_its_folder_says(published: Path, tmp_path: Path) -> None:
    assert load_world(published).memory == "frames"
    assert load_world(published, settings=ImaginationSettings(context="latents")).memory == "latents"
    save_world(tmp_path, small_world())
    assert load_world(tmp_path).memory == "latents"
    config, said = with_world_defaults(TrainConfig(world=str(tmp_path)))
    assert (config.imagination.context, config.actor.max_decisions) == ("latents", 6)
    assert said.steps == small_world().schedule_steps
    shipped, said = with_world_defaults(TrainConfig())
    assert (shipped.imagination.context, shipped.actor.max_decisions) == ("latents", 6)
    assert world_line(TrainConfig(), said) == ""


def test_one_path_gives_world_reward_and_start_states(published: Path) -> None:
    found = check_environment(parse(["--world", str(published)]))
    assert found.image_size == 256
    assert [start.name for start in found.starts] == ["traj0", "traj0_kir", "traj1"]
    assert [len(start.context_frames) for start in found.starts] == [0, 4, 0]
    assert {start.frame.shape for start in found.starts} == {(256, 256, 3)}  # traj1 was 100 pixels
    world = small_world()
    modules = (world.transformer, world.vae)
    weights = sum(2 * p.numel() for module in modules for p in module.parameters())
    rewards = sum(tensor.nbytes for tensor in small_reward().network.state_dict().values())
    assert found.nbytes == weights + rewards
    plain = check_environment(parse(["--world", str(published), "--no-keyframes"]))
    assert [start.name for start in plain.starts] == ["traj0", "traj1"]


def test_the_suite_of_a_reward_model_follows_from_the_start_states(copy: Path, tmp_path: Path) -> None:
    (copy / "resnet_rm.pth").unlink()
    export_reward(copy, small_reward(SPATIAL))
    dreams = build_world_model(TrainConfig(world=str(copy)), torch.device("cpu"))
    assert dreams.reward.config.tasks == SPATIAL
    assert dreams.reward.task_ids([SPATIAL[3]]).tolist() == [3]
    others = tmp_path / "others"
    write_trajectory(others / "traj0.npy", SPATIAL[0])
    write_trajectory(others / "traj1.npy", GOAL[0])
    config = TrainConfig(world=str(copy), start_states=str(others))
    with pytest.raises(CheckpointError, match="the start states are of libero_goal and libero_spatial"):
        check_environment(config)
    write_trajectory(others / "traj1.npy", "Open the fridge")
    with pytest.raises(CheckpointError, match="'open the fridge' is an instruction of none"):
        check_environment(config)


@pytest.mark.parametrize("beside", ["nothing", "Wan's autoencoder"])
def test_opensoras_folder_is_recognised(copy: Path, beside: str) -> None:
    """It has the transformer's file under Wan's name; nobody should fetch Wan's autoencoder for it."""
    blocks = (f"{kind}_blocks.0.attn.qkv.weight" for kind in ("spatial", "temporal"))
    save_file({name: torch.zeros(3) for name in ("x_embedder.proj.weight", *blocks)}, copy / MODEL)
    if beside == "nothing":
        (copy / VAE).unlink()
    with pytest.raises(
        CheckpointError, match=r"lacks tensor action_embedder.*RLinf-OpenSora-LIBERO"
    ) as raised:
        check_environment(TrainConfig(world=str(copy)))
    assert VAE not in str(raised.value)


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (
            lambda folder: (folder / MODEL).unlink(),
            r"--world .* holds Wan2\.2_VAE\.pth, dataset, resnet_rm\.pth: no world model.*"
            r"Wan's \(no tensor patch_embedding\.weight in its \*\.safetensors",
        ),
        (lambda folder: (folder / VAE).unlink(), r"no autoencoder: .*Wan2\.2_VAE\.pth does not exist"),
        (
            lambda folder: (folder / REWARD).unlink(),
            r"no readable reward model \(looked for reward\.json, resnet_rm\.pth, taskemb",
        ),
        (
            lambda folder: (folder / "dataset").unlink(),
            r"brings no start states: .*dataset is not a folder.*--start-states",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}'),
            "has no weight_map of tensors",
        ),
        (
            lambda folder: torch.save({"model_state": Path("x")}, folder / VAE),
            r"Wan2\.2_VAE\.pth was not read: it holds no tensors by name",
        ),
        (
            lambda folder: write_pth(folder / VAE, {"conv2.weight": torch.zeros(16, 16, 1, 1, 1)}),
            "has 16 latent channels; Wan 2.2 has 48",
        ),
        (lambda folder: cut(folder / MODEL), r"model-00001\.safetensors is truncated"),
        (
            lambda folder: save_file({"layer.weight": torch.zeros(3)}, folder / MODEL),
            r"Wan's \(no tensor patch_embedding",
        ),
        (
            lambda folder: write_pth(folder / REWARD, {"fc.weight": torch.zeros(3)}),
            r"no reward model for world models: it lacks net\.0\.0\.weight",
        ),
        (
            lambda folder: write_pth(
                folder / REWARD,
                torch.load(folder / REWARD, weights_only=True) | {"net.9.weight": torch.zeros(3)},
            ),
            r"holds net\.9\.weight, which the model has no use for",
        ),
    ],
)
def test_files_that_are_missing_or_something_else_are_named(copy: Path, breaks, words: str) -> None:
    breaks(copy)
    with pytest.raises(CheckpointError, match=words):
        check_environment(TrainConfig(world=str(copy)))


def test_a_fitted_world_without_start_states_begins_at_the_shipped_ones(tmp_path: Path) -> None:
    size = TransformerConfig(heads=1, head_dim=24, layers=1, ffn_dim=8, channels=32, patch=1, freq_dim=8)
    vae = replace(VaeConfig.tiny(), base_dim=4, decoder_base_dim=4)
    save_world(tmp_path, WanWorld(ActionWanTransformer(size), WanVae(vae), image_size=64))
    reward = RewardConfig.tiny(())
    save_reward(tmp_path, ResNetReward(RewardNetwork(reward), reward))
    assert len(check_environment(TrainConfig(world=str(tmp_path))).starts) > 0
    assert open_world(tmp_path).dtype == torch.float32
