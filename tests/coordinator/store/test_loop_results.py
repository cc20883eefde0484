import asyncio
import threading
from collections.abc import Callable

import pytest

from shoal.coordinator.store.loop_results import LoopFuture, LoopResults
from shoal.errors import RefusedError

PATIENCE_S = 30


def in_thread(work: Callable[[], None]) -> None:
    """Runs to its end while the loop stands still, so that it cannot take anything out in between."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def settle_all(futures: list[LoopFuture[object]]) -> None:
    for number, future in enumerate(futures):
        future.set_result(number)


def test_many_results_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> tuple[list[object], int]:
        pending, wakeups = LoopResults(), []
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(call: Callable[[], None]) -> None:
            wakeups.append(call)
            wake(call)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        futures = [pending.expect() for _ in range(100)]
        in_thread(lambda: settle_all(futures))
        results = [await asyncio.wait_for(future.future, PATIENCE_S) for future in futures]
        return results, len(wakeups)

    assert asyncio.run(scenario()) == (list(range(100)), 1)


def test_a_result_that_comes_after_a_delivery_wakes_the_loop_again() -> None:
    async def scenario() -> list[object]:
        pending, results = LoopResults(), []
        for number in range(3):
            future = pending.expect()
            in_thread(lambda future=future, number=number: future.set_result(number))  # type: ignore[misc]
            results.append(await asyncio.wait_for(future.future, PATIENCE_S))
        return results

    assert asyncio.run(scenario()) == [0, 1, 2]


def test_a_refusal_reaches_its_caller_and_one_who_went_away_disturbs_nobody() -> None:
    async def scenario() -> object:
        pending = LoopResults()
        gone, refused, fine = pending.expect(), pending.expect(), pending.expect()
        gone.future.cancel()
        assert not gone.set_running_or_notify_cancel()

        def settle() -> None:
            gone.set_result("late")
            refused.set_exception(RefusedError("no", "Not like this."))
            fine.set_result("fine")

        in_thread(settle)
        with pytest.raises(RefusedError, match="Not like this"):
            await asyncio.wait_for(refused.future, PATIENCE_S)
        return await asyncio.wait_for(fine.future, PATIENCE_S)

    assert asyncio.run(scenario()) == "fine"


def test_a_result_for_a_loop_that_has_ended_does_not_stop_the_store() -> None:
    async def scenario() -> LoopFuture[object]:
        return LoopResults().expect()

    future = asyncio.run(scenario())
    future.set_result("late")
    assert not future.future.done()
