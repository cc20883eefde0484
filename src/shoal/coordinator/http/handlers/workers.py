"""What workers and relays ask for: register, send a heartbeat, lease a slot, give it back, announce a relay."""

import asyncio

from shoal.coordinator import views, workers
from shoal.coordinator.http.auth import Signed
from shoal.coordinator.http.service import Service
from shoal.coordinator.ledger.heads import HeadState
from shoal.coordinator.store.database import Connection, Transaction
from shoal.coordinator.work import leasing
from shoal.protocol import api

LEASES_HELD = 16
"""Requests that wait for work; more are answered at once, so that a change wakes only a few."""
MAY_END_SOON = ("no_work", "waiting_for_trainer")


async def register(service: Service, body: api.RegisterBody, caller: Signed) -> api.WorkerView:
    """Registers a key, or updates what is known of its machine."""
    run = service.run
    if await service.read_rows(lambda connection: workers.find_worker(connection, caller.key)) is None:
        service.count_new_key(caller.address)

    def operation(connection: Transaction) -> api.WorkerView:
        workers.register(connection, run, caller.key, body)
        return views.worker_view(connection, run, workers.require_worker(connection, caller.key))

    view = await service.write(caller, operation)
    run.metrics.event("registered", worker=caller.key, name=body.name)
    return view


async def heartbeat(service: Service, body: api.HeartbeatBody, caller: Signed) -> api.HeartbeatAnswer:
    """Says that a worker is alive. Spends no nonce and writes nothing durable; a replayed one changes nothing."""
    run = service.run
    service.gate.check_clock(caller.at, run.config.coordinator.gone_after_s)

    def look(connection: Connection) -> tuple[api.WorkerView, str, HeadState, int]:
        row = workers.admit(service.workers.find(connection, caller.key))
        run.presence.hear(caller.key, body, caller.stamp)
        kept = service.heads.state_of(connection, body.ledger_head, caller.key)
        view = views.worker_view(connection, run, row)
        return view, service.newest_head.value(connection), kept, service.epoch.value(connection)

    view, newest, kept, epoch = await service.read_rows(look)
    if view.state == "gone":
        await service.write(caller, lambda connection: workers.mark_seen(connection, run, caller.key))
        view, newest, kept, epoch = await service.read_rows(look)
    return api.HeartbeatAnswer(
        worker=view,
        relay_urls=views.live_relay_urls(run),
        interval_s=run.config.coordinator.heartbeat_s,
        ledger_head=newest,
        epoch=epoch,
        kept_head=kept,
    )


async def lease(service: Service, body: api.LeaseBody, caller: Signed) -> api.LeaseAnswer:
    """Grants slots, or says why there is none and when to ask again; waits up to `wait_s` for work."""

    def operation(connection: Transaction) -> api.LeaseAnswer:
        return leasing.lease(connection, service.run, caller.key, body)

    clock = asyncio.get_running_loop().time
    asked_at = clock()
    answer = await service.write(caller, operation)
    if body.wait_s > 0 and service.leases_held < LEASES_HELD:
        deadline = asked_at + body.wait_s
        while answer.reason in MAY_END_SOON and await _work_appears(service, caller.key, deadline):
            answer = await service.write_unsigned(operation)
        left_s = max(0.0, answer.retry_after_s - (clock() - asked_at))
        answer = answer.model_copy(update={"retry_after_s": left_s})
    service.run.metrics.count("leases_granted", len(answer.granted))
    return answer


async def _work_appears(service: Service, key: str, deadline: float) -> bool:
    """Whether there may be work for the key until then: a step begins or needs more groups, or the key has delivered a file.

    A new version ends the wait: the worker fetches it and asks with it."""
    clock, version = asyncio.get_running_loop().time, service.changes.version
    before = now = await service.read_rows(service.demand.value)
    with service.holding(key) as held:
        while not service.stopping and (left_s := deadline - clock()) > 0:
            await service.changes.wait_changed(version, left_s)
            version = service.changes.version
            now = await service.read_rows(service.demand.value)
            if now.newest_version != before.newest_version:
                return False
            if held.has_delivered or now.step > before.step or (now.wants_groups and not before.wants_groups):
                return True
    return False


async def give_back(service: Service, body: api.LeaseAddress, caller: Signed) -> None:
    """Gives a leased slot back, for another worker."""
    await service.write(
        caller, lambda connection: leasing.give_back(connection, service.run, caller.key, body.lease_id)
    )


async def announce_relay(service: Service, body: api.RelayBody, caller: Signed) -> api.RelaysAnswer:
    """Asks for a place in the list of relays; answers with the list."""
    known = service.run.presence.relays.known.get(caller.key)
    service.run.presence.relays.announce(caller.key, body, caller.stamp, caller.address)
    answer = views.relays(service.run, caller.key)
    is_news = known is None or known.body.newest_version != body.newest_version
    if is_news and answer.is_listed:  # others could fill the disk with events
        relay = service.run.presence.relays.known[caller.key]
        success = service.run.presence.relays.success(relay)
        measured = {} if success is None else {"success": round(success.share, 4), "reporters": success.reporters}
        service.run.metrics.event("relay", key=caller.key, **body.model_dump(), **measured)
    return answer


async def report_relays(service: Service, body: api.RelayReportBody, caller: Signed) -> api.RelaysAnswer:
    """What the caller measured of relays. It counts if the key is the owner's or has accepted work."""
    is_owners = caller.key in service.run.role_keys
    if is_owners or service.gate.is_proven(caller.key):
        reporter = caller.key if is_owners else caller.address
        service.run.presence.relays.report(reporter, body, is_owners=is_owners)
    return views.relays(service.run)
