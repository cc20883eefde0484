"""The owner's side of a run that may be anywhere: named by its run file, its directory, or its coordinator's address.

Commands are signed with the run key and sent to the coordinator. While none runs, those of a run on this host are applied to its
store directly, with the same functions, so that a drained or stopped run can be resumed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shoal.config import ShoalConfig
from shoal.coordinator import Run, control, ledger, views
from shoal.coordinator.batching import recalls, rewinds
from shoal.coordinator.page import session
from shoal.coordinator.server import begin, build_run
from shoal.coordinator.store import records
from shoal.coordinator.store.database import Transaction
from shoal.errors import ConfigError, UnavailableError
from shoal.identity import Keypair
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient, fetch_descriptor
from shoal.protocol.descriptor import RunDescriptor
from shoal.rundir import RunDirectory, is_address, load_run

Result = TypeVar("Result")
DEADLINE_S = 10.0
SHORTEST_PREFIX = 6


@dataclass(frozen=True)
class OwnedRun:
    url: str
    directory: RunDirectory | None
    key_file: Path | None
    deadline_s: float = DEADLINE_S

    def set_state(self, state: api.OwnerState) -> api.RunStateAnswer:
        return self._apply(
            lambda client: client.set_run_state(api.RunStateBody(state=state)),
            lambda connection, run: control.set_state(connection, run, state),
        )

    def ban(self, worker: str, reason: str) -> api.WorkerView:
        body = self._ban_body(worker, reason)
        return self._apply(
            lambda client: client.ban(body),
            lambda connection, run: views.worker_view(connection, run, control.ban(connection, run, body)),
        )

    def unban(self, worker: str, reason: str) -> api.WorkerView:
        body = self._ban_body(worker, reason)
        return self._apply(
            lambda client: client.unban(body),
            lambda connection, run: views.worker_view(connection, run, control.unban(connection, run, body)),
        )

    def recall(self, step: int, reason: str) -> api.RecallAnswer:
        body = api.RecallBody(step=step, reason=reason)
        return self._apply(
            lambda client: client.recall_by_hand(body),
            lambda connection, run: api.RecallAnswer(groups=recalls.recall(connection, run, body)),
        )

    def line(self) -> api.LineAnswer:
        """Which versions count."""
        return self._apply(lambda client: client.line(), lambda connection, run: rewinds.line(connection), signed=False)

    def rewind(self, body: api.RewindBody) -> api.RewindView:
        return self._apply(
            lambda client: client.rewind(body),
            lambda connection, run: rewinds.rewind(connection, run, body),
        )

    def run_key(self) -> Keypair:
        if self.key_file is None:
            raise ConfigError("The owner's commands are signed.", hint="Name the run key with --key, or the run file.")
        return Keypair.load(self.key_file)

    def run_id(self) -> str:
        return self.directory.descriptor().run_id if self.directory else self.status()[0].run_id

    def status(self) -> tuple[api.StatusView, api.HistoryView]:
        return self._apply(
            lambda client: (client.status(), client.history()),
            lambda connection, run: (views.status(connection, run), views.history(connection, run)),
            signed=False,
        )

    def page_link(self, *, rotate: bool = False) -> str:
        """The address of the owner's page. Only the host of the run directory knows its secret; a rotation tells a new one."""
        if rotate:
            secret = self._apply(lambda client: client.rotate_link().secret, _rotated_secret)
        elif self.directory is not None:
            secret = current_secret(self.directory)
        else:
            raise ConfigError(
                "The link's secret lies in the run directory.", hint="Run this there, or make a new link with --rotate."
            )
        return owner_link(self.url, secret)

    def ledger(self) -> bytes:
        """The ledger with its signed seal; from a coordinator that runs, without the entries of open steps."""
        return self._apply(lambda client: client.ledger_export(), _export, signed=False)

    def _ban_body(self, worker: str, reason: str) -> api.BanBody:
        try:
            return api.BanBody(worker=find_worker(worker, self.status()[0].workers), reason=reason)
        except ValueError:
            raise ConfigError("The reason must be one line of 1 to 200 letters.") from None

    def _apply(
        self,
        ask: Callable[[CoordinatorClient], Result],
        change: Callable[[Transaction, Run], Result],
        *,
        signed: bool = True,
    ) -> Result:
        try:
            if self._is_served():
                with self._client(signed) as client:
                    return ask(client)
        except UnavailableError:
            if self.directory is None:
                raise
        assert self.directory is not None
        run = build_run(self.directory)
        with records.open_store(self.directory, create=True) as store:
            store.write(lambda connection: begin(connection, run))
            return store.write(lambda connection: change(connection, run))

    def _is_served(self) -> bool:
        """Whether the coordinator at the address is this run's: another run may listen there after this one was stopped."""
        if self.directory is None:
            return True
        _, descriptor = fetch_descriptor(self.url, None, deadline_s=self.deadline_s)
        return descriptor.run_id == self.directory.descriptor().run_id

    def _client(self, signed: bool) -> CoordinatorClient:
        if not signed:
            return CoordinatorClient(self.url, None, deadline_s=self.deadline_s)
        keypair = self.run_key()
        _, descriptor = fetch_descriptor(self.url, None, deadline_s=self.deadline_s)
        return CoordinatorClient.for_run(descriptor, keypair, self.url, deadline_s=self.deadline_s)


