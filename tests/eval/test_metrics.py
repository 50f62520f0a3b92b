"""The metrics against straight-line computations of their own, and against the values that published code gives."""

import difflib
import json
import random
import string

import pytest

from decantkv.lab.eval.longbench.metrics import classification, code_similarity, count, qa_f1, retrieval, rouge_l
from decantkv.lab.eval.metrics import METRICS, clean, string_match_all, string_match_part

WORDS = ["the", "a", "an", "Paris", "paris,", "town!", "(river)", "42", "blue-green", "of", "of", "it"]


def some_text(rng, most=9):
    return " ".join(rng.choices(WORDS, k=rng.randrange(most)))


def plain_f1(said, wanted):
    def words(text):
        out = []
        for word in "".join(c if c not in string.punctuation else "" for c in text.lower()).split():
            if word not in ("a", "an", "the"):
                out.append(word)
        return out

    a, b = words(said), words(wanted)
    left, shared = list(b), 0
    for word in a:
        if word in left:
            left.remove(word)
            shared += 1
    return 2 * shared / (len(a) + len(b)) if shared else 0.0


def test_f1_counts_shared_words():
    rng = random.Random(0)
    for _ in range(300):
        said, wanted = some_text(rng), some_text(rng)
        assert qa_f1(said, wanted, {}) == pytest.approx(plain_f1(said, wanted))
    assert qa_f1("The Paris!", "paris", {}) == 1.0
    assert qa_f1("theatre a", "theatre", {}) == 1.0


def longest_common(a, b):
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def test_rouge_l_is_the_rouge_packages_not_another():
    """Of one sentence without repeated words, the package's ROUGE-L is the LCS's F."""
    said, wanted = "police killed the gunman today", "police kill the gunman"
    lcs = longest_common(said.split(), wanted.split())
    p, r = lcs / 5, lcs / 4
    assert rouge_l(said, wanted, {}) == pytest.approx(2 * p * r / (p + r), abs=1e-6)
    assert rouge_l("", wanted, {}) == 0.0
    assert rouge_l(".", wanted, {}) == 0.0


def test_string_match_is_nvidias():
    references = ["4417", "Blue-Whale", "x9"]
    assert string_match_all("It is 4417 and BLUE-WHALE.", references, {}) == pytest.approx(2 / 3)
    assert string_match_part("It is 4417", references, {}) == 1.0  # any, not a share
    assert string_match_part("nothing", references, {}) == 0.0
    assert clean("\x00a\tb\x1f ") == "a\nb"


def test_numbers_are_counted():
    assert count("there are 12, no, 14", "14", {}) == 0.5
    assert count("none", "14", {}) == 0.0
    assert count("114", "14", {}) == 0.0
    assert retrieval("Paragraph 3, or 13", "Paragraph 13", {}) == 0.5
    with pytest.raises(ValueError, match="Paragraph N"):
        retrieval("3", "third", {})


def test_classes_inside_the_right_one_do_not_count():
    details = {"all_classes": ["Date", "Other location", "location", "Other", "Food"]}
    assert classification("Other location", "Other location", details) == pytest.approx(
        1 / 2
    )  # the skip of the original
    assert classification("Date or Food", "Date", details) == 0.5
    assert classification("Food", "Date", details) == 0.0


def test_code_is_judged_by_its_first_line_that_is_code():
    reference = "    return langs"
    said = "\n\n# a comment\n```python\n    return lang\nmore"
    wanted = round(100 * difflib.SequenceMatcher(None, "    return lang", reference).ratio()) / 100
    assert code_similarity(said, reference, {}) == wanted
    assert code_similarity("# only\n// comments", reference, {}) == 0.0
    assert 0 < code_similarity("    return lang", reference, {}) < 1


def test_the_best_reference_counts_and_few_shot_answers_end_at_the_first_line():
    assert METRICS["qa_f1"]("paris", ["london", "Paris"], {}) == 1.0
    said = "\nDate\nQuestion: Food?"
    details = {"all_classes": ["Date", "Food"], "first_line_only": True}
    assert METRICS["classification"](said, ["Date"], details) == 1.0
    assert METRICS["classification"](said, ["Date"], {**details, "first_line_only": False}) == 0.5


def test_against_lm_evals_port_of_longbench_where_it_is_installed(data):
    ported = pytest.importorskip("lm_eval.tasks.longbench.metrics", exc_type=ImportError)
    for task, ours, theirs in (
        ("hotpotqa", qa_f1, ported.qa_f1_score),
        ("passage_count", count, ported.count_score),
        ("passage_retrieval_en", retrieval, ported.retrieval_score),
        ("multi_news", rouge_l, ported.rouge_score),
        ("samsum", rouge_l, ported.rouge_score),
        (
            "lcc",
            lambda *a: code_similarity(*a) if a[0].strip("\n").split("\n")[0].strip() else None,
            ported.code_sim_score,
        ),
    ):
        file = data / "minilongbench" / f"MiniLongBench_{task}.json"
        for entry in json.loads(file.read_text()).values():
            for reference in entry["gold"]:
                mine = ours(entry["prediction"], reference, {})
                if mine is not None:  # the port skips blank lines, LongBench's own code does not
                    assert mine == pytest.approx(theirs(entry["prediction"], reference))
