"""Scores and kept tokens from bare tensors, as a serving engine would ask for them; no transformers involved."""

import torch

import decantkv

batch, num_heads, num_kv_heads, kv_len, window, head_dim = 2, 8, 2, 1024, 8, 64
torch.manual_seed(0)
q_window = torch.randn(batch, num_heads, window, head_dim)  # the last queries, after norms and RoPE
k = torch.randn(batch, num_kv_heads, kv_len, head_dim)  # never repeated
v = torch.randn(batch, num_kv_heads, kv_len, head_dim)
lengths = torch.tensor([1024, 700])  # the second row has 324 pads on the left

scores = decantkv.score(q_window, k, v, method="dropkv", lengths=lengths)  # [B, H, N] float32, higher = keep
kept = decantkv.select(
    scores, n_keep=[102, 70], window=8, pool="max", kernel_size=11, sinks=4, lengths=lengths, allocation="shared"
)
print(kept.indices.shape, kept.counts.tolist())
print("row 1 keeps", kept.indices[1, 0][kept.valid()[1, 0]].tolist()[:6], "...")
