"""Answer from a long prompt with a tenth of its cache.  python examples/generate.py MODEL [FILE]"""

import sys
from pathlib import Path

import torch

import decantkv
from decantkv.hf.loading import chat_prompt, load

model, tokenizer = load(sys.argv[1])
text = Path(sys.argv[2]).read_text(encoding="utf-8") if len(sys.argv) > 2 else "All work and no play. " * 200
prompt, templated = chat_prompt(tokenizer, text + "\n\nWhat is this text about?")
inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not templated).to(model.device)

with torch.no_grad(), decantkv.attach(model, method="dropkv", budget=0.1) as run:
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)

print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(run.report())
