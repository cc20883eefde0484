"""What anybody may fetch: the page and its files, curves, workers, ledger, metrics; and what none of it may hold."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.coordinator.http.auth import Anyone, AnyVisitor
from shoal.coordinator.http.table import ROUTES
from shoal.coordinator.page.files import page_files
from shoal.coordinator.page.session import link_secret
from shoal.protocol import api
from shoal.protocol.verdicts import Reason
from support.backups import CONFIG, two_files
from support.samples import RUN_SECRET, keypair
from support.swarm import Swarm, running, small_config

SCRIPT = "<script>alert(1)</script>"
NEVER_PUBLIC = (
    "drift", "margin", "audit_rate", "audit_drawn", "audited", "slot_seed", "seed", "is_backup", "expires_at",
    "lease_id", "prompt", "completion", "logprob", "anomalies", "clean_audits",
)  # fmt: skip
"""Names of fields that no public answer may have."""
SETTINGS = {"unaudited_share"}
"""Of the run, from which anyone recomputes the audits."""


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    """Accepted, rejected, pending and leased work of an open step, with a ban whose detail names a measurement."""
    with running(tmp_path, small_config(run={"steps": 50})) as swarm:
        swarm.publish(0)
        ann, eve = swarm.join("ann", "eve")
        ann.register(api.RegisterBody(name=SCRIPT, numerics_class="torch/float32/cpu", tokens_per_s=100.0))
        swarm.produce(ann, useful=1)
        swarm.work(eve)
        claim = swarm.claim()
        metrics = api.AuditMetrics(tokens=10, margin_max=0.625, drift_llrs=[3.5])
        swarm.send_verdict(
            api.VerdictBody(
                claim_id=claim.claim_id, submission_id=claim.submission_id, accepted=False, audited_groups=[0, 1],
                reasons=[Reason.SAMPLING], detail="7 tokens lost by 0.625", metrics=metrics,
            )
        )  # fmt: skip
        swarm.clock.advance(1)
        swarm.work(ann)
        swarm.lease(ann)
        yield swarm


def fields_of(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield str(name)
            yield from fields_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from fields_of(inner)


PUBLIC = [
    route.path
    for route in ROUTES
    if isinstance(route.access, Anyone | AnyVisitor) and route.media == "application/json" and route.method == "GET"
]


def test_the_public_answers_are_known() -> None:
    assert set(PUBLIC) == {
        "/v1/descriptor", "/v1/status", "/v1/history", "/v1/relays", "/v1/curves", "/v1/workers", "/v1/workers/{key}",
        "/v1/ledger/entries", "/v1/session", "/v1/epochs",
    }  # fmt: skip


@pytest.mark.parametrize("path", [path for path in PUBLIC if path != "/v1/descriptor"])
def test_no_public_answer_holds_what_only_the_owner_may_know(swarm: Swarm, path: str) -> None:
    for name in ("ann", "eve"):
        answer = swarm.http.get(path.replace("{key}", keypair(name).public))
        assert answer.status_code == 200
        found = set(fields_of(answer.json()))
        assert not {field for field in found - SETTINGS for never in NEVER_PUBLIC if never in field}, path
        assert "0.625" not in answer.text
        assert "3.5" not in re.findall(r"[\d.]+", answer.text)


def test_no_public_answer_tells_two_keys_of_one_slot(swarm: Swarm) -> None:
    """Slots of an open step would show who has a backup lease."""
    for path in PUBLIC:
        answer = swarm.http.get(path.replace("{key}", keypair("ann").public))
        assert "slot" not in set(fields_of(answer.json())) or path == "/v1/descriptor"


def test_the_export_of_the_ledger_holds_nothing_of_the_open_step(swarm: Swarm) -> None:
    lines = swarm.http.get("/v1/ledger").content.splitlines()
    bodies = [json.loads(json.loads(line)["body"]) for line in lines[:-1]]
    found = {field for body in bodies for field in fields_of(body)}
    assert not {field for field in found for never in ("drift", "margin", "drawn", "slot_seed") if never in field}
    assert not [body for body in bodies if "lease" in body or "slot" in body]


def test_metrics_do_not_tell_which_file_was_audited(swarm: Swarm) -> None:
    """A verdict takes long if its file was audited."""
    assert "shoal_verdict_seconds_count 0.0" in swarm.http.get("/metrics").text
    swarm.accept()
    assert "shoal_verdict_seconds_count 0.0" in swarm.http.get("/metrics").text
    swarm.sweep()
    swarm.publish(1)
    assert "shoal_verdict_seconds_count 3.0" in swarm.http.get("/metrics").text


def test_metrics_are_prometheus_text_without_names_of_people(swarm: Swarm) -> None:
    answer = swarm.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'shoal_verdicts_total{outcome="rejected"} 1.0' in answer.text
    assert 'shoal_workers{state="banned"} 1.0' in answer.text
    assert "shoal_leases_total 4.0" in answer.text
    assert not [key for key in ("ann", "eve") if keypair(key).public in answer.text]


def test_the_page_and_its_files_forbid_everything_foreign(swarm: Swarm) -> None:
    for path in ("/", f"/worker/{keypair('ann').public}", *(f"/page/{name}" for name in page_files())):
        answer = swarm.http.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = swarm.http.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_the_page_names_no_other_host_and_holds_no_inline_code() -> None:
    index = page_files()["index.html"].content.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|style=", index)
    for name, file in page_files().items():
        text = file.content.decode()
        if name not in ("uplot.js", "uplot-license.txt", "icon.svg"):
            assert "://" not in text, name
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name
    assert "MIT" in page_files()["uplot-license.txt"].content.decode()


@pytest.mark.parametrize("name", ["nothing.js", "..%2Findex.html", "%2e%2e%2fsession.py"])
def test_only_files_of_the_page_are_served(swarm: Swarm, name: str) -> None:
    assert swarm.http.get(f"/page/{name}").status_code in (404, 422)


def test_a_name_with_markup_stays_a_string(swarm: Swarm) -> None:
    answer = swarm.http.get(f"/v1/workers/{keypair('ann').public}")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["worker"]["name"] == SCRIPT


def test_the_contributor_reads_verdicts_in_words(swarm: Swarm) -> None:
    eve = swarm.http.get(f"/v1/workers/{keypair('eve').public}").json()
    assert eve["submissions"][0]["words"] == "Rejected: a token is not the one that the seed selects from the policy."
    assert eve["raises"] == "Only the run's owner can lift a ban."
    ann = swarm.http.get(f"/v1/workers/{keypair('ann').public}").json()
    assert [one["outcome"] for one in ann["submissions"]] == ["waiting", "accepted"]
    assert ann["raises"] == "1 more clean audit make this key active."
    assert ann["leases"][0]["step"] == 0
    assert ann["tokens_total"] == [20]
    assert ann["join_command"].startswith("shoal work ")


def test_an_unknown_key_is_refused_in_words(swarm: Swarm) -> None:
    answer = swarm.http.get(f"/v1/workers/{'0' * 64}")
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_worker")
    assert swarm.http.get("/v1/workers/nonsense").status_code == 422


def test_the_ledger_is_shown_newest_first_and_checked(swarm: Swarm) -> None:
    page = swarm.http.get("/v1/ledger/entries?limit=3").json()
    assert [one["seq"] for one in page["entries"]] == [page["shown"] - 1, page["shown"] - 2, page["shown"] - 3]
    assert (page["verified_entries"], page["problem"]) == (page["total"], "")
    assert page["shown"] < page["total"], "verdicts of the open step"
    beyond = swarm.http.get(f"/v1/ledger/entries?before={page['total']}").json()["entries"]
    assert beyond[0]["seq"] == page["shown"] - 1
    first = swarm.http.get("/v1/ledger/entries?before=1").json()["entries"]
    assert [one["kind"] for one in first] == ["run"]


def test_a_ledger_that_was_changed_is_called_broken(swarm: Swarm) -> None:
    swarm.write(lambda connection: connection.execute("UPDATE ledger SET body='{}' WHERE seq=2"))
    page = swarm.http.get("/v1/ledger/entries").json()
    assert page["verified_entries"] == 2
    assert page["problem"].startswith("Entry 2 does not continue the chain")


def test_curves_have_one_value_per_step_and_intervals(swarm: Swarm) -> None:
    report: dict[str, api.Metric] = {"reward_mean": 0.5, "reward_std": 0.5, "samples": 100, "entropy": float("nan")}
    swarm.accept()
    swarm.sweep()
    swarm.record(0)
    swarm.client("trainer").publish(
        api.VersionBody(version=1, manifest_digest="1" * 64, weights_digest="1" * 64, bytes_total=7, report=report)
    )
    swarm.client("evaluator").report_evaluation(
        api.EvaluationBody(version=1, accuracy=0.5, problems=100, samples=1, mean_tokens=3, seconds=1)
    )
    swarm.app.service.curves._at = float("-inf")
    curves = swarm.http.get("/v1/curves").json()
    assert (curves["steps"], curves["metrics"]["reward_mean"]) == ([0], [0.5])
    assert curves["metrics"]["reward_low"] == [0.402]
    assert "entropy" not in curves["metrics"]
    (point,) = curves["evaluations"]
    assert 0.40 < point["low"] < 0.41 < 0.59 < point["high"] < 0.60


def test_the_link_of_another_run_or_rotation_is_another() -> None:
    secrets = {link_secret(RUN_SECRET, "a", 0), link_secret(RUN_SECRET, "b", 0), link_secret(RUN_SECRET, "a", 1)}
    assert len(secrets) == 3
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in secrets)


def test_a_file_of_a_slot_that_another_key_filled_looks_like_any_other(tmp_path: Path) -> None:
    """Otherwise its contributor's page would tell everybody who has backup leases."""
    with running(tmp_path, CONFIG) as swarm:
        two_files(swarm, changed=0, flips_allowed=0)
        keys = [str(row["key"]) for row in swarm.all("SELECT key FROM workers")]
        views = [swarm.http.get(f"/v1/workers/{key}").json() for key in keys]
        accepted = [one for view in views for one in view["submissions"] if one["outcome"] == "accepted"]
        assert len({one["tokens"] for one in accepted}) == 1
        for view in views:
            assert view["tokens_s"] == sorted(view["tokens_s"])
