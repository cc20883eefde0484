"""Recorded rollouts for people: read from a run directory or from rollout files, filtered, and shown with what is known of them."""

from shoal.inspection.filters import Filter, sort_records
from shoal.inspection.margins import add_margins
from shoal.inspection.records import InspectionError, Margins, Record, as_json, explain
from shoal.inspection.sources import Recording, open_recording
from shoal.inspection.view import render_record, render_summary

__all__ = [
    "Filter",
    "InspectionError",
    "Margins",
    "Record",
    "Recording",
    "add_margins",
    "as_json",
    "explain",
    "open_recording",
    "render_record",
    "render_summary",
    "sort_records",
]
