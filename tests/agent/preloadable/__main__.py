"""Runs the Python text that it is given."""

import sys


def main(arguments: list[str]) -> None:
    exec(compile(arguments[0], "worker", "exec"), {"__name__": "worker"})


if __name__ == "__main__":
    main(sys.argv[1:])
