"""What is left to read when a run is over: the checked ledger, metrics, a report, and a picture of the last view."""

from collections.abc import Sequence

from shoal.config import ShoalConfig, to_toml
from shoal.coordinator.ledger import LedgerError, verify_export
from shoal.errors import ShoalError, UnavailableError
from shoal.files import write_atomic
from shoal.observe import Summary, ViewExtra, render_report, write_picture, write_summary
from shoal.protocol.api import HistoryView, StatusView
from shoal.protocol.client import CoordinatorClient
from shoal.rundir import RunDirectory

LEDGER_DEADLINE_S = 10.0


def save_ledger(directory: RunDirectory, url: str) -> bool:
    """Whether the ledger, saved in the run directory, is whole and signed by the coordinator."""
    try:
        with CoordinatorClient(url, None, deadline_s=LEDGER_DEADLINE_S) as client:
            export = client.ledger_export()
        write_atomic(directory.ledger_file, export)
        verify_export(export.splitlines(), directory.descriptor().coordinator_key)
    except LedgerError:
        return False
    except ShoalError as error:
        raise UnavailableError(f"The ledger could not be read: {error}") from error
    return True


def write_outcome(
    directory: RunDirectory,
    config: ShoalConfig,
    summary: Summary,
    status: StatusView,
    history: HistoryView,
    title: str,
    problems: Sequence[str] = (),
) -> str:
    """Writes the files and says where they are."""
    write_picture(directory.view_file, status, history, ViewExtra(title), columns=110)
    write_summary(directory.summary_file, summary)
    name = title[:1].upper() + title[1:]
    page = render_report(summary, status, history, title=name, problems=problems, settings_toml=to_toml(config))
    write_atomic(directory.report_file, page.encode())
    return f"report: {directory.report_file}   metrics: {directory.summary_file}"
