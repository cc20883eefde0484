"""Routes of the owner, whose requests are signed by the run key."""

from typing import Annotated

from fastapi import APIRouter, Depends

from shoal.coordinator import control, views
from shoal.coordinator.http.service import Service, Signed
from shoal.coordinator.store.database import Connection
from shoal.protocol import api


def control_routes(service: Service) -> APIRouter:
    router, context = APIRouter(), service.context
    Caller = Annotated[Signed, Depends(service.caller)]

    @router.post("/v1/run/state")
    async def set_state(body: api.RunStateBody, caller: Caller) -> api.RunStateAnswer:
        context.require_owner(caller.key)
        return await service.write(
            caller, lambda connection: control.set_state(connection, context, body.state), rings=True
        )

    @router.post("/v1/bans")
    async def ban(body: api.BanBody, caller: Caller) -> api.WorkerView:
        context.require_owner(caller.key)

        def operation(connection: Connection) -> api.WorkerView:
            return views.worker_view(connection, context, control.ban(connection, context, body))

        return await service.write(caller, operation, rings=True)

    @router.post("/v1/bans/lift")
    async def unban(body: api.BanBody, caller: Caller) -> api.WorkerView:
        context.require_owner(caller.key)

        def operation(connection: Connection) -> api.WorkerView:
            return views.worker_view(connection, context, control.unban(connection, context, body))

        return await service.write(caller, operation)

    return router
