"""Rows with exactly the columns of public datasets, made by hand."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

INTELLECT_2: list[dict[str, Any]] = [
    {
        "problem_id": "nm_1",
        "task_type": "verifiable_math",
        "prompt": "What is 6 times 7? Put your final answer in \\boxed{}.",
        "verification_info": json.dumps({"ground_truth": "42"}),
        "solve_rate_qwen_r1_distill_7b": 0.25,
    },
    {
        "problem_id": "vcp_2",
        "task_type": "prime_rl_code",
        "prompt": "Write a function `double`.",
        "verification_info": json.dumps(
            {"test_cases": {"inputs": [[2], [5]], "outputs": [4, 10], "fn_name": "double"}}
        ),
        "solve_rate_qwen_r1_distill_7b": 0.75,
    },
    {
        "problem_id": "vcp_3",
        "task_type": "prime_rl_code",
        "prompt": "Read a number and print its square.",
        "verification_info": json.dumps({"test_cases": json.dumps({"inputs": ["3\n"], "outputs": ["9\n"]})}),
        "solve_rate_qwen_r1_distill_7b": None,
    },
]
NUMINA_1_5: list[dict[str, Any]] = [
    {
        "problem": problem,
        "solution": "…",
        "answer": answer,
        "problem_type": "Algebra",
        "question_type": question_type,
        "problem_is_valid": valid,
        "solution_is_valid": "Yes",
        "source": "olympiads",
        "synthetic": False,
    }
    for problem, answer, question_type, valid in [
        ("Solve $x^2=4$, $x>0$.", "2", "math-word-problem", "Yes"),
        ("Prove that 2 is prime.", "proof", "proof", "Yes"),
        ("Which? A) 1 B) 2", "B", "MCQ", "Yes"),
        ("Garbled.", "7", "math-word-problem", "Problem not solved"),
        ("Lost.", "notfound", "math-word-problem", "Yes"),
        ("Half of one?", "\\frac{1}{2}", "math-word-problem", "Yes"),
    ]
]
DEEPSCALER = [
    {"problem": "One and one?", "answer": "2", "solution": "…"},
    {"problem": "Root of 2?", "answer": "\\sqrt{2}", "solution": "…"},
]
SYNTHETIC_1: list[dict[str, Any]] = [
    {
        "problem_id": "vfc_1",
        "source": "apps",
        "task_type": "verifiable_code",
        "in_source_id": "4",
        "prompt": "Echo the input.",
        "gold_standard_solution": "print(input())",
        "verification_info": json.dumps(
            {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "a\n", "output": "a\n"}]}
        ),
        "metadata": json.dumps({"difficulty": "easy"}),
    },
    {
        "problem_id": "cou_2",
        "source": "synthetic",
        "task_type": "code_output_prediction",
        "in_source_id": None,
        "prompt": "What does it print? Answer as JSON.",
        "gold_standard_solution": None,
        "verification_info": json.dumps({"output": "[1, 2]"}),
        "metadata": "{}",
    },
    {
        "problem_id": "stackexchange_3",
        "source": "stackexchange",
        "task_type": "llm_judgeable_groundtruth_similarity",
        "in_source_id": "9",
        "prompt": "Why is the sky blue?",
        "gold_standard_solution": "Rayleigh scattering.",
        "verification_info": "{}",
        "metadata": "{}",
    },
]


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def integer_rows(count: int) -> list[dict[str, Any]]:
    return [
        {"task_type": "integer_answer", "prompt": f"Say {number}.", "verification_info": {"answer": number}}
        for number in range(count)
    ]
