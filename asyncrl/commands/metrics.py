"""`asyncrl metrics [--waits]`: print the reference page of all metrics, or of all waits."""

from asyncrl.errors import ConfigError
from asyncrl.observability import metrics_page, waits


def main(arguments: list[str]) -> int:
    """Print a page."""
    if arguments not in ([], ["--waits"]):
        raise ConfigError(f"the arguments are {' '.join(arguments)}. Usage: asyncrl metrics [--waits]")
    print(waits.as_markdown() if arguments else metrics_page.as_markdown(), end="")
    return 0
