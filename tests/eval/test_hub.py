"""Models, essays, questions and LongBench by their public names, over the hub's protocol and its own libraries."""

import os
import shutil
import subprocess
import sys

import pytest
from tests.eval.hub import COMMIT, serving

from decantkv.lab.eval.results import read_folder

pyarrow = pytest.importorskip("pyarrow", reason="datasets is not installed (pip install 'decantkv[lm-eval]')")
parquet = pytest.importorskip("pyarrow.parquet")

CARD = "---\nconfigs:\n- config_name: {name}\n  data_files:\n  - split: {split}\n    path: {path}/{split}-*\n---\n"


def publish(root, repo, name, split, rows):
    folder = root / "datasets" / repo / name
    folder.mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
    (folder.parent / "README.md").write_text(CARD.format(name=name, split=split, path=name))


@pytest.fixture(scope="module")
def hub(model_folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    shutil.copytree(model_folder, root / "models" / "tiny" / "llama")
    essay = "It was a day like any other. Nobody had work to do, so they wrote. "
    publish(
        root, "baber/paul_graham_essays", "default", "train", [{"title": str(i), "text": essay * 40} for i in range(3)]
    )
    squad = [
        {"title": f"A{i // 6}", "context": f"Paragraph {i // 2}. " + "Words of it. " * 6, "question": f"Which is {i}?",
         "answers": {"text": [f"answer {i}"], "answer_start": [0]}}
        for i in range(24)
    ]  # fmt: skip
    publish(root, "rajpurkar/squad_v2", "squad_v2", "validation", squad)
    hotpot = [
        {"question": f"Whose is {i}?", "answer": f"hers {i}",
         "context": {"title": [f"T{i}", f"U{i}"], "sentences": [["One. ", "Two."], ["Three of them."]]}}
        for i in range(24)
    ]  # fmt: skip
    publish(root, "hotpotqa/hotpot_qa", "distractor", "validation", hotpot)
    long = [
        {"input": f"Who is {i}?", "context": "Passage 1:\nSome words. " * 20, "answers": [f"she {i}"], "length": 9,
         "dataset": "hotpotqa", "language": "en", "all_classes": None, "_id": str(i)}
        for i in range(3)
    ]  # fmt: skip
    publish(root, "Xnhyacinth/LongBench", "hotpotqa", "test", long)
    with serving(root) as address:
        yield address


def evaluated(hub, folder, options):
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}
    command = f"-m decantkv eval --model tiny/llama --method dropkv --budget 0.2 --regime aware {options} --out".split()
    done = subprocess.run(
        [sys.executable, *command, str(folder / "out")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return read_folder(folder / "out")


def test_ruler_takes_model_essays_and_questions_from_the_hub(hub, tmp_path):
    run, rows = evaluated(hub, tmp_path, "--suite ruler --length 3000 --task niah_single_2,qa_1,qa_2 --samples 1")
    told = {(row["prompt"].split("/")[1], row["policy"]) for row in rows if row["row"] == "answer"}
    assert told == {(task, policy) for task in ("niah_single_2", "qa_1", "qa_2") for policy in ("full", "dropkv")}
    configuration = run["configuration"]
    assert configuration["weights"] == COMMIT
    assert [next(iter(source.values())) for source in configuration["sources"].values()] == [
        "baber/paul_graham_essays",
        "rajpurkar/squad_v2",
        "hotpotqa/hotpot_qa",
    ]


def test_longbench_comes_from_the_hub(hub, tmp_path):
    run, rows = evaluated(hub, tmp_path, "--suite longbench --length 2000 --task hotpotqa")
    assert len({row["prompt"] for row in rows}) == 3
    assert run["configuration"]["sources"] == {"longbench": {"hub": "Xnhyacinth/LongBench", "commit": COMMIT}}
