"""`asyncrl doctor`: check this machine."""

from asyncrl.doctor import doctor


def main(arguments: list[str]) -> int:
    """Print what works and what is missing; exit code 1 when training cannot run."""
    if arguments:
        print("usage: asyncrl doctor\n\nChecks versions, devices, OpenGL, sockets and the shipped files.")
        return 0 if arguments[0] in ("-h", "--help") else 2
    return doctor()
