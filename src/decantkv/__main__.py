"""`python -m decantkv`, the same as `decantkv`."""

from decantkv.cli import main

main()
