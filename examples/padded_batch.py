"""Prompts of unequal length in one batch: every row keeps its own share.  python examples/padded_batch.py MODEL"""

import sys

import torch

import decantkv
from decantkv.hf.loading import load

model, tokenizer = load(sys.argv[1])
tokenizer.padding_side = "left"
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
codes = {"Ada": "4417", "Grace": "7392"}
prompts = [
    "The weather was fine. " * n + f"{name}'s code is {code}. " + "It rained later. " * n + f"{name}'s code is"
    for (name, code), n in zip(codes.items(), (20, 60), strict=True)
]
batch = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)

with torch.no_grad(), decantkv.attach(model, method="dropkv", budget=0.3, sinks=4) as run:
    output = model.generate(**batch, max_new_tokens=6, do_sample=False)

for row in output[:, batch["input_ids"].shape[1] :]:
    print(tokenizer.decode(row, skip_special_tokens=True))
print(run.report())
