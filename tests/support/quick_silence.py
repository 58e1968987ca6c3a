"""`asyncrl train`, for which a silent actor is gone after 8 seconds, also in the processes that it starts."""

from asyncrl.replay import limiter

if __name__ in ("__main__", "__mp_main__"):  # Not when something merely looks at this file.
    limiter.HEARTBEAT_TIMEOUT = 8.0  # pyright: ignore[reportConstantRedefinition]

if __name__ == "__main__":
    from asyncrl.__main__ import start

    start("train")
