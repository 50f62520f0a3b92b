"""LongBench's sixteen English and code tasks: prompts, answer lengths, metrics (THUDM/LongBench, MIT)."""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class LongBenchTask:
    """One task.

    Attributes:
        head: text before the context.
        tail: text after it; `{input}` stands for the sample's question.
        max_new_tokens: where generation is cut.
        metric: its name in `decantkv.lab.eval.metrics.METRICS`.
        few_shot: examples in the context; no chat template, only the first line of an answer counts.
        code: no chat template.
    """

    head: str
    tail: str
    max_new_tokens: int
    metric: str
    few_shot: bool = False
    code: bool = False

    @property
    def chat(self) -> bool:
        """Whether the prompt is wrapped in the model's chat template."""
        return not (self.few_shot or self.code)


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
_MULTI_HOP = LongBenchTask(
    f"{_PASSAGES}\n\nThe following are given passages.\n",
    f"\n\n{_PASSAGES}\n\nQuestion: {{input}}\nAnswer:",
    32,
    "qa_f1",
)
_STORY = "the question {}asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.\n\n'
)
_FOLLOW = "Please complete the code given below. \n"
_NEXT_LINE = "Next line of code:\n"

TASKS: dict[str, LongBenchTask] = {
    "narrativeqa": LongBenchTask(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer "
        + _STORY.format("")
        + "Story: ",
        "\n\nNow, answer " + _STORY.format("based on the story ") + "Question: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "qasper": LongBenchTask(
        f"You are given a scientific article and a question. Answer the question {_ARTICLE}Article: ",
        f"\n\n Answer the question based on the above article {_ARTICLE}Question: {{input}}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "multifieldqa_en": LongBenchTask(
        "Read the following text and answer briefly.\n\n",
        "\n\nNow, answer the following question based on the above text, only give me the answer and do not output "
        "any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        "qa_f1",
    ),
    "hotpotqa": _MULTI_HOP,
    "2wikimqa": _MULTI_HOP,
    "musique": _MULTI_HOP,
    "gov_report": LongBenchTask(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n",
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "qmsum": LongBenchTask(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n",
        "\n\nNow, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
        512,
        "rouge_l",
    ),
    "multi_news": LongBenchTask(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n",
        "\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "trec": LongBenchTask(
        "Please determine the type of the question below. Here are some examples of questions.\n\n",
        "\n{input}",
        64,
        "classification",
        few_shot=True,
    ),
    "triviaqa": LongBenchTask(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n",
        "\n\n{input}",
        32,
        "qa_f1",
        few_shot=True,
    ),
    "samsum": LongBenchTask(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n",
        "\n\n{input}",
        128,
        "rouge_l",
        few_shot=True,
    ),
    "passage_count": LongBenchTask(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully "
        "read these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n",
        "\n\nPlease enter the final count of unique paragraphs after removing duplicates. The output format should "
        "only contain the number, such as 1, 2, 3, and so on.\n\nThe final answer is: ",
        32,
        "count",
    ),
    "passage_retrieval_en": LongBenchTask(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n",
        "\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph that the abstract is "
        'from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        "retrieval",
    ),
    "lcc": LongBenchTask(_FOLLOW, _NEXT_LINE, 64, "code_similarity", code=True),
    "repobench-p": LongBenchTask(_FOLLOW, "{input}" + _NEXT_LINE, 64, "code_similarity", code=True),
}


def check_task(name: str) -> str:
    """The name of a known task; raise ValueError listing them otherwise."""
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {name!r}{hint}")
    return name
