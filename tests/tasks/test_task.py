import pytest
from pydantic import ValidationError

from shoal.tasks import Task, TaskSet


def make_task(number: int) -> Task:
    return Task(
        problem_id=f"p/{number}",
        source="test",
        task_type="integer_answer",
        prompt=f"Say {number}.",
        verification_info={"answer": number},
    )


def test_digest_depends_on_content_and_order() -> None:
    one, two = make_task(1), make_task(2)
    digests = {TaskSet(tasks).digest for tasks in ([one, two], [two, one], [one], [])}
    assert len(digests) == 4
    assert TaskSet([one, two]).digest == TaskSet([make_task(1), make_task(2)]).digest


def test_digest_does_not_depend_on_the_order_of_keys() -> None:
    first = make_task(1).model_copy(update={"metadata": {"a": 1, "b": 2}})
    second = make_task(1).model_copy(update={"metadata": {"b": 2, "a": 1}})
    assert TaskSet([first]).digest == TaskSet([second]).digest


def test_index_beyond_the_set_is_an_error() -> None:
    with pytest.raises(IndexError):
        TaskSet([make_task(1)])[1]


def test_tasks_are_immutable_and_refuse_unknown_fields() -> None:
    with pytest.raises(ValidationError):
        make_task(1).prompt = "other"
    with pytest.raises(ValidationError):
        Task.model_validate({**make_task(1).model_dump(), "answer": 1})