def _export(connection: Transaction, run: Run) -> bytes:
    extent = ledger.whole(connection)
    seal = ledger.seal(run.keypair, run.descriptor.run_id, extent, run.clock())
    return b"".join([*ledger.page(connection, 0, extent.entries), seal])


def _rotated_secret(connection: Transaction, run: Run) -> str:
    return session.link_secret(run.secret, run.descriptor.run_id, session.rotate(connection))


def current_secret(directory: RunDirectory) -> str:
    """The secret of the owner's link, whether the coordinator runs or not."""
    rotation = 0
    if records.has_store(directory):
        with records.open_store(directory) as store:
            rotation = store.read(session.rotation_of)
    return session.link_secret(directory.secret(), directory.descriptor().run_id, rotation)


def owner_link(url: str, secret: str) -> str:
    """The secret is in the fragment, which a browser sends to nobody."""
    return f"{url.rstrip('/')}/#owner={secret}"


def find_run(where: str | None, key_file: Path | None = None) -> OwnedRun:
    """The run that somebody means by a run file, a run directory, an address, or nothing: the default directory."""
    if where is not None and is_address(where):
        return OwnedRun(where, None, key_file)
    directory = find_directory(where)
    return OwnedRun(directory.config().coordinator_url, directory, key_file or directory.key_file("run"))


def find_directory(where: str | None) -> RunDirectory:
    directory = RunDirectory(load_run(where).run.dir)
    directory.descriptor()  # refuses a directory that holds no run
    return directory


def find_address(where: str) -> tuple[str, str | None]:
    """The coordinator's address of a run and, where its directory is on this host, the run's key."""
    if is_address(where) or not (Path(where).exists() or where.endswith(".toml")):
        return where, None  # what is no address is refused by the role that joins
    run = find_run(where)
    assert run.directory is not None
    return run.url, run.directory.descriptor().run_key


def find_rules(where: str) -> ShoalConfig | RunDescriptor:
    """What a run asks of a policy: tasks, rollouts, reward. From its settings, or from the descriptor behind an address."""
    if is_address(where):
        return fetch_descriptor(where, None, deadline_s=DEADLINE_S)[1]
    return load_run(where)


def find_worker(worker: str, known: Sequence[api.WorkerView]) -> str:
    """The key that somebody means by a key, the beginning of one, or a name that only one worker has."""
    prefix = worker.rstrip("…")
    found = [
        view
        for view in known
        if view.name == worker or (len(prefix) >= SHORTEST_PREFIX and view.key.startswith(prefix))
    ]
    if len(found) == 1:
        return found[0].key
    if not found:
        raise ConfigError(f"No worker {worker!r} has registered.", hint="`shoal run status` shows names and keys.")
    keys = ", ".join(f"{view.key[:16]} ({view.state})" for view in found[:8])
    raise ConfigError(f"{worker!r} may mean {len(found)} workers.", hint=f"Give more of the key: {keys}.")
