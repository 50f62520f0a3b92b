"""Processes that work for another one: the calls they run, what they inherit, and their end when it is gone."""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

# spawned, because a forked process must not use torch after its parent has used a GPU
SPAWN = multiprocessing.get_context("spawn")
_parent: list[Connection] = []  # in a worker: where its results and messages go


class Workers:
    """Processes that run calls for this one, each one call at a time and in an environment of its own.

    An error inside a call is raised here: a ValueError as itself, any other with its traceback as a RuntimeError. Then,
    and when the block of `with` is left by an error, the processes are ended. They also end when this process is gone.

    Args:
        environments: the variables that each process starts with, beside this one's; one mapping per process.
        collect: gets the key and the result of every call that is done.
        hear: gets what a call passes to `tell`.
        shared: locks and values of `SPAWN`, which only a starting process can be given; passed behind a call's own
            arguments.
    """

    def __init__(
        self,
        environments: Sequence[Mapping[str, str]],
        *,
        collect: Callable[[Any, Any], None],
        hear: Callable[[Any], None] = lambda message: None,
        shared: tuple[Any, ...] = (),
    ) -> None:
        self._collect, self._hear = collect, hear
        self._processes: dict[Connection, BaseProcess] = {}
        self._keys: dict[Connection, Any] = {}  # of the calls that run
        try:
            for values in environments:
                ours, theirs = SPAWN.Pipe()
                process = SPAWN.Process(target=_serve, args=(theirs, shared), daemon=True)
                with environment(values):
                    process.start()
                theirs.close()
                self._processes[ours] = process
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._wait(0)
        finally:
            self._end()

    @property
    def running(self) -> int:
        """Number of calls that are not done."""
        return len(self._keys)

    def take(self, key: Any, call: Callable[..., Any], *arguments: Any) -> None:
        """Have a call run by the first process that is free; wait until one is."""
        self._wait(len(self._processes) - 1)
        free = next(connection for connection in self._processes if connection not in self._keys)
        self._keys[free] = key
        free.send((call, arguments))

    def _wait(self, most: int) -> None:
        """Collect results until at most that many calls run."""
        while len(self._keys) > most:
            for connection in wait(list(self._keys)):
                assert isinstance(connection, Connection)
                self._receive(connection)

    def _receive(self, connection: Connection) -> None:
        try:
            kind, said = connection.recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[connection]
            process.join()
            raise RuntimeError(f"workers: one ended with exit code {process.exitcode}") from None
        if kind == "message":
            self._hear(said)
        elif kind == "result":
            self._collect(self._keys.pop(connection), said)
        else:
            raise ValueError(said) if kind == "input" else RuntimeError(f"workers: one failed\n{said}")

    def _end(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for connection, process in self._processes.items():
            process.join()
            connection.close()


def tell(message: Any) -> None:
    """Send a message to the process that this worker works for."""
    _parent[0].send(("message", message))


def _serve(connection: Connection, shared: tuple[Any, ...]) -> None:
    """A worker's life: run what comes until it is ended."""
    end_with_parent()
    _parent.append(connection)
    while True:
        try:
            call, arguments = connection.recv()
        except EOFError:  # the parent is gone
            return
        try:
            connection.send(("result", call(*arguments, *shared)))
        except ValueError as error:
            connection.send(("input", str(error)))
        except BaseException:
            connection.send(("error", traceback.format_exc()))


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that start inside the block; libraries read them once, at start."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def end_with_parent() -> None:
    """Have this process end when its parent is gone, however it went.

    Raises:
        RuntimeError: it was not started by another process.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("workers: expected to be started by another process, got none")

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
