from support.swarm import Swarm


def test_presence_ends_after_silence(swarm: Swarm) -> None:
    context = swarm.context
    assert not context.is_present("ann")
    context.seen("ann")
    swarm.clock.advance(30)
    assert context.is_present("ann")
    swarm.clock.advance(0.1)
    assert not context.is_present("ann")


def test_a_forgotten_key_is_not_present(swarm: Swarm) -> None:
    context = swarm.context
    context.seen("eve")
    context.forget("eve")
    assert not context.is_present("eve")


def test_a_slot_asks_for_at_most_all_its_samples_at_full_length(swarm: Swarm) -> None:
    assert swarm.context.slot_tokens == 2 * 2 * 40
