"""The live view, the summary and the report of a run. Reads what the roles publish; never imports torch."""

from shoal.observe.live import LiveView, draws_pictures, progress_line, write_picture
from shoal.observe.report import render_report
from shoal.observe.summary import Summary, failures, headline, summarise, unused_tools, write_summary
from shoal.observe.view import Happening, ViewExtra, render, startup_notice

__all__ = [
    "Happening",
    "LiveView",
    "Summary",
    "ViewExtra",
    "draws_pictures",
    "failures",
    "headline",
    "progress_line",
    "render",
    "render_report",
    "startup_notice",
    "summarise",
    "unused_tools",
    "write_picture",
    "write_summary",
]
