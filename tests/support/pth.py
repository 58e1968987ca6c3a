"""Pickles: state dicts of `torch.save`, as others publish them, and one that would fill the memory."""

import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def write_pth(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors without the storages that they are views of."""
    torch.save({name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}, path)


def write_bomb(path: Path, length: int = 700_000, copies: int = 100_000) -> None:
    """Write a pickled array of 1.4 MB whose instructions encode one text of 700 kB again and again."""
    head = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    head += b" " * (63 - (len(head) + 10) % 64) + b"\n"
    again = b"h\x00h\x01h\x02\x86R"  # encode(text, "latin1")
    pickle = b"\x80\x04(c_codecs\nencode\n\x94X" + struct.pack("<I", length) + b"a" * length
    pickle += b"\x94\x8c\x06latin1\x94" + again * copies + b"t."
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + pickle)
