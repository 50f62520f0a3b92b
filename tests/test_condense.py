"""Documents that are condensed once and asked afterwards: from memory, from a file, from the command line."""

from __future__ import annotations

import json

import pytest
import torch

import decantkv
from decantkv.cache.evicting_cache import cache_argument
from decantkv.cli import main
from decantkv.scoring.rehearsal import Rehearsal
from tests.support import tiny

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
TEXT = FILLER * 6 + "The access code for the archive room is 7392. " + FILLER * 6
QUESTION = "What is the access code for the archive room? Answer with the four digits."


@pytest.fixture(scope="module")
def document(demo_model):
    return decantkv.condense(*demo_model, TEXT, budget=0.5, prefill_chunk=200)


@pytest.mark.model
def test_a_question_that_was_not_known_is_answered_and_leaves_the_document_as_it_was(document):
    length = document.cache.get_seq_length()
    first = document.ask(QUESTION, max_new_tokens=20)
    assert "7392" in first
    assert document.cache.get_seq_length() == length == document.ids.shape[1]
    assert document.ask(QUESTION, max_new_tokens=20) == first
    counts = torch.stack([layer.kept.counts for layer in document.cache.layers])
    assert round(float(counts.float().mean()) / length, 2) == 0.5


@pytest.mark.model
def test_a_file_answers_as_the_document_in_memory_does(document, demo_model, tmp_path):
    document.save(tmp_path / "book.kv", source="here")
    again = decantkv.Document.load(tmp_path / "book.kv", *demo_model)
    assert again.ask(QUESTION, max_new_tokens=20) == document.ask(QUESTION, max_new_tokens=20)


@pytest.mark.model
def test_the_command_line_condenses_and_asks(model_path, tmp_path, capsys):
    (tmp_path / "doc.txt").write_text(TEXT)
    book = str(tmp_path / "book.kv")
    with pytest.raises(SystemExit) as done:
        main(["condense", str(tmp_path / "doc.txt"), "--model", model_path, "-o", book, "--budget", "50%", "--json"])
    assert done.value.code == 0
    made = json.loads(capsys.readouterr().out)
    assert made["bytes"] > 0
    with pytest.raises(SystemExit) as done:
        main(["ask", book, QUESTION, "What colour is the sky?", "--max-new-tokens", "20", "--json"])
    assert done.value.code == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "7392" in answers[0]["answer"]
    assert len(answers) == 2


def test_reading_in_chunks_condenses_as_reading_in_one_piece():
    model, prompt = tiny.llama(), tiny.prompt(60)
    name = cache_argument(model)
    whole, parts = (decantkv.EvictingCache(model, budget=0.3, rehearsal="replay+anchors") for _ in range(2))
    with torch.no_grad():
        model(prompt, **{name: whole})
        with decantkv.deferred(parts):
            for part in prompt.split(17, 1):
                model(part, **{name: parts})
    for one, other in zip(whole.layers, parts.layers, strict=True):
        assert torch.equal(one.kept.indices, other.kept.indices)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rehearsal": "replay", "method": "knorm"}, "rehearsal: expected a method that scores by queries"),
        ({"rehearsal": "replay", "method": "h2o"}, "rehearsal: expected a method that scores by queries"),
        ({"rehearsal": "replay", "every": 8, "allocation": "uniform"}, "every: expected none beside rehearsal"),
        ({"rehearsal": "replay", "prefill_chunk": 9, "max_kv_tokens": 64}, "max_kv_tokens: expected none beside"),
        ({"rehearsal": "anchors:0"}, "expected a share of the prompt in"),
        ({"rehearsal": "anchors:1.5"}, "expected a share of the prompt in"),
        ({"rehearsal": "window"}, "expected a source beside 'window'"),
        ({"rehearsal": "replay+replay"}, "expected each source once"),
        ({"rehearsal": "echoes"}, "rehearsal: expected one of"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_at_the_door(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        decantkv.attach(tiny.llama(), budget=0.5, **options)


@pytest.mark.model
def test_questions_must_be_text_that_fits(document):
    with pytest.raises(ValueError, match="question: expected text"):
        document.ask("  ")
    with pytest.raises(ValueError, match="question"):
        document.ask("Why?", max_new_tokens=100_000)
    with pytest.raises(ValueError, match="rehearsal questions: expected texts of at least one token"):
        Rehearsal(questions=((),))


@pytest.mark.model
def test_a_file_of_another_model_or_of_no_document_is_refused(document, tmp_path):
    document.cache.save(tmp_path / "plain.kv")
    with pytest.raises(ValueError, match="expected a document"):
        decantkv.Document.load(tmp_path / "plain.kv", document.model, document.tokenizer)
    document.save(tmp_path / "book.kv")
    with pytest.raises(ValueError, match="model: expected the one whose cache"):
        decantkv.Document.load(tmp_path / "book.kv", tiny.llama(), document.tokenizer)
