"""Parts of a chat that are always kept: places by the chat template, in batches, in chunks, on the command line."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import decantkv
from decantkv import Chat
from decantkv.base.chat import added_spans
from decantkv.cli import main
from tests.support import tiny

# tools stand inside the system turn, which is written even without a system message
INSIDE = (
    "{{ '<s> <sys> ' }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}{{ 'default' }}"
    "{% endif %}{% if tools %}{{ ' <tools> ' }}{% for t in tools %}{{ t.function.name + ' ' }}{% endfor %}"
    "{{ '</tools>' }}{% endif %}{{ ' <end> ' }}{% for m in messages if m.role != 'system' %}"
    "{{ '<' + m.role + '> ' + m.content + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bot> ' }}{% endif %}"
)
# a system message is a turn like any other, tools stand in front of the last one, and a line says that there are some
TURNS = (
    "{{ '<s> ' }}{% if tools %}{{ 'with ' }}{% endif %}{% for m in messages %}{% if loop.last and tools %}"
    "{{ '<tools> ' }}{% for t in tools %}{{ t.function.name + ' ' }}{% endfor %}{{ '</tools> ' }}{% endif %}"
    "{{ '<turn> ' + m.role + ' ' + m.content + ' <end> ' }}{% endfor %}"
)
# there is no system role: its text opens the first user turn
FOLDED = (
    "{% set first = messages[0].content + ' ' if messages[0].role == 'system' else '' %}{{ '<s> ' }}"
    "{% for m in messages if m.role != 'system' %}{{ '<turn> ' + m.role + ' ' + (first if loop.first else '') "
    "+ m.content + ' <end> ' }}{% endfor %}"
)
REFUSING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ m.role + ' ' + m.content + ' ' }}{% endfor %}"
)
DEAF = "{% for m in messages if m.role != 'system' %}{{ m.role + ' ' + m.content + ' ' }}{% endfor %}"
WORDS = [
    "<pad>", "[UNK]", "<s>", "<sys>", "default", "<tools>", "</tools>", "<end>", "<user>", "<assistant>", "<bot>",
    "<turn>", "system", "user", "assistant", "with", "find", "send",
]  # fmt: skip
WORDS += [f"w{i}" for i in range(tiny.VOCABULARY - len(WORDS))]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("find", "send")]


def tokenizer(template):
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="<pad>", padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    made.chat_template = template
    return made


def said(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{int(i)}" for i in torch.randint(0, 150, (count,), generator=generator))


def chat(template, *, system="w1 w2 w3", user="w7 w8 w9", tools=TOOLS, turns=(), **options):
    messages = [{"role": "system", "content": system}] if system else []
    messages += [*turns, {"role": "user", "content": user}]
    return Chat(tokenizer(template), messages, tools, **options)


def words(chat, role):
    return [" ".join(WORDS[i] for i in chat.ids[start:stop]) for start, stop in chat.spans(role)]


@pytest.mark.parametrize(
    ("template", "system", "tools"),
    [
        (INSIDE, ["w1 w2 w3"], ["<tools> find send </tools>"]),
        (TURNS, ["<turn> system w1 w2 w3 <end>"], ["with", "<tools> find send </tools>"]),
        (FOLDED, ["w1 w2 w3"], None),
    ],
    ids=["inside", "turns", "folded"],
)
def test_parts_are_what_the_template_writes_for_them(template, system, tools):
    made = chat(template)
    assert words(made, "system") == system
    if tools is None:
        with pytest.raises(ValueError, match="a chat template that writes tools, got one that leaves it out"):
            made.spans("tools")
    else:
        assert words(made, "tools") == tools
        turns = ({"role": "user", "content": "w1 w2 w3"}, {"role": "assistant", "content": "find send"})
        assert words(chat(template, user="w1 w2 w3", turns=turns), "tools") == tools


def test_a_users_text_that_repeats_the_system_message_is_not_taken_for_it():
    made = chat(TURNS, user="w1 w2 w3", tools=None)
    assert made.spans("system") == ((1, 7),)
    made = chat(INSIDE, user="<tools> find send </tools>")
    assert made.spans("tools") == ((5, 9),)


def test_spans_that_were_added_are_found_anywhere():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        shorter = torch.randint(0, 9, (12,), generator=generator).tolist()
        at, count = (int(x) for x in torch.randint(0, 12, (2,), generator=generator))
        new = [100 + i for i in range(count)]
        longer = shorter[:at] + new + shorter[at:]
        assert added_spans(longer, shorter) == (((at, at + count),) if count else ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protect": ("system",)}, "chat: expected the prompt as a decantkv.Chat beside protect='system'"),
        ({"protect": ("system",), "chat": []}, "chat: expected the prompt as a decantkv.Chat"),
        ({"chat": chat(INSIDE)}, "protect: expected 'system' or 'tools' beside chat, got neither"),
        ({"protect": ("system",), "chat": chat(INSIDE, system="")}, "a chat with a system message beside 'system'"),
        ({"protect": ("tools",), "chat": chat(INSIDE, tools=None)}, "a chat with tools beside 'tools', got one"),
        ({"protect": ("system",), "chat": chat(REFUSING)}, "got an error: System role not supported"),
        ({"protect": ("system",), "chat": chat(DEAF)}, "that writes a system message, got one that leaves it out"),
        ({"protect": ("tools",), "chat": chat(None)}, "a tokenizer with a chat template, got a"),
        ({"protect": ("system",), "chat": Chat(tokenizer(TURNS), [{"role": "system", "content": "w1"}])},
         "a chat template that also renders without a system message: chat: expected"),
        ({"protect": ("system",), "chat": [chat(TURNS), chat(TURNS, system="w1")], "every": 8},
         "every: expected none beside chats that protect different places"),
    ],
)  # fmt: skip
def test_what_cannot_be_found_is_refused_at_the_door(options, message):
    with pytest.raises(ValueError, match=message):
        decantkv.attach(tiny.llama(), budget=0.5, **options)
    with pytest.raises(ValueError, match=message):
        decantkv.EvictingCache(tiny.llama(), budget=0.5, **options)


def test_a_chat_is_a_chat_and_a_role_a_role():
    with pytest.raises(TypeError, match=r"protect: expected .start, stop. pairs, or system or tools, got 'assistant'"):
        decantkv.attach(tiny.llama(), budget=0.5, protect=("assistant",), chat=chat(INSIDE))
    with pytest.raises(TypeError, match=r"chat: expected a decantkv\.Chat or a list of them, got list"):
        decantkv.attach(tiny.llama(), budget=0.5, protect=("system",), chat=[[{"role": "system", "content": "w1"}]])


def batch():
    """Two chats of unlike lengths whose system messages differ in length, and the prompt of both."""
    pair = [
        chat(TURNS, system=said(9, 1), user=said(150, 2)),
        chat(TURNS, system=said(21, 3), user=said(90, 4)),
    ]
    return pair, tiny.left_padded([torch.tensor([one.ids]) for one in pair])


def kept_of(cache, row, pads):
    """For every layer and head, the positions kept of a row, counted from its first real token."""
    for layer in cache.layers:
        for head in range(layer.kept.counts.shape[1]):
            found = layer.kept.indices[row, head]
            yield set((found[found >= 0] - pads).tolist())


@pytest.mark.parametrize("roles", [("system",), ("tools",), ("system", "tools")])
@pytest.mark.parametrize("allocation", ["uniform", "ada", "layer", "shared"])
def test_a_padded_batch_keeps_each_rows_own_parts(roles, allocation):
    model, (pair, inputs) = tiny.llama(), batch()
    given = {"budget": 0.3, "allocation": allocation, "protect": roles}
    caches = []
    for chats, one in [(pair, inputs), *(([c], {"input_ids": torch.tensor([c.ids])}) for c in pair)]:
        cache = decantkv.EvictingCache(model, chat=chats, **given)
        model.generate(**one, max_new_tokens=2, do_sample=False, **{decantkv.cache_argument(model): cache})
        caches.append(cache)
    for row, one in enumerate(pair):
        wanted = {i for role in roles for start, stop in one.spans(role) for i in range(start, stop)}
        together = list(kept_of(caches[0], row, inputs["input_ids"].shape[1] - len(one.ids)))
        assert all(wanted <= found for found in together)
        if allocation != "layer":  # padding leaves rounding alone different, which may turn a tie between layers
            assert together == list(kept_of(caches[row + 1], 0, 0))
    bare = decantkv.EvictingCache(model, budget=0.3, allocation=allocation)
    model.generate(**inputs, max_new_tokens=2, do_sample=False, **{decantkv.cache_argument(model): bare})
    wanted = {i for role in roles for start, stop in pair[1].spans(role) for i in range(start, stop)}
    assert not all(wanted <= found for found in kept_of(bare, 1, inputs["input_ids"].shape[1] - len(pair[1].ids)))


@pytest.mark.parametrize("how", ["generate", "beams", "chunks", "bare", "deferred", "rehearsal"])
@torch.no_grad()
def test_attach_finds_the_chat_however_the_prompt_is_read(how):
    model, one = tiny.llama(), chat(INSIDE, system=said(12, 1), user=said(150, 2))
    ids = torch.tensor([one.ids])
    options = {"prefill_chunk": 40} if how == "chunks" else {"rehearsal": "replay"} if how == "rehearsal" else {}
    with decantkv.attach(model, budget=0.3, protect=("tools", "system"), chat=one, **options) as run:
        if how in ("bare", "rehearsal"):
            cache = model(ids, use_cache=True)[decantkv.cache_argument(model)]
        elif how == "deferred":
            cache = run.new_cache()
            with decantkv.deferred(cache):
                for part in ids.split(50, 1):
                    model(part, use_cache=True, **{decantkv.cache_argument(model): cache})
        else:
            beams = {"num_beams": 3} if how == "beams" else {}
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False,
                return_dict_in_generate=True, **beams,
            )  # fmt: skip
            cache = output[decantkv.cache_argument(model)]
    wanted = {i for role in ("system", "tools") for start, stop in one.spans(role) for i in range(start, stop)}
    assert len(wanted) == 16
    assert all(wanted <= found for found in kept_of(cache, 0, 0))
    assert run.recorder.settings["protect"][-2:] == ["tools", "system"]


def test_another_prompt_is_refused_and_leaves_the_run_as_it_was():
    model, one = tiny.llama(), chat(TURNS, system=said(12, 1), user=said(90, 2))
    ids = torch.tensor([one.ids])
    with decantkv.attach(model, budget=0.3, protect=("system",), chat=one), torch.no_grad():
        other = torch.cat([ids[:, :1], ids], 1)  # a second beginning-of-text token
        with pytest.raises(
            ValueError, match=r"chat: expected a prompt that begins with a chat .* differs from each af"
        ):
            model(other, use_cache=True)
        with pytest.raises(ValueError, match="chat: expected a prompt that comes as input_ids, got embeddings"):
            model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=True)
        longer = torch.cat([ids, ids[:, 5:9]], 1)  # an answer that has begun
        cache = model(longer, use_cache=True)[decantkv.cache_argument(model)]
    assert all(set(range(*one.spans("system")[0])) <= found for found in kept_of(cache, 0, 0))


def test_rounds_of_an_answer_keep_the_parts_that_all_chats_share():
    model, one = tiny.llama(), chat(TURNS, system=said(12, 1), user=said(90, 2))
    twin = chat(TURNS, system=said(12, 5), user=said(90, 6))
    inputs = tiny.left_padded([torch.tensor([x.ids]) for x in (one, twin)])
    cache = decantkv.EvictingCache(model, budget=30, every=8, protect=("system",), chat=[one, twin])
    model.generate(**inputs, max_new_tokens=20, do_sample=False, **{decantkv.cache_argument(model): cache})
    assert cache.recorder.report().rounds
    for row in range(2):
        assert all(set(range(*one.spans("system")[0])) <= found for found in kept_of(cache, row, 0))


def test_the_command_line_protects_parts_of_its_chat(capsys, tmp_path):
    folder = tmp_path / "model"
    tiny.llama().save_pretrained(folder)
    tokenizer(INSIDE).save_pretrained(folder)
    (tmp_path / "prompt.txt").write_text(said(150, 2))
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    given = ["generate", "--model", folder, "--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", "3", "--json"]

    def run(*extra):
        with pytest.raises(SystemExit) as stop:
            main([str(x) for x in (*given, *extra)])
        return stop.value.code, *capsys.readouterr()

    parts = ["--protect", "system", "--protect", "tools", "--tools", tmp_path / "tools.json", "--system", said(20, 1)]
    code, out, err = run("--budget", "0.05", *parts)
    assert code == 0, err
    (layer, *_) = json.loads(out)["report"]["layers"]
    assert layer["seen"] == [150 + 20 + 4 + 6]
    assert layer["kept"] == [[20 + 4 + 8] * 2]
    for extra, message in (
        (["--protect", "system"], "protect: expected a chat with a system message beside 'system'"),
        (["--system", "w1", "--raw"], "raw: expected a prompt in the chat template"),
        (["--protect", "tools", "--tools", tmp_path / "prompt.txt"], "tools: expected a file with a JSON list"),
        (["--protect", "user"], "protect: expected START:STOP"),
    ):
        code, out, err = run(*extra)
        assert (code, out, message in err) == (2, "", True), err
