"""The oracle against softmax written out in Python's own numbers, and against the example worked by hand."""

import math

import pytest
import torch

from decantkv.lab.theory import oracle

WEIGHTS, VALUES = (0.50, 0.30, 0.15, 0.05), (5.0, 5.0, 15.0, 5.0)


def worked_example():
    """One row, one head: a key of log p and a query of 1 give the weights p."""
    k = torch.tensor(WEIGHTS, dtype=torch.float64).log()[None, None, :, None]
    return torch.ones(1, 1, 1, 1), k, torch.tensor(VALUES)[None, None, :, None]


def plain_output(q, k, v, *, sees, scale, softcap, sink, without):
    """A row's output from exp, sums and nothing else."""
    total = 0.0 if sink is None else math.exp(sink)
    output = [0.0] * len(v[0])
    for j in range(len(k)):
        if j in without or not sees(j):
            continue
        s = scale * sum(x * y for x, y in zip(q, k[j], strict=True))
        s = s if softcap is None else softcap * math.tanh(s / softcap)
        total += math.exp(s)
        output = [o + math.exp(s) * x for o, x in zip(output, v[j], strict=True)]
    return [o / total for o in output] if total else output


def test_the_worked_example():
    q, k, v = worked_example()
    assert oracle.attention(q, k, v, scale=1.0).item() == pytest.approx(6.5)
    cost = oracle.leave_one_out_cost(q, k, v, scale=1.0)[0, 0]
    assert cost.sqrt().tolist() == pytest.approx([1.50, 0.64, 1.50, 0.08], abs=0.005)
    assert oracle.joint_shift(q, k, v, [3, 2], scale=1.0).item() == pytest.approx(1.5)
    assert oracle.joint_shift(q, k, v, [3, 1], scale=1.0).item() == pytest.approx(0.81, abs=0.005)
    assert oracle.attention(q, k, v, scale=1.0, without=[3, 1]).item() == pytest.approx(7.31, abs=0.005)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_the_softmax_written_out(softcap, sinks, masked):
    gen = torch.Generator().manual_seed(3)
    batch, heads, num_kv_heads, window, kv_len = 2, 4, 2, 3, 7
    q = torch.randn(batch, heads, window, 5, generator=gen)
    k = torch.randn(batch, num_kv_heads, kv_len, 5, generator=gen)
    v = torch.randn(batch, num_kv_heads, kv_len, 2, generator=gen)
    sink_logits = torch.randn(heads, generator=gen) if sinks else None
    lengths = torch.tensor([7, 4])
    mask = torch.rand(batch, 1, window, kv_len, generator=gen) < 0.5 if masked else None
    got = oracle.attention(
        q,
        k,
        v,
        scale=0.7,
        lengths=lengths,
        softcap=softcap,
        sink_logits=sink_logits,
        mask=mask,
        without=[1, 5],
    )
    for b in range(batch):
        for hq in range(heads):
            for i in range(window):

                def sees(j, b=b, i=i):
                    real = j >= kv_len - lengths[b]
                    return real and (j <= kv_len - window + i if mask is None else bool(mask[b, 0, i, j]))

                sink = None if sink_logits is None else sink_logits[hq].item()
                row = q[b, hq, i].tolist(), k[b, hq // 2].tolist(), v[b, hq // 2].tolist()
                expected = plain_output(*row, sees=sees, scale=0.7, softcap=softcap, sink=sink, without={1, 5})
                assert got[b, hq, i].tolist() == pytest.approx(expected, abs=1e-12)


def test_cost_of_one_key_is_its_joint_shift_alone():
    gen = torch.Generator().manual_seed(4)
    q = torch.randn(1, 4, 2, 3, generator=gen)
    k, v = torch.randn(2, 1, 2, 6, 3, generator=gen)
    cost = oracle.leave_one_out_cost(q, k, v, scale=1.0)
    for j in range(6):
        shift = oracle.joint_shift(q, k, v, [j], scale=1.0)  # [1, 4, 2]
        assert torch.allclose(cost[0, :, j], shift.square().view(2, 2, 2).sum((-1, -2)) / 2)


def test_a_row_left_without_keys_has_output_zero():
    q, k = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2)
    v = torch.tensor([[[[3.0, 4.0]]]])
    assert oracle.attention(q, k, v, scale=1.0, without=[0]).abs().max() == 0
    assert oracle.leave_one_out_cost(q, k, v, scale=1.0).item() == 25.0
    gone = torch.ones(1, 1, 1, dtype=torch.bool)
    assert oracle.joint_shift(q, k, v, gone, scale=1.0, sink_logits=torch.full((1,), 2.0)).item() == 2.5
