"""RULER's prompts: the published ones byte for byte, and what a reader can check in any of them."""

import gzip
import json
import os
import random
import re
import sys
import types
from collections import Counter

import pytest
from transformers import AutoTokenizer

from decantkv.lab.eval.chat import ChatFormat
from decantkv.lab.eval.fidelity import Passages
from decantkv.lab.eval.ruler import TASKS, Series, Sources, hub_questions, load_haystack, load_questions
from decantkv.lab.eval.ruler.fit import Fit
from decantkv.lab.eval.ruler.haystack import Haystack
from decantkv.lab.eval.ruler.tasks import NEEDLES

LENGTHS = {"cwe": 9000, "qa_2": 9000}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    rng = random.Random(5)
    words = ["the", "grey", "sea", "Mr.", "hill", "river", "sang", "slowly.", "Then", "we", "left!", '"Why?"', "Soon"]
    (folder / "a.txt").write_text(
        "x\n*** START OF THIS PROJECT GUTENBERG EBOOK ***\n" + " ".join(rng.choices(words, k=900)) + "\n"
        "*** END OF THIS PROJECT GUTENBERG EBOOK ***\nlicence licence licence\n"
    )
    paragraphs = [
        {"context": f"Article {a} part {p}. " + "Words here. " * 9, "qas": []} for a in range(3) for p in range(4)
    ]
    for i, paragraph in enumerate(paragraphs):
        answer = {"text": f"part {i % 4}", "answer_start": 0}
        paragraph["qas"] = [
            {"question": f"Which part is {i}?", "answers": [answer], "is_impossible": False},
            {"question": "Unanswerable?", "answers": [], "is_impossible": True},
        ]
    squad = {"data": [{"title": str(a), "paragraphs": paragraphs[4 * a : 4 * a + 4]} for a in range(3)]}
    (folder / "squad.json").write_text(json.dumps(squad))
    hotpot = [
        {
            "question": f"Q{i}?",
            "answer": f"gold {i}",
            "context": [[f"T{i}{j}", [f"gold {i}. ", "More."]] for j in range(10)],
        }
        for i in range(6)
    ]
    (folder / "hotpot.json").write_text(json.dumps(hotpot))
    return Sources(load_haystack(folder), load_questions(folder / "squad.json"), load_questions(folder / "hotpot.json"))


@pytest.fixture(scope="module")
def form(tokenizer):
    return ChatFormat(tokenizer)


def series(form, sources, task, length=None, seed=42):
    length = length or LENGTHS.get(task, 3000)
    return Series(task, length, sources, measure=form.measure(), count_tokens=form.count, seed=seed)


def test_nvidias_500_samples_of_niah_multikey_3_come_out_byte_for_byte(data):
    """Keys and values too: the same draws from the same seed, after the three sizes its search tried."""
    rng, task = random.Random(42), NEEDLES["niah_multikey_3"]
    for size in (25, 50, 75):
        task.draft(size, rng, 0)
    golden = [json.loads(line) for line in (data / "ruler_ref" / "niah_multikey_3_4096.jsonl").open()]
    assert len(golden) == 500
    for row in golden:
        draft = task.draft(50, rng, 0)
        assert draft.context + draft.question + draft.answer_prefix == row["input"]
        assert list(draft.references) == row["outputs"]


def test_our_own_samples_are_nvidias_text_with_other_keys_and_within_one_needle_of_its_length(data, tokenizer):
    """By bytes, and by a real tokenizer where DECANTKV_EVAL_TOKENIZER names one."""
    golden = [json.loads(line) for line in (data / "ruler_ref" / "niah_multikey_3_4096.jsonl").open()][:25]
    uuid = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
    named = os.environ.get("DECANTKV_EVAL_TOKENIZER")
    for used in [tokenizer, *([AutoTokenizer.from_pretrained(named)] if named else [])]:
        form = ChatFormat(used)
        for row in golden:
            length = form.count(row["input"]) + 128
            options = {"measure": lambda s, form=form: form.count(s.text), "count_tokens": form.count}
            made = Series("niah_multikey_3", length, Sources(), **options).sample(row["index"])
            needle = form.count(f"One of the special magic uuids for {row['outputs'][0]} is: {row['outputs'][0]}.\n")
            assert length - needle - 8 < form.count(made.text) + 128 <= length  # uuids differ by some tokens
            ours, theirs = (uuid.sub("UUID", text).split("\n") for text in (made.text, row["input"]))
            assert abs(len(ours) - len(theirs)) <= 1
            assert set(ours) == set(theirs)
            assert (ours[0], ours[-1]) == (theirs[0], theirs[-1])


