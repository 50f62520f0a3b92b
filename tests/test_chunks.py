"""Attention of a prompt's chunk, however torch's fused attention has to be asked for it."""

from __future__ import annotations

import pytest
import torch

from decantkv.hf import chunked_attention


@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1025, 4096, 5000, 131072, 123456])
def test_older_keys_are_cut_without_a_gap_into_few_sizes(length):
    parts = chunked_attention.older_parts(length)
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts)][: len(parts)]
    assert (parts[-1][1] if parts else 0) == length
    sizes = [stop - start for start, stop in parts]
    assert all(size < chunked_attention.LEAST_PART for size in sizes[-1:] if size & (size - 1))
    assert all(size & (size - 1) == 0 and size >= chunked_attention.LEAST_PART for size in sizes[:-1])
    assert len(set(sizes)) == len(sizes)


def logits(q, k, scale):
    """[B, HQ, q, N] float64, −inf where a key is not seen."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return (q.double() @ k.mT * scale).masked_fill(~seen, -torch.inf)


def exact(q, k, v, scale):
    """[B, HQ, q, Dv] float64."""
    return logits(q, k, scale).softmax(-1) @ v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)


def exact_lse(q, k, scale):
    """[B, HQ, q] float64."""
    return logits(q, k, scale).logsumexp(-1)


def tensors(new, kv_len, device, dtype):
    g = torch.Generator().manual_seed(kv_len)
    shapes = ((1, 8, new, 64), (1, 2, kv_len, 64), (1, 2, kv_len, 64))
    return [torch.randn(shape, generator=g).to(device, dtype) for shape in shapes]


def test_parts_joined_by_their_denominators_are_the_whole(monkeypatch):
    """The arithmetic of joining, with float64 in place of the fused ops."""

    def op(q, k, v, *, causal, scale):
        s = q @ k.repeat_interleave(4, 1).mT * scale
        if causal:
            s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        return (s.softmax(-1) @ v.repeat_interleave(4, 1)).float(), s.logsumexp(-1).float()

    monkeypatch.setattr(chunked_attention, "LEAST_PART", 16)
    monkeypatch.setattr(chunked_attention, "cudnn", op)
    monkeypatch.setattr(chunked_attention, "flash", op)
    q, k, v = tensors(20, 20 + 16 + 32 + 5, "cpu", torch.float64)
    out, lse = chunked_attention._in_parts(q, k, v, scale=0.2)
    torch.testing.assert_close(out.double(), exact(q, k, v, 0.2), rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse(q, k, 0.2), rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("new", "kv_len"), [(1024, 1024), (2048, 2048 + 4096), (1500, 9000), (1024, 1024 + 300)])
def test_on_a_gpu_a_chunk_attends_as_the_definition_says(new, kv_len):
    q, k, v = tensors(new, kv_len, "cuda", torch.bfloat16)
    if kv_len > new:
        assert chunked_attention._cudnn_attends(q, k[:, :, -new:], v[:, :, -new:], scale=0.2), (
            "torch prefers another op here"
        )
    got, lse = chunked_attention.attend_chunk(q, k, v, held=[kv_len], scale=0.2)
    torch.testing.assert_close(got.double(), exact(q, k, v, 0.2), rtol=0, atol=0.02)
    assert (lse is None) == (kv_len == new)
    if lse is not None:
        torch.testing.assert_close(lse.double(), exact_lse(q, k, 0.2), rtol=0, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_len", [32_700, 64_933, 131_000])
@pytest.mark.parametrize("new", [1, 41, 100, 1023])
def test_on_a_gpu_a_short_chunk_far_into_a_prompt_attends_as_the_definition_says(new, kv_len):
    g = torch.Generator(device="cuda").manual_seed(kv_len)
    shapes = ((1, 12, new, 128), (1, 2, kv_len, 128), (1, 2, kv_len, 128))
    q, k, v = (torch.randn(shape, generator=g, device="cuda").to(torch.bfloat16) for shape in shapes)
    q[..., 0] = k[:, :, kv_len // 3, 0] = 12.0  # one key far back is seen by all, among many that matter little
    got = chunked_attention.attend_chunk(q, k, v, held=[kv_len], scale=128**-0.5)[0].double()
    for rows in range(0, new, 128):
        here = slice(rows, rows + 128)
        seen = kv_len - new + min(rows + 128, new)
        wanted = exact(q[:, :, here], k[:, :, :seen], v[:, :, :seen], 128**-0.5)
        assert float((got[:, :, here] - wanted).norm() / wanted.norm()) < 0.01
