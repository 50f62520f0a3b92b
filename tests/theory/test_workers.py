"""Workers: what they inherit, what they are handed, how much waits for them, and what becomes of errors."""

import multiprocessing
import os
import time
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from decantkv.lab.processes import Workers
from decantkv.lab.theory.measure import Plan
from decantkv.lab.theory.workers import ENVIRONMENT, Task, hand_over, records_of, tasks_of
from decantkv.methods import resolve
from decantkv.scoring.window import make_window

METHOD = resolve("dropkv")
PLAN = Plan(pool_sizes=(8,), search_size=8, ks=(2,), search_rows=1, n_keep=20, seed=0)


def window(tokens=60, kv_heads=2, group=2, seed=0):
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(1, kv_heads * group, 8, 16, generator=gen)
    k, v = (torch.randn(1, kv_heads, tokens, 16, generator=gen).bfloat16() for _ in range(2))
    sinks = torch.randn(kv_heads * group, generator=gen)
    return make_window(
        q.bfloat16(), k, v, lengths=torch.tensor([tokens - 3]), sink_logits=sinks, softcap=30.0, layer_idx=4
    )


def workers(count, collect=lambda place, records: None):
    return Workers([ENVIRONMENT] * count, collect=collect)


def test_a_packed_head_is_that_head_and_no_more():
    for task in tasks_of(window(tokens=2000), METHOD):
        data = task.pack()
        assert len(data) < 1.2 * 2000 * (16 * 2 * 2 + 4)  # one head's keys, values and scores
        again = Task.unpack(task.place, data)
        assert torch.equal(again.scores, task.scores)
        for field in fields(task.win):
            sent, got = getattr(task.win, field.name), getattr(again.win, field.name)
            assert torch.equal(sent, got) if isinstance(sent, Tensor) else sent == got


def test_heads_come_back_as_measured_here():
    found = {}
    with workers(2, found.__setitem__) as pool:
        tasks = list(tasks_of(window(), METHOD))
        for task in tasks:
            hand_over(pool, task, METHOD, PLAN)
    assert found == {task.place: records_of(task, METHOD, PLAN) for task in tasks}


def test_no_more_heads_are_held_than_there_are_processes():
    held = []
    with workers(2, lambda place, records: held.append(pool.running)) as pool:
        for task in tasks_of(window(kv_heads=5), METHOD):
            hand_over(pool, task, METHOD, PLAN)
            assert pool.running <= 2
    assert len(held) == 5


def test_a_workers_error_is_raised_and_ends_the_pool():
    task = next(tasks_of(window(), METHOD))
    start = time.monotonic()
    with pytest.raises(ValueError, match="finite"), workers(1) as pool:
        hand_over(pool, replace(task, win=replace(task.win, v=task.win.v * torch.nan)), METHOD, PLAN)
    with pytest.raises(RuntimeError, match="KeyError: 'nothing'"), workers(2) as pool:
        pool.take(0, {}.__getitem__, "nothing")
    assert time.monotonic() - start < 60
    assert not multiprocessing.active_children()


def stopped(pool):
    pool.take(0, time.sleep, 60)
    raise KeyboardInterrupt


def test_a_worker_that_dies_and_a_parent_that_stops_leave_no_process():
    with pytest.raises(RuntimeError, match="one ended with exit code 3"), workers(2) as pool:
        pool.take(0, os._exit, 3)
    with pytest.raises(KeyboardInterrupt), workers(2) as pool:
        stopped(pool)
    assert not multiprocessing.active_children()


def test_workers_see_no_gpu_and_use_one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    seen = {}
    with workers(1, seen.__setitem__) as pool:
        for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
            pool.take(name, os.getenv, name)
        pool.take("devices", torch.cuda.device_count)
    assert seen == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "devices": 0}
    assert os.environ["OMP_NUM_THREADS"] == "7"
