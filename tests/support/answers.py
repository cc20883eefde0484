"""Answers made by hand."""

from shoal.evaluation import Answer


def answer(
    problem: str,
    sample: int,
    reward: float,
    *,
    category: str = "sums",
    finish: str = "stop",
    completion: str = "1</think>2",
) -> Answer:
    return Answer(
        problem_id=problem,
        category=category,
        task_type="integer_answer",
        sample=sample,
        seed=(1 << 64) - 1 - sample,
        target_length=0,
        prompt_tokens=[1, 2, 3],
        output_tokens=[4, 5],
        segment_lengths=[2],
        completion=completion,
        finish_reason=finish,
        reward=reward,
        why="made by hand",
    )
