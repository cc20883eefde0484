"""Episodes over an engine's stream, with environments whose answers the test holds back."""

import threading
from typing import Any

import pytest

from shoal.errors import UnavailableError
from shoal.policy.engine import GenerationRequest
from shoal.policy.episodes import EpisodeStream, play_all
from shoal.tasks.environments.host import Called
from support.tiny_run import TinyRun, make_tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("episodes"), environment="calculator")


class Held:
    """An environment that answers when it is let."""

    def __init__(self, turns: int, free: threading.Event | None = None) -> None:
        self.left, self.free, self.closed = turns, free, False

    def reset(self, seed: int, task: Any) -> Called:
        return Called()

    def step(self, action: str) -> Called:
        if self.free is not None:
            assert self.free.wait(60)
        self.left -= 1
        return Called("7", done=self.left < 1, reward=1.0)

    def close(self) -> None:
        self.closed = True
        if self.free is not None:
            self.free.set()


def begun(run: TinyRun, sessions: list[Any], slot: bytes = bytes(32)) -> tuple[list[GenerationRequest], list[Any]]:
    items = (run.workload.items(slot) * 4)[: len(sessions)]
    episodes = [run.workload.episode(item) for item in items]
    for episode, session in zip(episodes, sessions, strict=True):
        episode.open_session = lambda session=session: session  # type: ignore[misc]
    requests = [GenerationRequest(item.prompt_tokens, item.seed, 160) for item in items]
    return requests, episodes


def test_others_decode_and_end_while_one_waits_for_its_environment(run: TinyRun) -> None:
    free = threading.Event()
    requests, episodes = begun(run, [Held(2, free), *(Held(2) for _ in range(5))])
    engine = run.engine()
    with EpisodeStream(engine.open(temperature=1.0, max_tokens=256, rows=2)) as stream:
        numbers = stream.submit(requests, episodes)
        ended: dict[int, Any] = {}
        while len(ended) < 5:
            ended.update(stream.step())
        assert numbers[0] not in ended or episodes[0].finish_reason == "length"
        free.set()
        while stream.unfinished:
            ended.update(stream.step())
        assert stream.environment_s > 0
    assert set(ended) == set(numbers)


def test_an_episode_is_the_same_alone_and_in_company(run: TinyRun) -> None:
    requests, episodes = begun(run, [Held(3) for _ in range(8)])
    together = play_all(run.engine(), requests, episodes, temperature=1.0)
    for number in range(8):
        again, alone = begun(run, [Held(3) for _ in range(8)])
        (one,) = play_all(run.engine(), again[number : number + 1], alone[number : number + 1], temperature=1.0)
        assert (one.tokens, one.segment_lengths) == (together[number].tokens, together[number].segment_lengths)
        assert one.finish_reason == together[number].finish_reason
    assert any(len(one.segment_lengths) == 5 for one in together)


def test_a_plain_completion_passes_through(run: TinyRun) -> None:
    requests, _ = begun(run, [Held(1)] * 3)
    plain = play_all(run.engine(), requests, [None] * 3, temperature=1.0)
    assert plain == run.engine().generate(requests, temperature=1.0)


def test_what_is_cancelled_leaves_its_environment(run: TinyRun) -> None:
    sessions = [Held(9, threading.Event()) for _ in range(4)]
    requests, episodes = begun(run, sessions)
    with EpisodeStream(run.engine().open(temperature=1.0, max_tokens=256, rows=4)) as stream:
        numbers = stream.submit(requests, episodes)
        while stream._stream.unfinished:
            stream.step()
        stream.cancel(numbers)
        assert (stream.unfinished, stream.step()) == (0, [])
    assert [session.closed for session in sessions if not session.closed] == [
        False for episode in episodes if episode.finish_reason == "length"
    ]


def test_an_environment_that_cannot_be_started_fails_its_episode_and_nothing_else(run: TinyRun) -> None:
    requests, episodes = begun(run, [Held(1) for _ in range(4)])

    def gone() -> Any:
        raise UnavailableError("The process of the environment calculator did not start.")

    for episode in episodes:
        episode.open_session = gone
    made = play_all(run.engine(), requests, episodes, temperature=1.0)
    assert {one.finish_reason for one in made} <= {"failed", "length"}
    failed = next(episode for episode in episodes if episode.finish_reason == "failed")
    assert "did not start" in failed.why
    assert failed.limited


def test_what_goes_wrong_beside_the_environment_is_raised_and_no_turn_is_made_up(run: TinyRun) -> None:
    requests, episodes = begun(run, [Held(1) for _ in range(4)])

    class Broken(Held):
        def reset(self, seed: int, task: Any) -> Called:
            raise TypeError("this task is no JSON")

    for episode in episodes:
        episode.open_session = lambda: Broken(1)
    engine = run.engine()
    with pytest.raises(TypeError, match="no JSON"):
        play_all(engine, requests, episodes, temperature=1.0)
    assert engine.generate(requests, temperature=1.0), "the engine is free again"
