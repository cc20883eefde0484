"""A late slot goes to a key that is drawn, not to the first that asks."""

from collections import Counter

from shoal.coordinator.rules.backups import LAST_RANK, LateSlot, may_take

KEYS = [f"key-{number}" for number in range(6)]
SECRET = bytes(32)


def late(slot: int = 0, attempts: int = 1) -> LateSlot:
    return LateSlot(step=3, slot=slot, version=2, attempts=attempts, due_at=100.0)


def allowed(slot: LateSlot, now: float, keys: list[str] = KEYS, secret: bytes = SECRET) -> list[str]:
    return [key for key in keys if may_take(slot, key, keys, secret, now, poll_s=0.25)]


def test_at_first_only_the_drawn_key_may_take_it() -> None:
    for slot in range(50):
        assert len(allowed(late(slot), 100.0)) == 1


def test_each_key_is_drawn_about_as_often() -> None:
    drawn = Counter(allowed(late(slot), 100.0)[0] for slot in range(1200))
    assert set(drawn) == set(KEYS)
    assert all(140 < n < 260 for n in drawn.values())


def test_the_draw_depends_on_the_attempt_and_on_a_secret() -> None:
    first = [allowed(late(slot), 100.0) for slot in range(50)]
    assert first != [allowed(late(slot, attempts=2), 100.0) for slot in range(50)]
    assert first != [allowed(late(slot), 100.0, secret=b"\1" * 32) for slot in range(50)]


def test_a_drawn_key_that_does_not_ask_loses_its_turn_after_a_poll() -> None:
    assert [len(allowed(late(), 100.0 + 0.25 * polls)) for polls in range(4)] == [1, 2, 3, 4]


def test_idle_keys_delay_a_backup_by_a_few_polls_at_most() -> None:
    crowd = [f"idle-{number}" for number in range(64)]
    assert all(may_take(late(), key, crowd, SECRET, 100.0 + 0.25 * LAST_RANK, 0.25) for key in KEYS)