@pytest.mark.parametrize("task", TASKS)
def test_lengths_fill_up_to_one_unit_and_samples_repeat_by_themselves(task, form, sources):
    made = series(form, sources, task)
    for index in (0, 1, 2):
        sample = made.sample(index)
        used = form.measure()(sample) + sample.max_new_tokens
        assert used <= made.length
        unit = {"qa_1": 200, "qa_2": 60, "cwe": 200, "fwe": 40}.get(task, 130)
        assert used > made.length - unit or task.startswith("qa")
        alone = series(form, sources, task).sample(index)
        assert alone == sample  # no sample depends on those before it
    assert made.sample(0).text != made.sample(1).text
    assert series(form, sources, task, seed=7).sample(0).text != made.sample(0).text


@pytest.mark.parametrize("task", sorted(NEEDLES))
def test_needles_are_where_the_question_says(task, form, sources):
    settings = NEEDLES[task]
    for index in range(3):
        sample = series(form, sources, task).sample(index)
        facts = re.findall(r"One of the special magic (\w+) for (\S+) is: (\S+)\.", sample.context)
        asked = re.search(r"for (.+) mentioned in the provided text\?", sample.question).group(1)
        keys = asked.replace(", and ", ", ").split(", ")
        assert len(set(keys)) == settings.queries
        assert [v for key in keys for kind, k, v in facts if k == key] == sorted(
            sample.references, key=[v for key in keys for kind, k, v in facts if k == key].index
        )
        assert len(sample.references) == settings.queries * settings.values
        assert all(kind == settings.value_type for kind, _, _ in facts)
        one = settings.queries * settings.values == 1
        assert sample.answer_prefix.endswith("text is" if one else "text are")
        assert sample.context.startswith("A special magic" if one else "Some special magic")
        shape = {"numbers": r"\d{7}", "uuids": r"[0-9a-f-]{36}", "words": r"[\w'-]+"}[settings.value_type]
        assert all(re.fullmatch(shape, value) for value in sample.references)


def test_variables_form_one_chain_behind_a_solved_example(form, sources):
    for index in range(3):
        sample = series(form, sources, "vt").sample(index)
        example, _, task = sample.context.rpartition("\n\n\n\n")
        value = re.search(r"assigned the value (\d{5}) in", sample.question).group(1)
        names = [re.search(rf"VAR (\w+) = {value}\b", task).group(1)]
        while (follow := re.search(rf"VAR (\w+) = VAR {names[-1]} ", task)) is not None:
            names.append(follow.group(1))
        assert tuple(names) == sample.references
        assert len(names) == 5
        assert all(re.fullmatch("[A-Z]{5}", name) for name in names)
        solved = example.rsplit("they are: ", 1)[1].split()
        assert len(solved) == 5
        assert all(f"VAR {name} = " in example for name in solved)
        assert task.index(f"VAR {names[0]}") < task.index(f"VAR {names[1]} = ")


@pytest.mark.parametrize(("length", "often", "seldom"), [(9000, 30, 3), (3000, 6, 1)])
def test_ten_words_are_the_most_common(length, often, seldom, form, sources):
    sample = series(form, sources, "cwe", length).sample(1)
    listed = re.findall(r"(\d+)\. (.+?)(?= \d+\. |\n)", sample.context.rsplit("Memorize the ones", 1)[1])
    counts = Counter(word for _, word in listed)
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    assert {word for word, n in counts.items() if n == often} == set(sample.references)
    assert set(counts.values()) <= {often, seldom}
    assert len(sample.references) == 10


def test_coded_words_follow_the_zeta_law(form, sources):
    sample = series(form, sources, "fwe", 6000).sample(0)
    words = sample.context.split("coded words. ")[1].split()
    ranked = Counter(words).most_common()
    assert ranked[0][0] == "..."
    assert {word for word, _ in ranked[1:4]} == set(sample.references)
    assert ranked[0][1] / ranked[1][1] == pytest.approx(4, rel=0.1)  # k^−2
    assert ranked[0][1] / ranked[2][1] == pytest.approx(9, rel=0.2)


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_the_answer_is_in_the_documents(task, form, sources):
    questions = set()
    for index in range(5):
        sample = series(form, sources, task).sample(index)
        documents = re.split(r"Document \d+:\n", sample.context)[1:]
        assert any(sample.references[0] in document for document in documents)
        assert len(documents) >= (1 if task == "qa_1" else 10)
        questions.add(sample.question)
        assert "Unanswerable" not in sample.question
    assert len(questions) == 5


def test_more_documents_than_there_are_come_again(form, sources):
    sample = series(form, sources, "qa_2", 20000).sample(0)
    assert len(re.findall(r"Document \d+:\n", sample.context)) > len(sources.qa_2.documents)


def test_a_haystack_is_its_words_without_the_licence(sources, tmp_path):
    text = sources.haystack
    assert "licence" not in text.words
    assert len(text.words) == 900
    for count in (1, 17, 900, 2000):
        sentences = text.sentences(count)
        assert " ".join(sentences).split() == [text.words[i % 900] for i in range(count)]
        assert not any(s.endswith("Mr.") for s in sentences[:-1])
    (tmp_path / "essays.json").write_text(json.dumps({"text": "Many words. " * 60}))
    assert len(load_haystack(tmp_path / "essays.json").words) == 120


