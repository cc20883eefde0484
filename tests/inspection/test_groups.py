"""The owner's group: texts and reasons of honest files, and words for files that are missing, broken or hostile."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from inspection.recorded import HONEST, STEP, make_run
from shoal.errors import RefusedError
from shoal.inspection import groups
from shoal.inspection.groups import AUDITED, UNAUDITED, GroupReader
from shoal.inspection.turns import segments
from shoal.protocol.page_views import AuditTrace, TraceRow
from shoal.protocol.rollouts import Rollout, RolloutHeader, RolloutLimits, read_rollouts, write_rollouts
from shoal.rundir import RunDirectory
from support.tiny_run import save_policy


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    model = save_policy(tmp_path_factory.mktemp("models") / "tiny", seed=0)
    return make_run(model, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def reader(run: RunDirectory) -> GroupReader:
    return GroupReader(run)


def recorded(run: RunDirectory) -> tuple[RolloutHeader, list[Rollout]]:
    data = (run.submissions / "honest-file.parquet").read_bytes()
    return read_rollouts(data, RolloutLimits.of(run.descriptor()))


def upload(run: RunDirectory, name: str, change: Callable[[Rollout], Rollout]) -> str:
    """A file whose rows a worker changed."""
    header, rows = recorded(run)
    (run.submissions / f"{name}.parquet").write_bytes(write_rollouts(header, [change(row) for row in rows]))
    return name


def test_a_group_has_its_prompt_its_completions_and_why_they_were_rewarded(
    run: RunDirectory, reader: GroupReader
) -> None:
    text = reader.read("honest-file", 0)
    _, rows = recorded(run)
    assert (text.task_id, [one.sample for one in text.completions]) == (rows[0].task_id, [0, 1])
    first = text.completions[0]
    assert [turn.speaker for turn in first.turns] == ["prompt", "policy"]
    assert first.turns[0].text
    assert first.why
    assert (first.reward, first.reward_from, first.length) == (rows[0].reward, "worker", len(rows[0].output_tokens))
    assert [token.logprob for token in first.turns[1].tokens] == pytest.approx(rows[0].output_logprobs)
    assert "".join(token.text for token in first.turns[1].tokens) == first.turns[1].text
    assert text.overlay.endswith(UNAUDITED)


def test_the_overlay_of_an_audit_belongs_to_its_group_and_sample(run: RunDirectory, reader: GroupReader) -> None:
    name = upload(run, "audited-file", lambda row: row)
    rows = [TraceRow(group=1, sample=1, margins=[0.5, 0.0], entropies=[1.5])]
    trace = AuditTrace(submission_id="0" * 32, rows=rows)
    (run.submissions / f"{name}.trace").write_text(trace.model_dump_json())
    text = reader.read(name, 1)
    assert text.overlay.endswith(AUDITED)
    unseen, seen = (one.turns[1].tokens for one in text.completions)
    assert {token.margin for token in unseen} == {None}
    assert [(token.margin, token.entropy) for token in seen[:2]] == [(0.5, 1.5), (0.0, None)]
    assert reader.read(name, 0).overlay.endswith(UNAUDITED)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"submission_id": 1, "rows": []}', b"\xff\x00"])
def test_a_broken_trace_is_no_trace(run: RunDirectory, reader: GroupReader, content: bytes) -> None:
    name = upload(run, "broken-trace", lambda row: row)
    (run.submissions / f"{name}.trace").write_bytes(content)
    assert reader.read(name, 0).overlay.endswith(UNAUDITED)


def test_what_is_not_there_is_said_in_words(reader: GroupReader) -> None:
    with pytest.raises(RefusedError, match="no longer here"):
        reader.read("removed", 0)
    with pytest.raises(RefusedError, match="no such group"):
        reader.read("honest-file", 99)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not a parquet file" * 99])
def test_a_file_that_holds_no_rollouts_is_said_in_words(run: RunDirectory, reader: GroupReader, content: bytes) -> None:
    (run.submissions / "junk.parquet").write_bytes(content)
    with pytest.raises(RefusedError, match="holds no rollouts of this run") as caught:
        reader.read("junk", 0)
    assert caught.value.status == 404


def test_rows_that_no_honest_worker_writes_are_shown_and_stop_nothing(run: RunDirectory, reader: GroupReader) -> None:
    def hostile(row: Rollout) -> Rollout:
        tokens = [-1, 2**31 - 1, *row.output_tokens[:2], -(2**31)]
        return replace(
            row, task_id="<script>alert(1)</script>", output_tokens=tokens, segment_lengths=[5],
            output_logprobs=[math.nan, -math.inf], reward=math.nan, finish_reason="\x1b[31m",
        )  # fmt: skip

    text = reader.read(upload(run, "hostile", hostile), 0)
    assert text.task_id == "<script>alert(1)</script>"
    (first, _) = text.completions
    assert len(first.turns[1].tokens) == 5
    assert first.why == "its task is not in the task set of the run"
    sent = json.loads(first.model_dump_json())
    assert (sent["reward"], sent["turns"][1]["tokens"][0]["logprob"]) == (None, None)


def test_negative_tokens_of_a_known_task_leave_no_reason_and_stop_nothing(
    run: RunDirectory, reader: GroupReader
) -> None:
    name = upload(run, "negative", lambda row: replace(row, output_tokens=[-5] * len(row.output_tokens)))
    (first, _) = reader.read(name, 0).completions
    assert (first.turns[1].text, first.why) == ("", "")


def test_an_episode_is_shown_as_a_conversation(
    run: RunDirectory, reader: GroupReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same code for one segment and for several."""
    monkeypatch.setattr(groups, "segments_of", lambda row: segments(row.output_tokens, [2, 1, 1]))
    tokens = {"output_tokens": [70, 71, 72, 73], "segment_lengths": [4]}  # a run without environments admits one
    name = upload(run, "episode", lambda row: replace(row, **tokens, output_logprobs=[-1, -2, -3]))  # type: ignore[arg-type]
    (first, _) = reader.read(name, 0).completions
    assert [turn.speaker for turn in first.turns] == ["prompt", "policy", "environment", "policy"]
    assert [[token.logprob for token in turn.tokens] for turn in first.turns] == [[], [-1, -2], [], [-3]]
    assert first.length == 3, "sampled tokens"


def test_two_readers_of_one_page_do_not_disturb_each_other(reader: GroupReader) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: reader.read("honest-file", number % 2).task_id, range(16)))
    assert found[::2] == [found[0]] * 8
    assert found[1::2] == [found[1]] * 8


def test_the_file_names_of_this_test_are_of_the_recorded_run(run: RunDirectory) -> None:
    header, _ = recorded(run)
    assert (header.step, header.worker_key) == (STEP, HONEST)
