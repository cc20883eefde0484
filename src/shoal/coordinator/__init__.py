"""The trusted centre: HTTP API, store, leases, trust, batches, ledger."""

from shoal.coordinator.http.app import create_app
from shoal.coordinator.ledger import LedgerError, balances, check_secrets, verify_export
from shoal.coordinator.run import Run
from shoal.coordinator.server import run_coordinator
from shoal.coordinator.store.writer import Store

__all__ = [
    "LedgerError",
    "Run",
    "Store",
    "balances",
    "check_secrets",
    "create_app",
    "run_coordinator",
    "verify_export",
]
