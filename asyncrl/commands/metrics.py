"""`asyncrl metrics`: the reference page of all metrics, as Markdown."""

from asyncrl.metric_page import as_markdown


def main(arguments: list[str]) -> int:
    """Print the page; takes no arguments."""
    print(as_markdown(), end="")
    return 0
