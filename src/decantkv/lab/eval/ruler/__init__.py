"""RULER (arXiv 2404.06654; NVIDIA/RULER, Apache-2.0): all thirteen tasks, made offline at any length."""

from decantkv.lab.eval.ruler.haystack import Haystack, hub_haystack, load_haystack
from decantkv.lab.eval.ruler.qa import QuestionSet, hub_questions, load_questions
from decantkv.lab.eval.ruler.tasks import TASKS, Series, Sources, check_task

__all__ = [
    "TASKS",
    "Haystack",
    "QuestionSet",
    "Series",
    "Sources",
    "check_task",
    "hub_haystack",
    "hub_questions",
    "load_haystack",
    "load_questions",
]
