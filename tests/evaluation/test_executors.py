from shoal.errors import ConfigError, UnavailableError
from shoal.evaluation import executors


class Failed(Exception):
    """As Ray tells of a task that failed."""

    cause: Exception | None = None


def test_what_a_distant_member_refuses_is_said_as_it_would_be_here() -> None:
    failed = Failed("a long trace")
    failed.cause = ConfigError("Request 0 needs 4,113 positions.", hint="Shorten it.")
    assert executors._told_by(failed) is failed.cause


def test_a_member_that_crashes_is_told_by_the_last_line_of_its_trace() -> None:
    told = executors._told_by(Failed("Traceback\n  somewhere\nMemoryError: no more\n"))
    assert isinstance(told, UnavailableError)
    assert told.message == "A member of the Ray cluster failed: MemoryError: no more"
    assert "goes on" in (told.hint or "")
    assert executors._told_by(Failed()).message.endswith("failed: Failed")
