"""What the owner asks for, with requests signed by the run key: pause, drain, rewind, ban."""

from shoal.coordinator import control, views
from shoal.coordinator.batching import rewinds
from shoal.coordinator.http.auth import Signed
from shoal.coordinator.http.service import Service
from shoal.coordinator.store.database import Transaction
from shoal.protocol import api


async def set_state(service: Service, body: api.RunStateBody, caller: Signed) -> api.RunStateAnswer:
    """Runs, pauses or drains the run."""
    answer = await service.write(
        caller, lambda connection: control.set_state(connection, service.run, body.state), notifies=True
    )
    service.run.metrics.event("run_state", state=answer.run_state)
    return answer


async def rewind(service: Service, body: api.RewindBody, caller: Signed) -> api.RewindView:
    """Returns the run to a version; everything after it is void, and a new epoch begins."""
    return await service.write(caller, lambda connection: rewinds.rewind(connection, service.run, body), notifies=True)


async def ban(service: Service, body: api.BanBody, caller: Signed) -> api.WorkerView:
    """Bans a key; its unused work is withdrawn."""

    def operation(connection: Transaction) -> api.WorkerView:
        return views.worker_view(connection, service.run, control.ban(connection, service.run, body))

    return await service.write(caller, operation, notifies=True)


async def unban(service: Service, body: api.BanBody, caller: Signed) -> api.WorkerView:
    """Lifts a ban."""

    def operation(connection: Transaction) -> api.WorkerView:
        return views.worker_view(connection, service.run, control.unban(connection, service.run, body))

    return await service.write(caller, operation)
