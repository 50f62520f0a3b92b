"""Beams and drafts on an evicted prompt: both go on from what was kept.  python examples/beam_search.py MODEL"""

import sys

import torch

import decantkv
from decantkv.hf.loading import load

model, tokenizer = load(sys.argv[1])
prompt = "The weather was fine. " * 40 + "Ada's code is 4417. " + "It rained later. " * 40 + "Ada's code is"
inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
ways = {"greedy": {}, "four beams": {"num_beams": 4}, "drafts looked up in the prompt": {"prompt_lookup_num_tokens": 4}}

with torch.no_grad(), decantkv.attach(model, method="dropkv", budget=0.2, sinks=4) as run:
    for name, options in ways.items():
        output = model.generate(**inputs, **options, max_new_tokens=6, do_sample=False)
        print(f"{name}:", tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(run.report())
