"""`decantkv show` from text to page, and where each token stands in the text."""

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decantkv.lab.show.cli import prompt_pieces, show

TEXT = "It is a truth universally acknowledged, naïve 日本語 🙂 that a single\n\nman in possession  of it <must> be.\n"


def test_pieces_join_to_the_prompt():
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    ids, pieces = prompt_pieces(tokenizer, "a b  c\na ", raw=True)
    assert ids.tolist() == [[1, 2, 0, 1]]
    assert pieces == ["a", " b", "  c", "\na "]


@pytest.mark.model
def test_pieces_of_the_demo_model(demo_model):
    _, tokenizer = demo_model
    ids, pieces = prompt_pieces(tokenizer, TEXT, raw=False)
    assert len(pieces) == ids.shape[1]
    assert TEXT in "".join(pieces)
    assert " truth" in pieces


@pytest.mark.model
def test_from_text_to_page(demo_model, model_path, tmp_path, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(TEXT, encoding="utf-8")
    out = tmp_path / "page.html"
    show(
        model=model_path, prompt_file=prompt, question="What is acknowledged?", method=["dropkv", "snapkv:shared"],
        budget="0.3", protect=["0:4"], max_new_tokens=3, out=out,
    )  # fmt: skip
    page = out.read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))
    assert "What is acknowledged?" in "".join(data["pieces"])
    assert [m["short"] for m in data["methods"]] == ["dropkv", "snapkv"]
    assert len(data["details"]) == 30
    assert Path(model_path).name in page
    assert str(model_path) not in page, "a page that is passed on says nothing of its maker's folders"
    assert f"{data['n_keep']} kept per head" in capsys.readouterr().out


def test_no_prompt_is_refused(tmp_path):
    with pytest.raises(ValueError, match="prompt"):
        show(model="none", prompt_file=tmp_path / "missing.txt")
