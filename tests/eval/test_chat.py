"""Token ids are the same in every regime, and the cuts are where the parts meet."""

import copy

import pytest

from decantkv.lab.eval.chat import ChatFormat
from decantkv.lab.eval.probes import Probe
from decantkv.lab.eval.sample import Sample


def sample(context="Read this. ", question="What is it?", prefix=" It is", **more):
    return Sample("s", "t", 0, 0, context, question, prefix, ("x",), 4, "string_match_all", **more)


def decoded(tokenizer, ids):
    return tokenizer.decode(list(ids), skip_special_tokens=False)


def test_the_answer_prefix_follows_the_assistants_turn(tokenizer):
    encoded = ChatFormat(tokenizer).encode(sample())
    text = decoded(tokenizer, encoded.ids)
    assert text == "<|user|>\nRead this. What is it?<|end|>\n<|assistant|>\n It is"
    assert decoded(tokenizer, encoded.ids[: encoded.cuts["agnostic"]]) == "<|user|>\nRead this. "
    assert decoded(tokenizer, encoded.ids[: encoded.cuts["aware-question"]]).endswith("What is it?")
    assert encoded.cuts["aware"] == len(encoded.ids)


def test_a_system_turn_comes_first(tokenizer):
    text = decoded(tokenizer, ChatFormat(tokenizer, system="Be brief.").encode(sample()).ids)
    assert text.startswith("<|system|>\nBe brief.<|end|>\n<|user|>\nRead")


@pytest.mark.parametrize("plain", ["suite", "model"])
def test_without_a_template_the_prompt_is_the_bare_text(plain, tokenizer):
    bare = copy.deepcopy(tokenizer)
    if plain == "model":
        bare.chat_template = None
    encoded = ChatFormat(bare).encode(sample(chat=plain == "model"))
    assert decoded(bare, encoded.ids) == sample().text
    assert decoded(bare, encoded.ids[: encoded.cuts["agnostic"]]) == "Read this. "


def test_a_template_that_strips_is_noticed(tokenizer):
    stripping = copy.deepcopy(tokenizer)
    stripping.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'] | trim")
    encoded = ChatFormat(stripping).encode(sample(context="  Read. ", question="What? "))
    rendered = stripping.apply_chat_template(
        [{"role": "user", "content": "  Read. What? "}], tokenize=False, add_generation_prompt=True
    )
    assert decoded(stripping, encoded.ids) == rendered + " It is"
    assert decoded(stripping, encoded.ids[: encoded.cuts["agnostic"]]) == "<|user|>\nRead. "


def test_a_token_across_the_cut_belongs_to_the_question(tokenizer):
    encoded = ChatFormat(tokenizer).encode(sample(context="caf", question="é?"))  # é is two byte tokens
    assert decoded(tokenizer, encoded.ids[: encoded.cuts["agnostic"]]).endswith("caf")


def test_a_template_that_says_the_text_twice_is_refused(tokenizer):
    twice = copy.deepcopy(tokenizer)
    twice.chat_template = "{{ messages[0]['content'] }} {{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match="once"):
        ChatFormat(twice)
    with pytest.raises(ValueError, match="fast tokenizer"):
        ChatFormat(object())


@pytest.mark.parametrize("template", [True, False])
def test_probes_cut_after_the_first_question_and_mark_what_to_protect(template, tokenizer):
    chosen = copy.deepcopy(tokenizer)
    chosen.chat_template = tokenizer.chat_template if template else None
    form = ChatFormat(chosen)
    made = Probe("second_turn", 1500, form.measure()).sample(3)
    encoded = form.encode(made)
    before = decoded(chosen, encoded.ids[: encoded.cuts["agnostic"]])
    assert before.endswith(made.turns[0][1][-30:])
    assert made.question not in before
    assert made.question in decoded(chosen, encoded.ids)
    ((start, stop),) = encoded.protect
    assert decoded(chosen, encoded.ids[start:stop]) == made.protected
    assert made.references[0] in made.protected
    assert len(encoded.ids) + made.max_new_tokens <= 1500
    rule = Probe("system_rule", 1500, form.measure()).sample(0)
    encoded = form.encode(rule)
    assert encoded.protect[0][1] < 80
    assert rule.references[0] in decoded(chosen, encoded.ids[slice(*encoded.protect[0])])
