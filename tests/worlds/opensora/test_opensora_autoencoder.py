"""The frame autoencoder against diffusers' own, and its names against those of the published size."""

import pytest
import torch
from torch import Tensor

from asyncrl.worlds.layers import FrameVae, FrameVaeConfig
from support.opensora import nano_vae


def frames(count: int) -> Tensor:
    return torch.rand(count, 3, 16, 24, generator=torch.Generator().manual_seed(3)) * 2 - 1


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_the_size_of_the_pieces_changes_nothing(at_once: int) -> None:
    vae, clip = nano_vae(), frames(5)
    latents = vae.encode(clip)
    drawn = vae.decode(latents)
    vae.at_once = at_once
    torch.testing.assert_close(vae.encode(clip), latents, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(vae.decode(latents), drawn, atol=1e-5, rtol=1e-5)


def test_the_published_size_has_the_published_tensors() -> None:
    with torch.device("meta"):
        vae = FrameVae(FrameVaeConfig.published())
    shapes = {name: tuple(tensor.shape) for name, tensor in vae.state_dict().items()}
    assert (len(shapes), sum(p.numel() for p in vae.parameters())) == (248, 83_653_863)
    assert shapes["encoder.conv_out.weight"] == (8, 512, 3, 3)
    assert shapes["quant_conv.weight"] == (8, 8, 1, 1)
    assert shapes["decoder.mid_block.attentions.0.to_out.0.weight"] == (512, 512)
    assert shapes["decoder.up_blocks.2.resnets.0.conv_shortcut.weight"] == (256, 512, 1, 1)
    assert vae.size.spatial == 8
