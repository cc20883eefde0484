from coordinator.swarm import Swarm


def test_presence_ends_after_silence(swarm: Swarm) -> None:
    context = swarm.context
    assert not context.is_present("ann")
    context.seen("ann")
    swarm.clock.advance(30)
    assert context.is_present("ann")
    swarm.clock.advance(0.1)
    assert not context.is_present("ann")


def test_work_means_a_lease_granted_lately_to_somebody_who_is_present(swarm: Swarm) -> None:
    context = swarm.context
    for key in ("ann", "bob"):
        context.seen(key)
    assert not context.others_work("ann", proven=False)
    context.granted("ann", proven=True)
    assert not context.others_work("ann", proven=False)
    assert context.others_work("bob", proven=True)
    context.granted("bob", proven=False)
    assert context.others_work("ann", proven=False)
    assert not context.others_work("ann", proven=True)
    swarm.clock.advance(31)
    assert not context.others_work("ann", proven=False)
    context.seen("bob")
    assert context.others_work("ann", proven=False)
    swarm.clock.advance(30)
    context.seen("bob")
    assert not context.others_work("ann", proven=False)


def test_a_forgotten_key_neither_works_nor_is_present(swarm: Swarm) -> None:
    context = swarm.context
    context.seen("eve")
    context.granted("eve", proven=True)
    context.forget("eve")
    assert not context.is_present("eve")
    assert not context.others_work("ann", proven=False)


def test_a_slot_asks_for_at_most_all_its_samples_at_full_length(swarm: Swarm) -> None:
    assert swarm.context.slot_tokens == 2 * 2 * 40
