"""lm-eval's harness with eviction on, by a local task."""

import json

import pytest
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'decantkv[lm-eval]')")

from decantkv.lab.eval.cli import app
from decantkv.lab.eval.lm_eval import DecantLM

TASK = """
task: local_recall
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: generate_until
doc_to_text: "{{{{context}}}}\\n{{{{input}}}}"
doc_to_target: "{{{{answers[0]}}}}"
generation_kwargs:
  until: ["@@"]
  max_gen_toks: 6
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture
def task_folder(tmp_path):
    rows = [{"context": f"Line {i}. " * 30, "input": f"What {i}?", "answers": ["x"]} for i in range(3)]
    (tmp_path / "data.json").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "task.yaml").write_text(TASK.format(file=tmp_path / "data.json"))
    return tmp_path


def test_a_local_task_runs_with_eviction_on(task_folder, model, tokenizer):
    import lm_eval
    from lm_eval.tasks import TaskManager

    answers = {}
    for method in ("full", "dropkv"):
        lm = DecantLM(pretrained=model, tokenizer=tokenizer, method=method, budget=0.1)
        manager = TaskManager(include_path=str(task_folder), include_defaults=False)
        results = lm_eval.simple_evaluate(model=lm, tasks=["local_recall"], task_manager=manager, log_samples=True)
        answers[method] = [sample["resps"][0][0] for sample in results["samples"]["local_recall"]]
        if method == "dropkv":
            assert len(lm.reports) == 3
            report = json.loads(lm.reports[0].to_json())
            assert "dropkv" in json.dumps(report)
    assert answers["full"] != answers["dropkv"]


def test_tasks_that_compare_likelihoods_are_refused(model, tokenizer):
    lm = DecantLM(pretrained=model, tokenizer=tokenizer, method="dropkv", budget=0.1)
    with pytest.raises(ValueError, match="generate"):
        lm.loglikelihood([])
    with pytest.raises((ValueError, TypeError), match="budget"):
        DecantLM(pretrained=model, tokenizer=tokenizer, budget=2.5)


def test_the_command_prints_the_regime(task_folder, model_folder):
    given = ("lm", "--model", model_folder, "--tasks", "local_recall", "--include-path", task_folder,
             "--budget", "0.2", "--out", task_folder / "out.json")  # fmt: skip
    found = CliRunner().invoke(app, [str(a) for a in given])
    assert found.exit_code == 0, found.output + repr(found.exception)
    assert "regime: aware" in found.output
    assert json.loads((task_folder / "out.json").read_text())["budget"] == "0.2"
    wrong = CliRunner().invoke(app, [*map(str, given[:4]), "no_such_task"])
    assert "no_such_task" in str(wrong.exception)
