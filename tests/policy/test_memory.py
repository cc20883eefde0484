import pytest
import torch

from shoal.policy.memory import (
    CachePlan,
    NotEnoughMemoryError,
    ShareTooSmallError,
    available_bytes,
    cache_rows,
    check_weights,
    limit_memory,
)

GIB = 1 << 30


def test_rows_are_limited_by_what_is_left() -> None:
    plan = CachePlan(weights_bytes=GIB, row_bytes=GIB, available_bytes=10 * GIB)
    assert cache_rows(plan, wanted=4) == 4
    assert cache_rows(plan, wanted=64) == 7


def test_not_one_row_is_refused_with_the_plan() -> None:
    plan = CachePlan(weights_bytes=GIB, row_bytes=2 * GIB, available_bytes=2 * GIB)
    with pytest.raises(
        NotEnoughMemoryError, match=r"weights 1,024 MiB, cache 2,048 MiB per sequence, available 2,048 MiB"
    ):
        cache_rows(plan, wanted=1)


def test_weights_that_fit_pass() -> None:
    check_weights(weights_bytes=GIB, staging_bytes=GIB, available_bytes=2 * GIB, what="it")
    with pytest.raises(NotEnoughMemoryError, match="for it"):
        check_weights(weights_bytes=GIB, staging_bytes=GIB, available_bytes=2 * GIB - 1, what="it")
    with pytest.raises(NotEnoughMemoryError, match=r"staging 1,024 MiB, cache 1,024 MiB, available 2,048 MiB"):
        check_weights(weights_bytes=GIB, staging_bytes=GIB, available_bytes=2 * GIB, what="it", cache_bytes=GIB)


def test_this_machine_has_memory() -> None:
    assert available_bytes(torch.device("cpu")) > 1 << 20


def test_a_share_that_is_too_small_names_the_flag_and_is_not_tried_again() -> None:
    limit_memory(500_000_000)
    try:
        assert available_bytes(torch.device("cpu")) <= 500_000_000
        with pytest.raises(
            ShareTooSmallError, match=r"for it .*--memory 0\.5 is too little for this policy"
        ) as refused:
            check_weights(weights_bytes=GIB, staging_bytes=0, available_bytes=GIB - 1, what="it")
        assert refused.value.permanent
        with pytest.raises(ShareTooSmallError, match="--memory"):
            cache_rows(CachePlan(GIB, GIB, 0), wanted=1)
    finally:
        limit_memory(0)
    with pytest.raises(NotEnoughMemoryError) as plain:
        check_weights(weights_bytes=GIB, staging_bytes=0, available_bytes=0, what="it")
    assert not plain.value.permanent
