from support.swarm import Swarm


def test_presence_ends_after_silence(swarm: Swarm) -> None:
    presence = swarm.run.presence
    assert not presence.is_present("ann")
    presence.seen("ann")
    swarm.clock.advance(30)
    assert presence.is_present("ann")
    swarm.clock.advance(0.1)
    assert not presence.is_present("ann")


def test_a_forgotten_key_is_not_present(swarm: Swarm) -> None:
    presence = swarm.run.presence
    presence.seen("eve")
    presence.forget("eve")
    assert not presence.is_present("eve")


def test_a_slot_asks_for_at_most_all_its_samples_at_full_length(swarm: Swarm) -> None:
    assert swarm.run.slot_tokens == 2 * 2 * 40
