"""Packages that only some parts of the library need: each comes with one of decantkv's extras."""

from __future__ import annotations

from importlib import import_module


def expect_packages(what: str, extra: str, *packages: str) -> None:
    """Import packages; the first that is missing is named in the error, and so is the extra that installs it.

    Args:
        what: what needs the packages.
        extra: decantkv's extra that lists them.

    Raises:
        ModuleNotFoundError: a package, or something that it needs itself, is not installed.
    """
    for package in packages:
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{what}: expected the package {package} (pip install 'decantkv[{extra}]'), got: {error}",
                name=error.name,
            ) from error
