"""Every causal architecture of transformers, tiny and random, against the judge; `make sweep`."""
