"""The public surface of each package: a name that appears, vanishes or stops resolving is a decision, not an accident."""

import importlib
import pkgutil
import re

import pytest

import shoal

PUBLIC = {
    "shoal.broadcast": """
        AdaptedBase DownloadProgress Head Manifest Neighbours Origin OriginServer OriginSettings Publication Relay RelayReport
        RelaySettings ServerLimits VersionEntry WeightClient WeightClientSettings WireTensor
    """,
    "shoal.config": """
        TASK_PART BroadcastConfig Change CoordinatorConfig EvaluationConfig LoraConfig ModelConfig RewardConfig
        RolloutConfig RunConfig Setting ShoalConfig TasksConfig TrainingConfig TrustConfig ValidationConfig all_keys all_settings
        build_config changes load_config to_toml
    """,
    "shoal.contributor": """
        Conditions Control Hours LimitWatch Limits Rest Wish WorkerStatus reason_to_rest
    """,
    "shoal.coordinator": """
        LedgerError Run Store balances check_secrets create_app run_coordinator verify_export
    """,
    "shoal.curation": """
        REWARD_FIT Band Contamination CurationSettings Demonstration Example FilterSettings FitReport
        FitSettings NearDuplicates Pair WarmStart curate encode filter_demonstrations make_pairs pair_accuracy
        read_candidates read_demonstrations solve_rates train_reward_model write_demonstration write_policy
    """,
    "shoal.evaluation": """
        Answer AnswerGenerator AnswerMetrics AnswersError Comparison ComparisonError EngineSpec Estimate
        Evaluator Journal Question SamplingSettings answer_metrics answer_tasks compare_answers
        comparison_json comparison_table estimate make_executor mean_error metrics_by_category metrics_json
        metrics_table pass_at_k read_answers write_answers
    """,
    "shoal.frames": """
        ActionTable Change CorpusError Dataset Editor FrameModel FrameShape FrameShapeError Habits Recording
        TextError backward_window build_dataset build_table committed damaged library_files lines_of
        parameter_count record session_keys standard_library
    """,
    "shoal.inspection": """
        Filter InspectionError Margins Record Recording add_margins as_json explain open_recording render_record
        render_summary sort_records
    """,
    "shoal.metrics": """
        METRICS EventLog Exporter Metric Record Report ReportingEventLog read_events serve_metrics silent
    """,
    "shoal.net": """
        WILDCARDS Connections Proxies RateLimit UnderWay address_block http_url raise_file_limit
    """,
    "shoal.observe": """
        Happening LiveView Summary ViewExtra draws_pictures failures headline progress_line render
        render_report startup_notice summarise unused_tools write_picture write_summary
    """,
    "shoal.policy": """
        ArchitectureError Completion Engine EngineBusyError GenerationRequest ModelError NotEnoughMemoryError
        RequestError ScoreRequest Scored Stream TorchEngine WeightsNotLoadedError WireCopy build_empty_model
        build_model bundled_directory load_weights resolve_model
    """,
    "shoal.proofs": """
        CHUNK_TOKENS MODULUS NOISE_BITS TOP_K ChunkDifference ParsedProof ProofError build_proofs choose_tokens
        compare_chunks gumbel_noise hash_bits hash_bits_np parse_proof proof_bytes split_chunks token_margins
    """,
    "shoal.protocol": """
        PROTOCOL_VERSION REASONS CoordinatorClient FileReference Reason Rollout RolloutFileError RolloutHeader
        RolloutLimits RunDescriptor Severity StepId TaskAssignment VersionId assign fetch_descriptor most_severe
        open_descriptor read_rollouts secret_commitment severity slot_seed step_commitment step_secret write_rollouts
    """,
    "shoal.simulation": """
        Behaviour EventClock LocalCoordinator MemoryCoordinator Outcome Scenario Work WorkerPlan attacks honest hostile
        simulate unequal
    """,
    "shoal.reproduction": """
        Evidence Reproduction ReproductionError StepOutcome headline read_evidence render_page reproduce
    """,
    "shoal.tasks": """
        CODEC_FILES THINK_CLOSE THINK_OPEN Info MalformedTaskError Outcome OwnVerifierError PromptStyle SandboxError
        Score Task TaskSet TaskSets TextCodec Verifier check_requirements is_exact is_learned length_penalty load_tasks
        register row_to_task score score_all verifiable verifier
    """,
    "shoal.training": """
        ADVANTAGES CORRECTIONS LOSSES BatchError CheckpointError Checkpoints DivergedError ExportError Group
        ModelShape ReplayError RunFacts Sample StepReport TokenBatch TokenLoss Trackers Trainer TrainerMemory
        UnsupportedModelError World build_trainer export_policy latest_checkpoint model_shape plan_memory recorded_groups
        replay
    """,
    "shoal.validation": """
        Calibration Checked Finding Limits RejectedError Validator audit check_claims load_calibration
    """,
    "shoal.worker": """
        CHEATERS WeightFollower Worker WorkerTotals
    """,
}

COMMAND_PACKAGES = {"shoal.cli", "shoal.host", "shoal.owner", "shoal.roles"}
"""Nobody builds on these: the commands are their interface."""


def in_house_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Constants, then classes, then functions; numbers by value: the order that the linter keeps."""
    rank = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return rank, [(int(part or -1), text) for text, part in re.findall(r"(\D*)(\d*)", name)]


def test_every_package_is_guarded() -> None:
    packages = {module.name for module in pkgutil.iter_modules(shoal.__path__, "shoal.") if module.ispkg}
    assert packages == set(PUBLIC) | COMMAND_PACKAGES


@pytest.mark.parametrize("package", PUBLIC)
def test_a_package_exports_what_it_promises(package: str) -> None:
    module = importlib.import_module(package)
    assert list(module.__all__) == PUBLIC[package].split()
    assert list(module.__all__) == sorted(module.__all__, key=in_house_order)
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert not missing


def test_every_package_says_what_it_is() -> None:
    for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
        if module.ispkg:
            assert (importlib.import_module(module.name).__doc__ or "").strip(), module.name
