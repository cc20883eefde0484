"""Every route of the coordinator: method, path, handler, who may call it, what it reads, what it answers.

The dispatcher, the checks of signatures, roles and limits, and the API page all follow from this table.
"""

from types import NoneType

from starlette.responses import Response

from shoal.coordinator.http.auth import AnyKey, Anyone, AnyVisitor, Owner, OwnerCookie, Roles
from shoal.coordinator.http.handlers import owner, page, private, public, roles, uploads, workers
from shoal.coordinator.http.route import LARGE, PARQUET, Address, Json, Nothing, PlainJson, Route, UploadStream
from shoal.protocol import api, page_views
from shoal.rundir import ROLES

ANYONE, VISITOR, ANY_KEY, OWNER, BROWSER = Anyone(), AnyVisitor(), AnyKey(), Owner(), OwnerCookie()
TRAINER, VALIDATOR, EVALUATOR, ANY_ROLE = (
    Roles(("trainer",)),
    Roles(("validator",)),
    Roles(("evaluator",)),
    Roles(ROLES),
)
NOTHING = Nothing()
FILE_PATH = "/v1/submissions/{submission_id}/file"
JSONL, HTML, SSE, PROMETHEUS = "application/jsonl", "text/html", "text/event-stream", "text/plain"
CURVES = 3
WHOLE_LEDGER = 10
"""An export reads every entry; it counts as this many requests."""

ROUTES = (
    Route("GET", "/v1/descriptor", public.descriptor, ANYONE, NOTHING, Response),
    Route("GET", "/v1/status", public.status, ANYONE, NOTHING, api.StatusView),
    Route("GET", "/v1/history", public.history, ANYONE, NOTHING, api.HistoryView),
    Route("GET", "/v1/relays", public.relays, ANYONE, NOTHING, api.RelaysAnswer),
    Route("GET", "/v1/epochs", public.line, ANYONE, NOTHING, api.LineAnswer),
    Route("GET", "/v1/ledger", public.export_ledger, VISITOR, NOTHING, Response, media=JSONL, cost=WHOLE_LEDGER),
    Route("GET", "/", page.index, VISITOR, NOTHING, Response, HTML, is_listed=False),
    Route(
        "GET", "/worker/{key}", page.worker_index, VISITOR, Address(page_views.WorkerAddress), Response, HTML,
        is_listed=False,
    ),
    Route(
        "GET", "/page/{name}", page.page_file, VISITOR, Address(page_views.FileAddress), Response, HTML,
        is_listed=False,
    ),
    Route("GET", "/metrics", page.prometheus, ANYONE, NOTHING, Response, PROMETHEUS),
    Route("GET", "/v1/events", page.events, VISITOR, NOTHING, Response, SSE),
    Route("GET", "/v1/curves", page.show_curves, ANYONE, NOTHING, page_views.CurvesView, cost=CURVES),
    Route("GET", "/v1/workers", page.show_workers, ANYONE, NOTHING, page_views.WorkersView, cost=CURVES),
    Route(
        "GET", "/v1/workers/{key}", page.show_contributor, ANYONE, Address(page_views.WorkerAddress),
        page_views.ContributorView,
    ),
    Route("GET", "/v1/ledger/entries", page.show_ledger, VISITOR, Address(page_views.LedgerAddress), page_views.LedgerPage),
    Route("GET", "/v1/session", private.show_session, VISITOR, NOTHING, page_views.SessionView),
    Route("POST", "/v1/owner/session", private.open_session, VISITOR, PlainJson(page_views.SessionBody), Response),
    Route("POST", "/v1/owner/link", private.rotate_link, OWNER, NOTHING, page_views.LinkAnswer),
    Route("GET", "/v1/owner/steps/{step}", private.show_step, BROWSER, Address(page_views.StepAddress), page_views.OwnerStep),
    Route(
        "GET", "/v1/owner/groups/{step}/{slot}/{number}", private.show_group, BROWSER, Address(page_views.GroupAddress),
        page_views.OwnerGroupView,
    ),
    Route(
        "GET", "/v1/owner/timeline", private.show_timeline, BROWSER, Address(page_views.TimelineAddress),
        page_views.OwnerTimeline,
    ),
    Route(
        "GET", "/v1/owner/workers/{key}", private.show_worker, BROWSER, Address(page_views.WorkerAddress),
        page_views.OwnerWorker,
    ),
    Route("POST", "/v1/workers", workers.register, ANY_KEY, Json(api.RegisterBody), api.WorkerView),
    Route("POST", "/v1/heartbeat", workers.heartbeat, ANY_KEY, Json(api.HeartbeatBody), api.HeartbeatAnswer),
    Route("POST", "/v1/leases", workers.lease, ANY_KEY, Json(api.LeaseBody), api.LeaseAnswer),
    Route("DELETE", "/v1/leases/{lease_id}", workers.give_back, ANY_KEY, Address(api.LeaseAddress), NoneType),
    Route("POST", "/v1/relays", workers.announce_relay, ANY_KEY, Json(api.RelayBody), api.RelaysAnswer),
    Route("POST", "/v1/relays/reports", workers.report_relays, ANY_KEY, Json(api.RelayReportBody), api.RelaysAnswer),
    Route("PUT", "/v1/submissions/{lease_id}", uploads.submit, ANY_KEY, UploadStream(), api.SubmissionAnswer),
    Route("POST", "/v1/uploads", uploads.upload_url, ANY_KEY, Json(api.UploadBody), api.UploadAnswer),
    Route("POST", "/v1/uploads/done", uploads.uploaded, ANY_KEY, Json(api.UploadBody), api.SubmissionAnswer),
    Route("GET", FILE_PATH, roles.submission_file, ANY_ROLE, Address(api.SubmissionAddress), Response, PARQUET),
    Route("POST", "/v1/claims", roles.claim, VALIDATOR, Json(api.ClaimBody), api.ClaimAnswer, waits=True),
    Route("POST", "/v1/verdicts", roles.verdict, VALIDATOR, Json(api.VerdictBody, LARGE), api.VerdictAnswer),
    Route("POST", "/v1/traces", roles.trace, VALIDATOR, Json(page_views.AuditTrace, LARGE), NoneType),
    Route("GET", "/v1/batches/{step}", roles.batch, TRAINER, Address(api.BatchAddress), api.BatchAnswer, waits=True),
    Route("POST", "/v1/batches/screening", roles.screen, TRAINER, Json(api.ScreeningBody, LARGE), api.BatchRecord),
    Route("POST", "/v1/batches/recall", roles.recall_batch, TRAINER, Json(api.RecallBody), api.RecallAnswer),
    Route("POST", "/v1/versions", roles.publish, TRAINER, Json(api.VersionBody, LARGE), api.VersionAnswer),
    Route("POST", "/v1/evaluations", roles.evaluation, EVALUATOR, Json(api.EvaluationBody), NoneType),
    Route("POST", "/v1/run/state", owner.set_state, OWNER, Json(api.RunStateBody), api.RunStateAnswer),
    Route("POST", "/v1/run/recall", roles.recall_batch, OWNER, Json(api.RecallBody), api.RecallAnswer),
    Route("POST", "/v1/run/rewind", owner.rewind, OWNER, Json(api.RewindBody), api.RewindView),
    Route("POST", "/v1/bans", owner.ban, OWNER, Json(api.BanBody), api.WorkerView),
    Route("POST", "/v1/bans/lift", owner.unban, OWNER, Json(api.BanBody), api.WorkerView),
)  # fmt: skip
