"""`python -m decantkv`, the same as `decantkv`."""

from __future__ import annotations

import signal
import sys
from typing import Any, NoReturn

from decantkv.base.extras import expect_packages


class Interrupted(KeyboardInterrupt):
    """Ctrl-C on the command line.

    A class of its own, since Python leaves by the signal itself, not by an exit code, once a plain KeyboardInterrupt
    has passed through code that was compiled from text, as dataclasses are.
    """


def command() -> None:
    """Run the command line; exit with 2 and one line where packages of the extra [cli] are missing."""
    try:
        expect_packages("the command line", "cli", "filelock", "rich", "typer")
    except ModuleNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    from decantkv.cli import main

    main()


def main() -> None:
    """Run the command line; exit with 130 after Ctrl-C, also where a library that loads made another error of it."""
    came = False

    def interrupt(*_: Any) -> NoReturn:
        nonlocal came
        came = True
        raise Interrupted

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        command()
    except BaseException:
        if came:
            sys.exit(130)
        raise


if __name__ == "__main__":
    main()
