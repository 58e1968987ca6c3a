"""What stands in for one end of a link (`asyncrl.doctor.links.serve`) in tests. Light: no torch.

Each leaves its process id in the folder that the environment variable `PIDS` names.
"""

import json
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

PIDS = "ASYNCRL_TEST_PIDS"


def say(connection: Connection, **answer: object) -> None:
    (Path(os.environ[PIDS]) / str(os.getpid())).touch()
    connection.send_bytes(json.dumps(answer).encode())


def hang(connection: Connection, parent: int, device: str, plan: object) -> None:
    """Take a task and never answer."""
    say(connection, ready=True)
    time.sleep(600)


def die(connection: Connection, parent: int, device: str, plan: object) -> None:
    """Take a task and end in the middle of it."""
    say(connection, ready=True)
    connection.recv_bytes()
    sys.exit(7)


def fail(connection: Connection, parent: int, device: str, plan: object) -> None:
    """Not reach the device."""
    say(connection, problem="RuntimeError: no such device")
    time.sleep(600)
