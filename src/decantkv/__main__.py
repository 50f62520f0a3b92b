"""`python -m decantkv`, the same as `decantkv`."""

from __future__ import annotations

import signal
import sys
from typing import Any, NoReturn


class Interrupted(KeyboardInterrupt):
    """Ctrl-C on the command line.

    A class of its own, since Python leaves by the signal itself, not by an exit code, once a plain KeyboardInterrupt
    has passed through code that was compiled from text, as dataclasses are.
    """


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
        from decantkv.cli import main as command

        command()
    except BaseException:
        if came:
            sys.exit(130)
        raise


if __name__ == "__main__":
    main()
