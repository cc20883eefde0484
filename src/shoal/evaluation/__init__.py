"""Measures policies: scored answers to tasks, their metrics, comparisons of two policies, and held-out evaluation."""

from shoal.evaluation.answering import answer_tasks, make_executor
from shoal.evaluation.answers import Answer, AnswersError, read_answers, write_answers
from shoal.evaluation.comparison import Comparison, ComparisonError, compare_answers
from shoal.evaluation.evaluator import Evaluator
from shoal.evaluation.executors import EngineSpec
from shoal.evaluation.generator import AnswerGenerator, Question, SamplingSettings
from shoal.evaluation.journal import Journal
from shoal.evaluation.metrics import AnswerMetrics, answer_metrics, metrics_by_category, pass_at_k
from shoal.evaluation.statistics import Estimate, estimate, mean_error
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
    "Evaluator",
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
