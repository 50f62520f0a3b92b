"""The command line. Exit codes: 0 done, 1 a run that failed, 2 bad input, 130 interrupted."""

from __future__ import annotations

import functools
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from rich.markup import escape

import decantkv
from decantkv.cli.console import Console

app = typer.Typer(
    name="decantkv",
    help="Keep the few cached tokens that matter: DropKV and its rivals for unmodified Hugging Face models.",
    epilog="Exit codes: 0 done, 1 a run that failed, 2 bad input, 130 interrupted.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"decantkv {decantkv.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# click's base of usage errors, which typer brings along from some version on and imports in others
UsageProblem: Any = typer.BadParameter.__mro__[2]

# a function is a command, a Typer app a group of them
COMMANDS = {
    "generate": "decantkv.cli.generate:generate",
    "condense": "decantkv.cli.documents:condense",
    "ask": "decantkv.cli.documents:ask",
    "methods": "decantkv.cli.methods:methods",
    "plan": "decantkv.lab.sizing_cli:plan",
    "doctor": "decantkv.lab.diagnosis_cli:doctor",
    "verify": "decantkv.lab.theory.cli:verify",
    "show": "decantkv.lab.show.cli:show",
    "report": "decantkv.lab.report.cli:report",
    "eval": "decantkv.lab.eval.cli:app",
    "bench": "decantkv.lab.bench.cli:app",
    "generation": "decantkv.lab.bench.generation_cli:app",
}
OTHERS = "decantkv.commands"  # the entry-point group by which other packages add commands


@functools.cache
def build() -> Any:
    """Return the command with all its subcommands, also those of other packages.

    Raises:
        ValueError: another package's command has the name of a built-in one.
    """
    added = list(entry_points(group=OTHERS))
    if taken := sorted({entry.name for entry in added} & set(COMMANDS)):
        raise ValueError(f"{OTHERS}: expected names that are free, got {', '.join(taken)}")
    for entry in (*(EntryPoint(name, where, OTHERS) for name, where in COMMANDS.items()), *added):
        command = entry.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=entry.name)
        else:
            app.command(entry.name)(command)
    return typer.main.get_command(app)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors are one line on stderr."""
    try:
        code = build().main(args=arguments, prog_name="decantkv", standalone_mode=False)
    except typer.Exit as stop:
        code = stop.exit_code
    except UsageProblem as error:
        message = error.format_message()  # empty where help was printed, since there were no arguments
        code = fail(message) if message else 0
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        code = fail(str(error))
    except Exception as error:
        code = fail(f"{_name(error)}: {error}", code=1)
    sys.exit(code if isinstance(code, int) else 0)


def _name(error: Exception) -> str:
    """Return the name of an error's class, with its module unless that is Python's own: "struct.error", not "error"."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def fail(message: str, *, code: int = 2) -> int:
    """Print one line about what went wrong."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]error:[/] {escape(' '.join(message.split()))}", markup=True)
    return code
