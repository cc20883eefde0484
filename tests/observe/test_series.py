from shoal.observe import series

from .runs import make_history, make_version


def test_metric_curve_places_a_version_at_the_step_that_made_it() -> None:
    curve = series.metric_curve(make_history(3), series.REWARD)
    assert [step for step, _ in curve] == [0, 1, 2]


def test_values_that_are_no_numbers_are_left_out() -> None:
    report: series.Report = {"reward_mean": float("nan"), "loss": "broken", "entropy": None, "mean_length": 20}
    assert series.number(report, series.REWARD) is None
    assert series.number(report, ("loss",)) is None
    assert series.number(report, series.ENTROPY) is None
    assert series.number(report, series.LENGTH) == 20


def test_phases_are_the_timed_metrics_without_totals_and_rates() -> None:
    report = {"time_train_s": 2.0, "time_publish_s": 0.5, "time_step_s": 9.0, "update_s": 1.9, "tokens_per_s": 800.0}
    assert series.phases(report) == {"train": 2.0, "publish": 0.5}


def test_phases_fall_back_on_what_the_trainer_measured() -> None:
    report = {"update_s": 1.9, "old_logprobs_s": 0.4, "step_s": 2.3, "tokens_per_s": 800.0, "loss": 0.1}
    assert series.phases(report) == {"update": 1.9, "old_logprobs": 0.4}


def test_phases_that_never_took_time_are_no_row() -> None:
    version = make_version(1).model_copy(update={"report": {"time_a_s": 1.0, "time_b_s": 0.0}})
    assert series.phase_table([version, make_version(0)]) == {"a": [1.0, 0.0]}


def test_time_per_step_needs_two_versions() -> None:
    assert series.seconds_per_step(make_history(0)) is None
    assert series.seconds_per_step(make_history(20)) is not None
