"""Rows of one model's weights never pass for another's."""

import pytest

from decantkv.lab.eval import fingerprints
from decantkv.lab.eval.longbench.load import describe


def test_weights_are_told_apart_in_either_format(model_folder, tmp_path):
    for suffix in ("safetensors", "bin"):
        names = []
        for content in (b"a", b"b"):
            folder = tmp_path / suffix / content.decode()
            folder.mkdir(parents=True)
            (folder / f"model.{suffix}").write_bytes(content)
            names.append(fingerprints.of_model(str(folder)))
        assert names[0] != names[1]
    file = next(model_folder.glob("*.safetensors"))
    assert fingerprints.of_model(str(model_folder)) == fingerprints.of_model(str(file))


def test_weights_that_are_not_there_have_no_fingerprint(tmp_path):
    with pytest.raises(ValueError, match=r"expected \*.safetensors or \*.bin"):
        fingerprints.of_model(str(tmp_path))
    with pytest.raises(ValueError, match=r"expected nobody/nothing's config\.json in the hub's cache"):
        fingerprints.of_model("nobody/nothing")


def test_longbenchs_data_are_told_apart_whatever_the_tasks(tmp_path):
    (tmp_path / "trec.jsonl").write_text("{}\n")
    alone = describe(tmp_path)
    (tmp_path / "notes.txt").write_text("not data")
    assert describe(tmp_path) == alone
    (tmp_path / "lcc.jsonl").write_text("{}\n")
    assert describe(tmp_path)["sha256"] != alone["sha256"]
    assert describe(tmp_path / "trec.jsonl") == {"data": "trec.jsonl", "sha256": alone["sha256"]}
