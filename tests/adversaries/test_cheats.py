"""Every cheat is caught on small slots, and honest work of the same slots is not."""

import pytest
import torch

from adversaries.arena import Arena, joint, make_arena, small_config
from adversaries.cheats import CHEATS, SLOW_CHEATS
from shoal.protocol.verdicts import Reason
from shoal.validation import check_claims

SLOTS = range(6)


@pytest.fixture(scope="session")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Arena:
    torch.set_num_threads(1)
    return make_arena(tmp_path_factory.mktemp("arena"), small_config())


def test_honest_work_passes_every_check(arena: Arena) -> None:
    assert [arena.verify(submission).reasons for submission in arena.honest(list(SLOTS))] == [()] * len(SLOTS)


def test_proving_honest_tokens_again_changes_nothing_that_is_verified(arena: Arena) -> None:
    (honest,) = arena.honest([0])
    assert arena.verify(arena.proved(honest)).reasons == ()


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_caught(arena: Arena, name: str) -> None:
    slots = list(SLOTS)
    trials = [
        arena.verify(forged)
        for honest, forged in zip(arena.honest(slots), CHEATS[name](arena, slots), strict=True)
        if forged.data != honest.data
    ]
    assert trials, "the cheat did nothing"
    assert any(trial.reasons for trial in trials)


def test_only_the_draw_reveals_a_worker_that_proves_with_the_true_policy(arena: Arena) -> None:
    for forged in CHEATS["smaller_model_true_proofs"](arena, [0]):
        assert arena.verify(forged).reasons == (Reason.SAMPLING,)


@pytest.mark.parametrize("name", SLOW_CHEATS)
def test_a_slow_cheat_leaves_evidence_or_is_caught(arena: Arena, name: str) -> None:
    verified = [arena.verify(forged) for forged in SLOW_CHEATS[name](arena, list(SLOTS))]
    assert all(trial.metrics is not None for trial in verified)


@pytest.mark.parametrize("name", ["int8", "one_token", "stale_by_1", "channel_means"])
def test_audits_of_single_groups_add_up_to_what_a_validator_finds_in_several(arena: Arena, name: str) -> None:
    for forged in (CHEATS | SLOW_CHEATS)[name](arena, [0, 1]):
        checked = check_claims(forged.data, forged.claim(), arena.workload, arena.validator.vocab_size)
        numerics_class, alone = forged.header.numerics_class, arena.verify(forged).groups
        for drawn in ([0], [0, 2], [0, 1, 2]):
            reasons, metrics = arena.audit(checked, numerics_class, drawn)
            found = joint([alone[group] for group in drawn], arena.limits(numerics_class))
            assert set(found.reasons) == set(reasons)
            assert (found.metrics.tokens, found.metrics.rounding_flips) == (metrics.tokens, metrics.rounding_flips)
            assert found.metrics.drift_llrs == pytest.approx(metrics.drift_llrs)
