"""Limits come from a file with evidence, or the run does not start."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.config import build_config
from shoal.errors import ConfigError
from shoal.policy import bundled_directory
from shoal.protocol.segments import sampled_places
from shoal.tasks import TextCodec
from shoal.validation import Calibration, Limits, load_calibration
from shoal.validation.calibration.evidence import SMALLEST_MARGIN_MAX, bounded_scales, margin_limit
from shoal.validation.calibration.forgeries import edited_token, forged_weights
from shoal.validation.calibration.limits import ModelIdentity
from shoal.validation.calibration.measure import calibrate, calibrate_run, table
from shoal.validation.calibration.work import Machine, Setting, Work, generate
from shoal.validation.flips import Draws, steerable_gap
from support.tiny_run import save_policy

FLOAT32 = Machine(dtypes=("float32",))
SETTINGS = (Setting(1, 8), Setting(1, 3))


def test_the_bundled_calibration_was_made_for_the_bundled_policy() -> None:
    load_calibration("bundled").require_model(ModelIdentity.of(bundled_directory()))


def test_another_architecture_or_other_base_weights_are_refused(tmp_path: Path) -> None:
    calibration = load_calibration("bundled")
    bundled = ModelIdentity.of(bundled_directory())
    with pytest.raises(ConfigError, match="another architecture") as caught:
        calibration.require_model(ModelIdentity.of(save_policy(tmp_path / "tiny", seed=0)))
    assert caught.value.hint is not None
    assert "shoal calibrate" in caught.value.hint
    with pytest.raises(ConfigError, match="another base weights"):
        calibration.require_model(bundled.model_copy(update={"base_weights": "0" * 64}))
    calibration.require_model(ModelIdentity(architecture=bundled.architecture))
    with pytest.raises(ConfigError, match="another identity"):
        calibration.model_copy(update={"identity": None}).require_model(bundled)


def test_the_bundled_calibration_covers_the_embedded_engine() -> None:
    calibration = load_calibration("bundled")
    assert calibration.limits("torch/float32/cpu") is not None
    assert calibration.limits("torch/float8/toaster") is None


def test_the_finest_classes_are_those_of_the_finest_compute_type_that_was_measured() -> None:
    known = load_calibration("bundled").classes["torch/float32/cpu"]

    def finest(*names: str) -> tuple[str, ...]:
        return Calibration(model="m", made_with="t", classes=dict.fromkeys(names, known)).finest()

    assert finest("torch/bfloat16/cpu", "torch/float32/cuda", "vllm/float32/cuda") == (
        "torch/float32/cuda",
        "vllm/float32/cuda",
    )
    assert finest("torch/bfloat16/cuda", "torch/float16/cuda", "torch/float8/cuda") == ("torch/float16/cuda",)
    assert finest("torch/float8/cuda", "torch/bfloat16/cuda") == ("torch/bfloat16/cuda",)


def test_the_limits_of_the_bundled_calibration_separate_honest_from_forged() -> None:
    classes = load_calibration("bundled").classes
    # In a coarse class the neighbour of a token may happen to be a rounding flip.
    assert classes["torch/float32/cpu"].evidence.forgeries["edited_token"].missed == 0
    for known in classes.values():
        assert known.evidence.honest_rejected == 0
        assert known.evidence.honest_margin_max < known.limits.margin_max
        assert known.evidence.honest_flips_per_1000 <= known.limits.flips_per_1000
        assert known.evidence.honest_logprob_error <= known.limits.logprob_error
        assert known.evidence.honest_exponent_mismatches <= known.limits.exponent_mismatches
        for name in ("int4", "temperature_x0.7", "constant_polynomials", "copied_proofs"):
            assert known.evidence.forgeries[name].missed == 0, name


def limits(**changes: float) -> Limits:
    known = load_calibration("bundled").limits("torch/float32/cpu")
    assert known is not None
    return known.model_copy(update=changes)


def test_what_remains_to_a_forger_is_bounded_by_noise_scale_and_largest_margin() -> None:
    assert limits(flip_scale=0.0).residual_bits_per_1000(0.1) == pytest.approx(0.1 * 1000 * 1e-4)
    wide = limits(flip_scale=1e6, margin_max=0.01)
    assert wide.residual_bits_per_1000(0.1) == pytest.approx(0.1 * 1000 * 0.01)
    steered = limits(flip_scale=0.03, margin_max=1.0).residual_bits_per_1000(0.1)
    assert steered == pytest.approx(0.1 * 1000 * 0.03 * steerable_gap())


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
    work = Work(directory, prompts, codec.eos_token_ids, temperature=1.0, max_new_tokens=12, submission_size=2)
    calibration = calibrate(
        work, model_name="tiny", machine=FLOAT32, settings=SETTINGS, honest_submissions=4, forged_submissions=2
    )
    (name, measured), *rest = calibration.classes.items()
    assert (name, rest) == ("torch/float32/cpu", [])
    evidence = measured.evidence
    assert (evidence.honest_submissions, evidence.honest_rejected) == (4, 0)
    assert evidence.honest_margin_max <= measured.limits.margin_max
    assert evidence.honest_flip_scale <= measured.limits.flip_scale
    assert sum(one.tokens for one in evidence.honest_flip_fit) == evidence.honest_tokens
    assert evidence.honest_drift_largest < 5
    assert evidence.forgeries["constant_polynomials"].missed == 0
    assert evidence.forgeries["temperature_x0.7"].submissions == 2
    lines = list(table(calibration))
    assert sum("honest" in line for line in lines) == 1
    assert lines[-1].startswith("torch/float32/cpu: ")
    assert "audits let pass" in lines[-1]


def test_episodes_are_calibrated_as_they_are_played_and_scored(tmp_path: Path) -> None:
    directory = save_policy(tmp_path / "model", seed=3)
    tree = {
        "model": {"path": str(directory)},
        "tasks": {"count": 4, "heldout": 2, "environment": "tasks.environments.own_environments:Echo"},
        "rollouts": {"group_size": 2, "tasks_per_slot": 1, "max_new_tokens": 160},
    }
    work = Work.of(build_config(tree), directory, 4)
    requests = work.requests("s", 4)
    made = generate(work.engine(), work, requests, 1.0, lambda done: None)
    played = [row for row in made if len(row.segment_lengths) > 1]
    assert played, "some have several turns"
    for row in edited_token(played[:1]):
        places = [at for at, (old, new) in enumerate(zip(played[0].tokens, row.tokens, strict=True)) if old != new]
        assert set(places) <= set(sampled_places(row.segment_lengths)), "an audit scores sampled tokens alone"
    calibration = calibrate(
        work, model_name="tiny", machine=FLOAT32, settings=SETTINGS, honest_submissions=4, forged_submissions=2
    )
    evidence = calibration.classes["torch/float32/cpu"].evidence
    assert (evidence.honest_submissions, evidence.honest_rejected) == (4, 0)
    assert evidence.forgeries["constant_polynomials"].missed == 0
    assert evidence.forgeries["edited_token"].missed == 0


def test_a_calibration_makes_no_more_submissions_than_its_bounds_need(tmp_path: Path) -> None:
    directory = save_policy(tmp_path / "model", seed=3)
    codec = TextCodec.from_directory(directory)
    prompts = [tuple(codec.encode(f"Compute {number}.")) for number in range(12)]
    work = Work(directory, prompts, codec.eos_token_ids, temperature=1.0, max_new_tokens=3, submission_size=2)
    shares: list[float] = []
    made = calibrate(
        work,
        model_name="tiny",
        settings=SETTINGS,
        honest_submissions=5,
        forged_submissions=7,
        on_share=shares.append,
    )
    evidence = made.classes["torch/float32/cpu"].evidence
    assert evidence.honest_submissions == 6, "five, rounded up to whole submissions of each setting"
    assert {forgery.submissions for forgery in evidence.forgeries.values()} == {7}
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_model_whose_weights_are_in_several_files_can_be_calibrated(tmp_path: Path) -> None:
    directory = save_policy(tmp_path / "model", seed=3)
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    half = len(weights) // 2
    for number, names in enumerate((list(weights)[:half], list(weights)[half:])):
        save_file({name: weights[name] for name in names}, directory / f"model-{number}.safetensors")
    with forged_weights(directory, lambda tensors: tensors) as forged:
        assert load_file(forged / "model.safetensors").keys() == weights.keys()


def test_a_new_kind_of_machine_is_added_beside_the_known_ones(tmp_path: Path) -> None:
    directory = save_policy(tmp_path / "model", seed=3)
    config = build_config(
        {
            "model": {"path": str(directory)},
            "tasks": {"count": 8, "heldout": 2},
            "rollouts": {"group_size": 2, "tasks_per_slot": 1, "max_prompt_tokens": 64, "max_new_tokens": 6},
        }
    )
    out = tmp_path / "calibration.json"
    calibrate_run(config, 2, out, machine=FLOAT32)
    first = load_calibration(str(out))
    calibrate_run(config, 2, out, machine=Machine(dtypes=("bfloat16",)), extend=True, honest_submissions=4)
    both = load_calibration(str(out))
    counts = [known.evidence.honest_submissions for known in both.classes.values()]
    assert counts[1] == 4 + 2 < counts[0], "each of four settings has whole submissions"
    assert {row.submissions for row in both.classes["torch/bfloat16/cpu"].evidence.forgeries.values()} == {3}
    assert list(both.classes) == ["torch/float32/cpu", "torch/bfloat16/cpu"]
    assert both.classes["torch/float32/cpu"] == first.classes["torch/float32/cpu"]
    other = build_config({"model": {"path": str(save_policy(tmp_path / "other", seed=4))}, "tasks": {"count": 8}})
    with pytest.raises(ConfigError, match="another base weights"):
        calibrate_run(other, 2, out, machine=FLOAT32, extend=True)


def test_vllm_is_calibrated_for_one_compute_type_at_a_time() -> None:
    with pytest.raises(ConfigError, match="one compute type at a time"):
        Machine("vllm", dtypes=("float32", "bfloat16")).check()
    Machine("vllm", dtypes=("float32",)).check()


def test_an_unknown_engine_cannot_be_calibrated() -> None:
    with pytest.raises(ConfigError, match="no engine 'abacus'"):
        Machine("abacus").check()


def test_two_honest_files_may_differ_by_the_flips_of_both() -> None:
    limits = load_calibration("bundled").classes["torch/float32/cpu"].limits
    fine, coarse = (
        limits.model_copy(update={"flips_per_1000": 0.01}),
        limits.model_copy(update={"flips_per_1000": 11.0}),
    )
    assert fine.flips_between(1000) <= 1
    assert fine.flips_between(0) == 0
    assert 22 < coarse.flips_between(1000) < 40


def test_a_sample_without_a_flip_does_not_make_the_next_flip_a_proof() -> None:
    generator = torch.Generator().manual_seed(0)
    gaps = torch.rand(2000, 4, generator=generator).double().sort(dim=-1).values * 4 + 0.2
    kept = Draws(torch.zeros(2000, dtype=torch.int64), gaps[:, :2], gaps[:, 2:])
    _, upper = bounded_scales(kept, logprob_error=0.2)
    assert upper > 0.02
    assert margin_limit(0.0, upper) > 10 * upper
    _, exact = bounded_scales(kept, logprob_error=1e-5)
    assert margin_limit(0.0, exact) == SMALLEST_MARGIN_MAX
