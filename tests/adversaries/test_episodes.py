import pytest

from adversaries.episodes import EPISODE_CHEATS, EpisodeArena, caught, make_episode_arena
from shoal.protocol.verdicts import Severity, most_severe

SLOTS = [1, 2]


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> EpisodeArena:
    return make_episode_arena(tmp_path_factory.mktemp("episodes"))


def test_honest_episodes_pass_every_check(arena: EpisodeArena) -> None:
    for slot in SLOTS:
        assert arena.verify(arena.honest(slot)) == ()


@pytest.mark.parametrize("name", EPISODE_CHEATS)
def test_a_cheat_with_episodes_is_proved(arena: EpisodeArena, name: str) -> None:
    found = caught(arena, name, SLOTS)
    assert found, "the cheat had something to lie about"
    assert {most_severe(reasons) for reasons in found} == {Severity.PROOF}
