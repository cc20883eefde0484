"""Whoever is away is waited for, said so, and given up in the end."""

import pytest

from shoal.errors import UnavailableError
from shoal.protocol.patience import patiently


class Coordinator:
    """Away for a number of questions; every question takes a minute."""

    def __init__(self, questions: int) -> None:
        self.away, self.now = questions, 0.0

    def ask(self) -> str:
        self.now += 60
        if self.away:
            self.away -= 1
            raise UnavailableError("It did not answer.")
        return "here"


def test_it_is_asked_again_until_it_answers_and_everybody_is_told() -> None:
    coordinator, said = Coordinator(3), list[str]()
    assert patiently(coordinator.ask, said.append, outage_s=600, clock=lambda: coordinator.now) == "here"
    assert said == ["It did not answer. Waiting for it, for up to 10 minutes."] * 3


def test_an_outage_that_does_not_end_is_given_up() -> None:
    coordinator = Coordinator(1000)
    with pytest.raises(UnavailableError):
        patiently(coordinator.ask, lambda text: None, outage_s=600, clock=lambda: coordinator.now)
    assert coordinator.now == 60 + 600 + 60


def test_somebody_who_leaves_does_not_wait() -> None:
    coordinator = Coordinator(1000)
    with pytest.raises(UnavailableError):
        patiently(coordinator.ask, lambda text: None, outage_s=600, stopping=lambda: True)
    assert coordinator.now == 60
