"""Measures policies: judged answers to tasks, their metrics with intervals, and comparisons of two policies."""

from shoal.evaluation.answering import answer_tasks, make_executor
from shoal.evaluation.answers import Answer, AnswersError, read_answers, write_answers
from shoal.evaluation.comparison import Comparison, ComparisonError, compare_answers
from shoal.evaluation.executors import EngineSpec
from shoal.evaluation.generator import AnswerGenerator, Question, SamplingSettings
from shoal.evaluation.journal import Journal
from shoal.evaluation.metrics import (
    AnswerMetrics,
    Estimate,
    answer_metrics,
    estimate,
    mean_error,
    metrics_by_category,
    pass_at_k,
)
from shoal.evaluation.tables import comparison_json, comparison_table, metrics_json, metrics_table

__all__ = [
    "Answer",
    "AnswerGenerator",
    "AnswerMetrics",
    "AnswersError",
    "Comparison",
    "ComparisonError",
    "EngineSpec",
    "Estimate",
    "Journal",
    "Question",
    "SamplingSettings",
    "answer_metrics",
    "answer_tasks",
    "compare_answers",
    "comparison_json",
    "comparison_table",
    "estimate",
    "make_executor",
    "mean_error",
    "metrics_by_category",
    "metrics_json",
    "metrics_table",
    "pass_at_k",
    "read_answers",
    "write_answers",
]
