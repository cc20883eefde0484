"""Policies that read frames and predict actions: editor, actions, sessions, and the recurrence-complete model."""

from shoal.frames.actions import ActionTable, build_table
from shoal.frames.corpus import Change, CorpusError, committed, damaged, library_files, standard_library
from shoal.frames.dataset import Dataset, build_dataset
from shoal.frames.model import FrameModel, FrameShape, FrameShapeError, parameter_count
from shoal.frames.sessions import Habits, Recording, record, session_keys
from shoal.frames.streaming import backward_window
from shoal.tasks.editor import Editor, TextError, lines_of

__all__ = [
    "ActionTable",
    "Change",
    "CorpusError",
    "Dataset",
    "Editor",
    "FrameModel",
    "FrameShape",
    "FrameShapeError",
    "Habits",
    "Recording",
    "TextError",
    "backward_window",
    "build_dataset",
    "build_table",
    "committed",
    "damaged",
    "library_files",
    "lines_of",
    "parameter_count",
    "record",
    "session_keys",
    "standard_library",
]
