"""What is worth training on: curated tasks, filtered demonstrations with a warm start, and a reward model from verified answers."""

from shoal.curation.band import Band, solve_rates
from shoal.curation.curate import CurationSettings, curate
from shoal.curation.demonstrations import (
    Demonstration,
    FilterSettings,
    filter_demonstrations,
    read_demonstrations,
    write_demonstration,
)
from shoal.curation.fitting import FitReport, FitSettings
from shoal.curation.overlap import Contamination, NearDuplicates
from shoal.curation.preferences import Pair, make_pairs, read_candidates
from shoal.curation.reward_training import REWARD_FIT, pair_accuracy, train_reward_model
from shoal.curation.sft import Example, WarmStart, encode, write_policy

__all__ = [
    "REWARD_FIT",
    "Band",
    "Contamination",
    "CurationSettings",
    "Demonstration",
    "Example",
    "FilterSettings",
    "FitReport",
    "FitSettings",
    "NearDuplicates",
    "Pair",
    "WarmStart",
    "curate",
    "encode",
    "filter_demonstrations",
    "make_pairs",
    "pair_accuracy",
    "read_candidates",
    "read_demonstrations",
    "solve_rates",
    "train_reward_model",
    "write_demonstration",
    "write_policy",
]
