"""transformers' own server, answering from a tenth of the cache.  python examples/served_model.py MODEL

Needs `pip install '.[serve]'` in a clone. The server is that of `transformers serve` without continuous batching.
"""

import json
import socket
import sys
import time
import urllib.request

from transformers.cli.serve import Serve

import decantkv
from decantkv.hf.loading import convert_gguf

source = str(convert_gguf(sys.argv[1])) if sys.argv[1].endswith(".gguf") else sys.argv[1]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"


def ask(path: str, **body):
    request = urllib.request.Request(f"http://{address}{path}", headers={"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, json.dumps(body).encode() if body else None, timeout=300))


server = Serve(force_model=source, host="127.0.0.1", port=int(address.rpartition(":")[2]), non_blocking=True)
try:
    (loaded,) = server._model_manager.loaded_models.values()
    while not server.server.started:
        time.sleep(0.1)
    with decantkv.attach(loaded.model, method="dropkv", budget=0.1, sinks=4) as run:
        prompt = "The weather was fine. " * 60 + "Ada's code is 4417. " + "It rained later. " * 20 + "Ada's code is"
        answer = ask("/v1/completions", prompt=prompt, max_tokens=6, temperature=0)
    print(answer["choices"][0]["text"])
    print(run.report())
finally:
    server.kill_server()
