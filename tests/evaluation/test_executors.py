from shoal.errors import ConfigError, UnavailableError
from shoal.evaluation import executors


class Failed(Exception):
    """As Ray tells of a task that failed."""

    cause: Exception | None = None


def test_the_refusal_of_a_distant_actor_is_raised_unchanged() -> None:
    failed = Failed("a long trace")
    failed.cause = ConfigError("Request 0 needs 4,113 positions.", hint="Shorten it.")
    assert executors._as_shoal_error(failed) is failed.cause


def test_an_actor_that_crashes_is_reported_with_the_last_line_of_its_trace() -> None:
    error = executors._as_shoal_error(Failed("Traceback\n  somewhere\nMemoryError: no more\n"))
    assert isinstance(error, UnavailableError)
    assert error.message == "An actor of the Ray cluster failed: MemoryError: no more"
    assert "goes on" in (error.hint or "")
    assert executors._as_shoal_error(Failed()).message.endswith("failed: Failed")
