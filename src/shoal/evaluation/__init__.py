"""Measures policies: judged answers to tasks, their figures with intervals, and comparisons of two policies."""

from shoal.evaluation.answers import Answer, AnswersError, read_answers, write_answers
from shoal.evaluation.asking import ask_all, make_crew
from shoal.evaluation.comparison import Comparison, ComparisonError, compare_answers
from shoal.evaluation.crews import Post
from shoal.evaluation.figures import (
    Estimate,
    Figures,
    estimate,
    figures_by_category,
    figures_of,
    mean_error,
    pass_at_k,
)
from shoal.evaluation.journal import Journal
from shoal.evaluation.respondent import AskSettings, Question, Respondent
from shoal.evaluation.tables import comparison_json, comparison_table, figures_json, figures_table

__all__ = [
    "Answer",
    "AnswersError",
    "AskSettings",
    "Comparison",
    "ComparisonError",
    "Estimate",
    "Figures",
    "Journal",
    "Post",
    "Question",
    "Respondent",
    "ask_all",
    "compare_answers",
    "comparison_json",
    "comparison_table",
    "estimate",
    "figures_by_category",
    "figures_json",
    "figures_of",
    "figures_table",
    "make_crew",
    "mean_error",
    "pass_at_k",
    "read_answers",
    "write_answers",
]
