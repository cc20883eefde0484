"""What the contributor asks of a running worker, and what it answers: rest, leave, and the status in between.

A worker without limits never rests.
"""

from shoal.contributor import LimitWatch, WorkerStatus
from shoal.worker.console import WorkerConsole
from shoal.worker.totals import WorkerTotals
from shoal.worker.weights import WeightFollower


class Wishes:
    def __init__(
        self,
        watch: LimitWatch | None,
        weights: WeightFollower,
        console: WorkerConsole,
        totals: WorkerTotals,
        run_id: str,
    ) -> None:
        self.watch = watch
        self._weights, self._console, self._totals, self._run_id = weights, console, totals, run_id

    @property
    def is_resting(self) -> bool:
        return self.watch is not None and self.watch.is_resting

    @property
    def is_finishing(self) -> bool:
        return self.watch is not None and self.watch.is_finishing

    @property
    def is_grace_over(self) -> bool:
        return self.watch is not None and self.watch.is_grace_over

    def look(self) -> None:
        """A resting worker fetches nothing."""
        if self.watch is None:
            return
        self.watch.look()
        self._weights.hold(self.watch.is_resting)
        if self.watch.rest is not None:
            self._console.working(f"resting: {self.watch.rest.reason}")

    def tell(self) -> None:
        if self.watch is not None:
            self.watch.tell(self._status())

    def listen(self) -> None:
        """While the first version is being fetched nothing is held, so a wish to leave is met at once."""
        if self.watch is None:
            return
        self.look()
        self.watch.tell(WorkerStatus(activity="fetching the policy", run_id=self._run_id))
        if self.watch.is_finishing:
            raise SystemExit(0)

    def _status(self) -> WorkerStatus:
        account = self._console.account
        return WorkerStatus(
            state="working",
            activity=self._console.activity,
            run_id=self._run_id,
            submissions=self._totals.submissions,
            tokens=self._totals.tokens,
            account=f"{account.state}, {self._console.credit(account)}" if account else "",
        )