def test_the_hubs_rows_are_the_files_questions(sources, monkeypatch):
    rows = [
        {"title": "A", "context": f"p{i}", "question": f"q{i}", "answers": {"text": ["p"] if i else []}}
        for i in range(3)
    ]
    hotpot = [{"question": "Q", "answer": "x", "context": {"title": ["T"], "sentences": [["a ", "x"]]}}]
    hub = types.ModuleType("datasets")
    hub.load_dataset = lambda name, part, split: {"rajpurkar/squad_v2": rows, "hotpotqa/hotpot_qa": hotpot}[name]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    squad = hub_questions("qa_1")
    assert [q.text for q in squad.questions] == ["q1", "q2"]
    assert [squad.documents[i] for i in squad.questions[0].related] == ["p0", "p2"]
    assert hub_questions("qa_2").documents == ("T\na x",)
    hub.load_dataset = None
    with pytest.raises(ValueError, match="--hotpot FILE"):
        hub_questions("qa_2")


def test_passages_with_a_gold_document_each_are_read_from_gz(tmp_path):
    file = tmp_path / "nq.jsonl.gz"
    record = {"question": "q", "answers": ["a", "b"], "ctxs": [{"title": "T", "text": "a"}]}
    file.write_bytes(gzip.compress((json.dumps(record) + "\n" + json.dumps({**record, "question": "r"})).encode()))
    questions = load_questions(file)
    assert [q.text for q in questions.questions] == ["q", "r"]
    assert questions.documents == ("T\na",)


def test_bad_input_is_refused_with_what_would_do(form, sources, tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"question": "q", "answers": ["a"], "ctxs": []}\n{"question": \n')
    with pytest.raises(ValueError, match="line 2"):
        load_questions(tmp_path / "broken.jsonl")
    (tmp_path / "other.json").write_text('[{"x": 1}]')
    with pytest.raises(ValueError, match="SQuAD, HotpotQA"):
        load_questions(tmp_path / "other.json")
    with pytest.raises(ValueError, match="expected a file"):
        load_questions(tmp_path / "none.json")
    (tmp_path / "short.txt").write_text("few words")
    with pytest.raises(ValueError, match="at least 100 words"):
        load_haystack(tmp_path / "short.txt")
    with pytest.raises(ValueError, match=r"niah_single_1, .*did you mean 'niah_single_2'"):
        series(form, sources, "niah_singel_2")
    with pytest.raises(ValueError, match=r"--haystack"):
        series(form, Sources(), "niah_single_2")
    with pytest.raises(ValueError, match="length: expected at least"):
        series(form, sources, "niah_single_1", 200).sample(0)
    with pytest.raises(ValueError, match="samples: expected at most"):
        series(form, sources, "qa_2").sample(6)


def test_fit_finds_the_largest_size_with_few_tries():
    tries = []

    def build(size):
        tries.append(size)
        return size, 100 + 7 * size

    fit = Fit(10_000, 5, 5, what="lines")
    assert fit.largest(build) == (10_000 - 100) // 7
    first = len(tries)
    assert fit.largest(build) == (10_000 - 100) // 7
    assert len(tries) - first <= 3
    assert first < 40
    fit._size = 3000  # a guess far too high is found out
    assert fit.largest(build) == (10_000 - 100) // 7


def test_essay_repeats_when_a_prompt_needs_more_than_there_is():
    text = Haystack("t", tuple(f"w{i}" for i in range(10)))
    assert " ".join(text.sentences(25)) == " ".join(f"w{i % 10}" for i in range(25))


def test_prompts_begin_at_openings_spread_over_the_text():
    words = tuple(f"w{i}." if i % 7 == 6 else f"W{i}" for i in range(700))
    text = Haystack("t", words, openings=4)
    begins = [text.sentences(5, index)[0].split()[0] for index in range(5)]
    assert begins == ["W0", "W175", "W350", "W525", "W0"]  # 175, 350 and 525 words begin sentences of seven
    assert all(Haystack("t", words, 3).opening(i) % 7 == 0 for i in range(3))
    assert text.describe()["openings"] == "4"
    assert "openings" not in Haystack("t", words).describe()
    late = text.sentences(400, 3)
    assert " ".join(late).split()[:176] == [*words[525:], words[0]]  # wraps round at the end


def test_slices_of_a_text_begin_at_its_openings(tokenizer):
    words = tuple(f"Word{i}." for i in range(4000))
    samples = [Passages(Haystack("t", words, openings=4), 100, tokenizer).sample(i) for i in range(5)]
    begins = [s.context.split(".")[0].strip() for s in samples]
    assert begins == ["Word0", "Word1000", "Word2000", "Word3000", "Word200"]
