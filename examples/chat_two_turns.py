"""A chat of two turns on one cache: the first prompt is evicted, later turns are added.

python examples/chat_two_turns.py MODEL
"""

import sys

import torch

import decantkv
from decantkv.cache.evicting_cache import cache_argument
from decantkv.hf.loading import load

model, tokenizer = load(sys.argv[1])
notes = "The ferry leaves at nine. " * 30 + "Ada's code is 4417. " + "It rained later in the day. " * 30
questions = [notes + "What is Ada's code? Say only the number.", "Now say it again, twice."]

cache = decantkv.EvictingCache(model, method="dropkv", budget=0.3, sinks=4)
seen = torch.empty(1, 0, dtype=torch.long, device=model.device)
for question in questions:
    turn = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    new = tokenizer(turn, return_tensors="pt", add_special_tokens=False).input_ids.to(model.device)
    ids = torch.cat([seen, new], 1)  # all of the chat: generate feeds only what the cache has not seen
    with torch.no_grad():
        seen = model.generate(ids, **{cache_argument(model): cache}, max_new_tokens=16, do_sample=False)
    print("assistant:", tokenizer.decode(seen[0, ids.shape[1] :], skip_special_tokens=True))
    print(f"{seen.shape[1]} tokens said, {cache.layers[0].stored} stored, {cache.nbytes() / 1e6:.2f} MB")
print(cache.report())
