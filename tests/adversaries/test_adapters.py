"""Every cheat with adapters is caught on small slots, and honest work of the same slots is not."""

import pytest
import torch

from adversaries.adapters import ADAPTER_CHEATS, ADAPTER_SLOW_CHEATS, make_adapter_arena
from adversaries.arena import Arena, small_config
from shoal.protocol.verdicts import Reason

SLOTS = range(6)


@pytest.fixture(scope="session")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Arena:
    torch.set_num_threads(1)
    return make_adapter_arena(tmp_path_factory.mktemp("adapters"), small_config())


def test_honest_work_passes_every_check(arena: Arena) -> None:
    assert [arena.verify(submission).reasons for submission in arena.honest(list(SLOTS))] == [()] * len(SLOTS)


@pytest.mark.parametrize("name", ADAPTER_CHEATS)
def test_a_cheat_is_caught(arena: Arena, name: str) -> None:
    slots = list(SLOTS)
    trials = [
        arena.verify(forged)
        for honest, forged in zip(arena.honest(slots), ADAPTER_CHEATS[name](arena, slots), strict=True)
        if forged.data not in (honest.data, arena.proved(honest).data)
    ]
    assert trials, "the cheat did nothing"
    assert any(trial.reasons for trial in trials)


@pytest.mark.parametrize("name", ADAPTER_SLOW_CHEATS)
def test_a_slow_cheat_leaves_evidence_or_is_caught(arena: Arena, name: str) -> None:
    verified = [arena.verify(forged) for forged in ADAPTER_SLOW_CHEATS[name](arena, list(SLOTS))]
    assert all(trial.metrics is not None for trial in verified)


def test_an_engine_that_forgot_the_adapter_cannot_name_another_class(arena: Arena) -> None:
    (honest,) = arena.honest([0])
    header = honest.header.model_copy(update={"numerics_class": "torch/float32/cpu"})
    trial = arena.verify(type(honest)(honest.lease, header, honest.rollouts))
    assert trial.reasons == (Reason.HEADER,)
