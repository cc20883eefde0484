"""Limits come from a file with evidence, or the run does not start."""

from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.tasks import TextCodec
from shoal.validation import load_calibration
from shoal.validation.calibrate import calibrate
from worker.tiny_run import save_policy


def test_the_bundled_calibration_covers_the_embedded_engine() -> None:
    calibration = load_calibration("bundled")
    assert calibration.limits("torch/float32/cpu") is not None
    assert calibration.limits("torch/float8/toaster") is None


def test_the_limits_of_the_bundled_calibration_separate_honest_from_forged() -> None:
    for known in load_calibration("bundled").classes.values():
        assert known.evidence.honest_margin_max <= known.limits.margin_noise
        assert known.evidence.honest_logprob_error <= known.limits.logprob_error
        assert known.evidence.honest_exponent_mismatches <= known.limits.exponent_mismatches
        for forgery in known.evidence.forgeries.values():
            assert max(forgery.values()) > 1


@pytest.mark.parametrize("text", [None, "", "{}", '{"model": 1}', "not json"])
def test_a_file_that_is_no_calibration_is_refused_in_one_sentence(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "calibration.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="calibration"):
        load_calibration(str(path))


def test_a_new_calibration_accepts_honest_work_and_shows_each_forgery(tmp_path: Path) -> None:
    directory = save_policy(tmp_path / "model", seed=3)
    codec = TextCodec.from_directory(directory)
    prompts = [tuple(codec.encode(f"Compute {number}+{number}.")) for number in range(10, 14)]
    calibration = calibrate(
        directory,
        prompts,
        codec.eos_token_ids,
        model_name="tiny",
        temperature=1.0,
        max_new_tokens=12,
        settings=((1, 8), (1, 3)),
    )
    (name, measured), *rest = calibration.classes.items()
    assert (name, rest) == ("torch/float32/cpu", [])
    assert measured.evidence.honest_tokens > 0
    assert set(measured.evidence.forgeries) == {"weights_noise_1e-3", "int8", "temperature_x0.9", "temperature_x1.1"}
    assert measured.evidence.honest_margin_max <= measured.limits.margin_noise
