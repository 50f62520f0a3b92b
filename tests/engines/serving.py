"""`vllm serve` on the loopback, asked over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from tests.engines.engine_run import ENVIRONMENT

START = 240  # seconds; two cores that others use too


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    def __init__(self, port, name, logs):
        self.address, self.name, self.logs = f"http://127.0.0.1:{port}", name, logs

    def get(self, path):
        with urllib.request.urlopen(self.address + path, timeout=60) as got:
            return got.read().decode()

    def ask(self, path, **body):
        data = json.dumps({"model": self.name, **body}).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=240) as got:
            return json.load(got)

    def counters(self):
        """decantkv's own, by name, from /metrics."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith("vllm:decantkv_")]
        numbers = {line.split("{")[0].removeprefix("vllm:decantkv_"): float(line.split()[-1]) for line in lines}
        return {name: number for name, number in numbers.items() if name.endswith("_total")}

    def log(self):
        return "".join(path.read_text() for path in self.logs)


@contextlib.contextmanager
def serve(folder, logs, *options, nodes=1, environment=None):
    """A server with `vllm serve`'s options, over `nodes` nodes of this machine; ends all of its processes."""
    port, meeting = free_port(), free_port()
    env = {**os.environ, **ENVIRONMENT, **(environment or {})}
    common = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--dtype", "float32"]
    common += ["--max-model-len", "2048", "--block-size", "32", "--max-num-seqs", "4", "--enforce-eager"]
    common += ["--gpu-memory-utilization", "0.3", *options]
    started, files = [], []
    with contextlib.ExitStack() as stack:
        for rank in range(nodes):
            command = [*common, "--host", "127.0.0.1", "--port", str(port)]
            if nodes > 1:
                command += ["--nnodes", str(nodes), "--node-rank", str(rank), "--master-addr", "127.0.0.1"]
                command += ["--master-port", str(meeting), *(["--headless"] if rank else [])]
                env = {**env, "VLLM_CPU_OMP_THREADS_BIND": str(rank % (os.cpu_count() or 1))}
            files.append(logs / f"serve-{port}-{rank}.log")
            log = stack.enter_context(files[-1].open("w"))
            process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
            stack.callback(end, process)
            started.append(process)
        server = Server(port, str(folder), files)
        until = time.monotonic() + START
        while True:
            if any(process.poll() is not None for process in started):
                raise RuntimeError(server.log()[-6000:])
            if time.monotonic() > until:
                raise TimeoutError(server.log()[-6000:])
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                server.get("/health")
                break
            time.sleep(0.5)
        yield server


def end(process):
    """End a server's own process group, first politely."""
    import signal

    for how, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            break
