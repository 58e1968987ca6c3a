"""What torchrun runs where a rank of a fit must fail: `asyncrl fit`, and rank 1 fails at its second loss."""

import os
import sys
from typing import Any

from asyncrl import cli
from asyncrl.errors import RunError
from asyncrl.fitting import wan


def failing(window_loss: Any) -> Any:
    calls = []

    def of_window(*inputs: Any, **more: Any) -> Any:
        calls.append(inputs)
        if len(calls) == 2:
            raise RunError("The disk of rank 1 failed.")
        return window_loss(*inputs, **more)

    return of_window


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        wan.window_loss = failing(wan.window_loss)
    raise SystemExit(cli.run("fit", sys.argv[1:]))
