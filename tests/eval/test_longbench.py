"""LongBench: prompts in its words, its truncation, files that are broken."""

import json

import pytest

from decantkv.lab.eval.longbench.load import Record, cut_middle, load_records, samples, unwrap
from decantkv.lab.eval.longbench.tasks import TASKS

SHOTS = {
    "trec": "Question: who ?\nType:",
    "triviaqa": "Passage:\nA b.\nQuestion:\nWho?\nAnswer:\n",
    "samsum": "Dialogue: A: hi\nSummary: ",
}


def whole(task, context, question):
    form = TASKS[task]
    return form.head + context + form.tail.replace("{input}", question)


@pytest.mark.parametrize("task", TASKS)
def test_a_whole_prompt_is_taken_apart_and_put_together_again(task):
    asks = "{input}" in TASKS[task].tail and task != "repobench-p"
    question = SHOTS.get(task, "What was said, and why?") if asks else ""
    context = "First part.\nSecond part, with Question: inside.\n\nThird."
    prompt = whole(task, context, question)
    assert unwrap(task, prompt) == (context, question)
    if task in ("narrativeqa", "qasper"):
        corrected = prompt.replace("asconcisely", "as concisely")
        assert unwrap(task, corrected) == (context, question)
    if task == "qasper":
        foreign = whole("hotpotqa", context, question)
        assert unwrap(task, foreign) == (context, question)
    with pytest.raises(ValueError, match="instruction"):
        unwrap(task, "Tell me a story.")


@pytest.mark.parametrize("task", TASKS)
def test_samples_hold_the_prompt_in_two_parts(task, tokenizer):
    record = Record("Some context.", SHOTS.get(task, "And so?"), ("answer",), ("Date", "Food"))
    made = next(samples(task, [record], tokenizer=tokenizer, max_length=10_000))
    assert made.text == whole(task, "Some context.", record.input)
    assert made.context == TASKS[task].head + "Some context."
    assert made.chat == (task not in ("trec", "triviaqa", "samsum", "lcc", "repobench-p"))
    assert made.stop_at_newline == (task == "samsum")
    assert bool(made.details.get("first_line_only")) == (task in ("trec", "triviaqa", "samsum"))


def test_too_long_prompts_lose_their_middle_and_keep_the_question(tokenizer):
    record = Record("c" * 3000 + "d" * 3000, "What?", ("x",))
    made = next(samples("hotpotqa", [record], tokenizer=tokenizer, max_length=1000))
    full = whole("hotpotqa", record.context, record.input)
    assert made.text == full[:500] + full[-500:]
    assert made.question == TASKS["hotpotqa"].tail.replace("{input}", "What?")
    assert made.details["cut"] is True
    assert cut_middle("short", 5, tokenizer) == ("short", False)
    tiny = next(samples("hotpotqa", [record], tokenizer=tokenizer, max_length=40))
    assert len(tiny.text) == 40
    assert TASKS["hotpotqa"].tail.replace("{input}", "What?").endswith(tiny.question)


def test_files_in_both_forms_are_found_in_a_folder(tmp_path):
    row = {"context": "c", "input": "i", "answers": ["a"], "all_classes": None}
    (tmp_path / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    assert load_records(tmp_path, "hotpotqa") == [Record("c", "i", ("a",))] * 2
    entry = {
        "origin_prompt": whole("trec", "Q\nType: A", SHOTS["trec"]),
        "gold": {"answers": ["A"], "all_classes": ["A"]},
    }
    (tmp_path / "Mini_trec.json").write_text(json.dumps({"0": entry}))
    assert load_records(tmp_path, "trec") == [Record("Q\nType: A", SHOTS["trec"], ("A",), ("A",))]


def test_broken_files_name_the_line(tmp_path):
    good = json.dumps({"context": "c", "input": "i", "answers": ["a"]})
    (tmp_path / "qasper.jsonl").write_text(good + "\n" + good[:-4] + "\n")
    with pytest.raises(ValueError, match=r"qasper\.jsonl line 2"):
        load_records(tmp_path, "qasper")
    (tmp_path / "musique.jsonl").write_text(good + '\n{"context": "c"}\n')
    with pytest.raises(ValueError, match=r"musique\.jsonl line 2: expected context, input and answers"):
        load_records(tmp_path, "musique")
    (tmp_path / "x_lcc.json").write_text('{"7": {"gold": ["a"]}}')
    with pytest.raises(ValueError, match="entry 7"):
        load_records(tmp_path, "lcc")
    with pytest.raises(ValueError, match="no such file"):
        load_records(tmp_path, "samsum")
    with pytest.raises(ValueError, match=r"narrativeqa, qasper.*did you mean 'hotpotqa'"):
        load_records(tmp_path, "hotpotqaa")


def test_the_187_real_prompts_come_back_in_longbenchs_words(data):
    found = 0
    for task in TASKS:
        records = load_records(data / "minilongbench", task)
        prompts = json.loads((data / "minilongbench" / f"MiniLongBench_{task}.json").read_text()).values()
        for record, entry in zip(records, prompts, strict=True):
            found += 1
            assert len(record.context) > 1000
            assert record.answers
            if task not in ("narrativeqa", "qasper"):  # these were wrapped in other words
                assert whole(task, record.context, record.input).rstrip() == entry["origin_prompt"].rstrip()
    assert found == 187
    assert len(load_records(data / "longbench_multi_news", "multi_news")) == 200
