"""Placeholder until the merge."""
import torch
from typing import Any
Reference = Any
class FrozenReference:
    def __init__(self, policy): self.policy = policy
    def logprob(self, inputs, tokens, sampling):
        with torch.no_grad():
            return self.policy.evaluate(inputs, tokens, sampling).logprob.float()
