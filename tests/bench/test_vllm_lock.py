"""The lock that lets engines start side by side and has them timed one after the other."""

from __future__ import annotations

import fcntl
import multiprocessing
import time

import pytest

from decantkv.lab.bench.vllm_engine import holding


def test_it_is_let_go_though_a_process_forked_under_it_lives(tmp_path):
    """As an engine over several GPUs does: its workers hold the file open for as long as they live."""
    lock = tmp_path / "lock"
    with holding(str(lock), fcntl.LOCK_SH):
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        with lock.open("a") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        with lock.open("a") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert worker.is_alive()
    finally:
        worker.kill()
        worker.join()
