"""Worlds of an earlier version, attention by products, and states of tensors."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from asyncrl.cli import main
from asyncrl.config.sections import ImaginationSettings
from asyncrl.errors import CheckpointError
from asyncrl.launch.named_models import named_world
from asyncrl.storage import assets
from asyncrl.worlds.files import convert_world
from asyncrl.worlds.layers import attend_by_products, attend_few
from asyncrl.worlds.opensora.files import open_world as open_opensora
from asyncrl.worlds.slots import TensorState
from asyncrl.worlds.start_states import load_start_states
from asyncrl.worlds.wan.files import open_world as open_wan


def write_old(name: str, folder: Path) -> Path:
    """Write a shipped world as version 1 of the layout had it."""
    source = assets.ASSETS / name / "world"
    files = (open_wan if name == "tabletop" else open_opensora)(source)
    folder.mkdir()
    for path in source.rglob("*"):
        if path.is_file() and path.name != "config.json":
            target = "vae.safetensors" if path.parent.name == "vae" else path.name
            (folder / target).write_bytes(path.read_bytes())
    content = {
        "format": "asyncrl-world-1",
        "kind": json.loads((source / "world.json").read_text())["kind"],
        "version": 7,
        "image_size": files.image_size,
        "schedule_steps": files.schedule_steps,
        "transformer": asdict(files.transformer_size),
        "vae": {{"groups": "norm_groups"}.get(key, key): n for key, n in asdict(files.vae_size).items()},
    }
    (folder / "world.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", ["tabletop", "tabletop_opensora"])
def test_a_world_of_an_earlier_version_is_converted_and_imagines_as_before(name: str, tmp_path: Path) -> None:
    old, new = write_old(name, tmp_path / "old"), tmp_path / "new"
    with pytest.raises(CheckpointError, match=r"earlier version.*asyncrl convert"):
        load(str(old))
    assert main(["convert", str(old), str(new)]) == 0
    shipped, converted = load(name), load(str(new))
    assert (shipped.version, converted.version) == (0, 7)
    state = load_start_states(assets.ASSETS / "tabletop" / "start_states.h5")[0]
    actions = torch.linspace(-0.5, 0.5, 56).reshape(1, 8, 7)
    frames = [
        world.imagine(world.start([state], decisions=1), actions, [3])[0] for world in (shipped, converted)
    ]
    assert torch.equal(*frames)
    for path in (assets.ASSETS / name / "world").rglob("*.safetensors"):
        copied = new / path.relative_to(assets.ASSETS / name / "world")
        assert copied.read_bytes() == path.read_bytes()


def load(name: str):
    named = named_world(name)
    return named.kind.load(named.folder, torch.device("cpu"), ImaginationSettings(steps=1))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"format": "asyncrl-world-2", "kind": "wan"}, "has format 'asyncrl-world-2'"),
        ({"format": "asyncrl-world-1", "kind": "wan"}, "incomplete"),
        ({"format": "asyncrl-world-1", "kind": "dreams"}, "incomplete"),
    ],
)
def test_what_is_no_world_of_an_earlier_version_is_refused(content, words, tmp_path) -> None:
    (tmp_path / "world.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=words):
        convert_world(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


PLACES, HEADS, FRAMES, SEEN, CHANNELS = 5, 3, 8, 12, 6


def some(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(PLACES, HEADS, frames, CHANNELS) for frames in (FRAMES, SEEN, SEEN)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def causal() -> Tensor:
    return torch.ones(FRAMES, SEEN, dtype=torch.bool).tril(SEEN - FRAMES)


@pytest.mark.parametrize("visible", [None, causal()], ids=["all", "causal"])
def test_products_are_the_attention_and_have_its_gradients(visible: Tensor | None) -> None:
    by_products, fused = some(torch.float64), some(torch.float64)
    got = attend_by_products(*by_products, visible)
    wanted = functional.scaled_dot_product_attention(*fused, attn_mask=visible)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)
    weights = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(got)
    (got * weights).sum().backward()
    (wanted * weights).sum().backward()
    for own, other in zip(by_products, fused, strict=True):
        torch.testing.assert_close(own.grad, other.grad, atol=1e-12, rtol=0)


def test_half_precision_comes_out_as_it_goes_in_with_shares_that_were_not_rounded_on_the_way() -> None:
    query, key, value = (tensor.detach() for tensor in some(torch.bfloat16))
    got = attend_by_products(query, key, value, causal())
    exact = attend_by_products(query.double(), key.double(), value.double(), causal())
    assert got.dtype == torch.bfloat16
    assert (got.double() - exact).abs().max() < 0.03


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_and_a_cpu_agree() -> None:
    query, key, value = (tensor.detach() for tensor in some(torch.float32))
    on_gpu = attend_few(query.cuda(), key.cuda(), value.cuda(), causal().cuda())
    torch.testing.assert_close(on_gpu.cpu(), attend_few(query, key, value, causal()), atol=1e-5, rtol=0)


@dataclass(frozen=True, kw_only=True)
class Memory(TensorState):
    """Fields of different dtypes and shapes, and a list."""

    pictures: Tensor
    ages: Tensor
    cache: list[Tensor]


def memory(rows: int, *, first: int = 0) -> Memory:
    numbers = torch.arange(first, first + rows)
    return Memory(
        finite=numbers % 2 == 0,
        pictures=numbers[:, None, None] + torch.arange(6.0).view(1, 2, 3) / 10,
        ages=numbers.clone(),
        cache=[numbers.half().clone(), numbers[:, None].double() * torch.ones(4).double()],
    )


def assert_rows(state: Memory, numbers: list[int]) -> None:
    """Every field holds what `memory` put into the rows of these numbers."""
    all_rows = memory(20)
    for mine, source in zip(
        [state.finite, state.pictures, state.ages, *state.cache],
        [all_rows.finite, all_rows.pictures, all_rows.ages, *all_rows.cache],
        strict=True,
    ):
        assert torch.equal(mine, torch.stack([source[number] for number in numbers]))
        assert mine.dtype == source.dtype


def test_rows_are_picked_in_the_order_asked_for_and_copied() -> None:
    state = memory(4)
    picked = state.select([3, 0, 3])
    assert isinstance(picked, Memory)
    assert_rows(picked, [3, 0, 3])
    picked.pictures.fill_(-1)
    picked.cache[1].fill_(-1)
    assert_rows(state, [0, 1, 2, 3])
    assert len(state.select([])) == 0


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (0, 1, 2, 3), (0, 3, 2, 1)])
def test_rows_that_are_picked_lie_in_memory_as_before(order: tuple[int, ...]) -> None:
    usual = torch.arange(120.0).view(2, 3, 4, 5)
    inverse = [order.index(dim) for dim in range(4)]
    laid_out = usual.permute(order).contiguous().permute(inverse)
    state = replace(memory(2), pictures=laid_out)
    picked = state.select([1, 0]).pictures
    assert torch.equal(picked, usual.flip(0))
    assert picked.stride() == laid_out.stride()
    assert picked.data_ptr() != laid_out.data_ptr()
    assert state.select([0]).select([0, 0]).pictures.permute(order).is_contiguous()


def test_rows_are_written_in_place_and_the_source_stays() -> None:
    state, other = memory(4), memory(2, first=10)
    before = state.pictures
    assert state.write_rows([2, 0], other) is state
    assert_rows(state, [11, 1, 10, 3])
    assert_rows(other, [10, 11])
    assert state.pictures is before


def test_a_state_made_in_inference_mode_can_be_written_and_written_from() -> None:
    with torch.inference_mode():
        inside = memory(2)
    assert_rows(inside.write_rows([0], memory(1, first=7)), [7, 1])
    assert_rows(memory(2).write_rows([1], inside.select([1])), [0, 1])
    with torch.inference_mode():
        assert_rows(memory(2).write_rows([1], memory(1, first=5)), [0, 5])


def test_fields_that_are_no_rows_are_refused_by_name() -> None:
    state = memory(3)
    with pytest.raises(ValueError, match=r"Memory\.ages has shape \[2\], but by `finite` there are 3"):
        replace(state, ages=state.ages[:2])
    with pytest.raises(ValueError, match=r"Memory\.cache has shape \[\]"):
        replace(state, cache=[torch.tensor(1.0)])
    with pytest.raises(TypeError, match=r"Memory\.ages is a int"):
        replace(state, ages=3)
