"""A verifier of somebody's own, as a user would write it."""

from shoal.tasks import Task, verifier


@verifier(exact=True)
def says_one(task: Task, completion_text: str) -> tuple[float, str]:
    said = completion_text.rpartition("</think>")[2].strip()
    return float(said == "1"), f"said {said!r} to {task.prompt!r}"


def not_marked(task: Task, completion_text: str) -> tuple[float, str]:
    return 1.0, "everything is fine"
