"""EVAC's autoencoder: its published names, and its numbers against latent diffusion's equations."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from asyncrl.worlds.evac.files import published_state
from asyncrl.worlds.layers import FrameVae, FrameVaeConfig
from support.evac import SCALE, randomised

TINY = FrameVaeConfig(widths=(8, 16, 16), layers_per_block=2, groups=4, scale=SCALE)


class Slow:
    """The equations by published names."""

    def __init__(self, weights: dict[str, Tensor], size: FrameVaeConfig) -> None:
        self.w, self.size = weights, size

    def conv(self, x: Tensor, name: str, *, stride: int = 1, padding: int = 1) -> Tensor:
        weight, bias = self.w[name + ".weight"], self.w[name + ".bias"]
        padding = 0 if weight.shape[-1] == 1 else padding
        return functional.conv2d(x, weight, bias, stride=stride, padding=padding)

    def norm(self, x: Tensor, name: str) -> Tensor:
        parts = x.view(len(x), self.size.groups, -1)
        spread = (parts.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
        normed = ((parts - parts.mean(-1, keepdim=True)) / spread).view_as(x)
        return normed * self.w[name + ".weight"].view(-1, 1, 1) + self.w[name + ".bias"].view(-1, 1, 1)

    def swish(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def res(self, x: Tensor, name: str) -> Tensor:
        y = self.conv(self.swish(self.norm(x, name + ".norm1")), name + ".conv1")
        y = self.conv(self.swish(self.norm(y, name + ".norm2")), name + ".conv2")
        return y + (self.conv(x, name + ".nin_shortcut") if name + ".nin_shortcut.weight" in self.w else x)

    def attend(self, x: Tensor, name: str) -> Tensor:
        y = self.norm(x, name + ".norm")
        q, k, v = (self.conv(y, f"{name}.{part}").flatten(2) for part in "qkv")
        share = (q.transpose(1, 2) @ k / math.sqrt(q.shape[1])).softmax(-1)
        return x + self.conv((v @ share.transpose(1, 2)).view_as(x), name + ".proj_out")

    def middle(self, x: Tensor, side: str) -> Tensor:
        x = self.attend(self.res(x, f"{side}.mid.block_1"), f"{side}.mid.attn_1")
        return self.res(x, f"{side}.mid.block_2")

    def encode(self, pictures: Tensor) -> Tensor:
        x = self.conv(pictures, "encoder.conv_in")
        levels = len(self.size.widths)
        for level in range(levels):
            for number in range(self.size.layers_per_block):
                x = self.res(x, f"encoder.down.{level}.block.{number}")
            if level + 1 < levels:
                x = functional.pad(x, (0, 1, 0, 1))  # to the right and below only
                x = self.conv(x, f"encoder.down.{level}.downsample.conv", stride=2, padding=0)
        x = self.swish(self.norm(self.middle(x, "encoder"), "encoder.norm_out"))
        return self.conv(self.conv(x, "encoder.conv_out"), "quant_conv")[:, : self.size.channels] * 0.18215

    def decode(self, latents: Tensor) -> Tensor:
        x = self.middle(
            self.conv(self.conv(latents / 0.18215, "post_quant_conv"), "decoder.conv_in"), "decoder"
        )
        for level in reversed(range(len(self.size.widths))):
            for number in range(self.size.layers_per_block + 1):
                x = self.res(x, f"decoder.up.{level}.block.{number}")
            if level:
                x = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
                x = self.conv(x, f"decoder.up.{level}.upsample.conv")
        return self.conv(self.swish(self.norm(x, "decoder.norm_out")), "decoder.conv_out")


def tiny() -> Any:
    return randomised(FrameVae(TINY, channels_last=False), 1)


def test_encoding_and_decoding_follow_the_equations() -> None:
    network = tiny()
    slow = Slow(published_state("autoencoder", network.state_dict(), 3), TINY)
    generator = torch.Generator().manual_seed(0)
    pictures = (torch.rand(2, 3, 16, 16, generator=generator) * 2 - 1).requires_grad_()
    latents = torch.randn(2, 4, 4, 4, generator=generator).requires_grad_()
    coded, expected = network.encode(pictures), slow.encode(pictures)
    torch.testing.assert_close(coded, expected, atol=1e-5, rtol=1e-5)
    drawn, wanted = network.decode(latents), slow.decode(latents)
    torch.testing.assert_close(drawn, wanted, atol=1e-5, rtol=1e-5)
    for mine, theirs, leaf in ((coded, expected, pictures), (drawn, wanted, latents)):
        direction = torch.randn(mine.shape, generator=generator)
        gradients = [torch.autograd.grad((y * direction).sum(), leaf)[0] for y in (mine, theirs)]
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-3)
