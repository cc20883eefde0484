"""A ledger with a recall and rewinds holds; an operator who forges, changes or leaves out such an entry is found."""

import copy
from collections.abc import Callable

import pytest

from coordinator.ledger.operator import COORDINATOR, Facts, check, export, facts_of, number_of, tampered
from shoal.protocol import api
from shoal.protocol.client import CoordinatorClient
from shoal.protocol.signing import rewound_message
from shoal.protocol.steps import StepId, step_commitment
from shoal.protocol.verdicts import Reason
from support.samples import keypair
from support.swarm import Swarm, running, small_config

CONFIG = small_config(run={"steps": 20}, trust={"audit_floor": 0.0, "probation_audits": 1})


def eventful(swarm: Swarm) -> None:
    """A recall of honest work, two rewinds with files of others in flight, one of them forged, and steps after each."""
    ann, bob, eve = swarm.join("ann", "bob", "eve")
    swarm.publish(0)
    version = recalled_at(swarm, ann) + 1
    swarm.publish(version)
    swarm.work(eve)
    swarm.rewind(version - 2)
    swarm.reject(Reason.SAMPLING)
    for again in (version - 1, version):
        swarm.produce(ann)
        swarm.publish(again)
    swarm.work(bob)
    swarm.rewind(version - 1)
    swarm.accept()
    swarm.produce(ann)
    swarm.publish(version)


def recalled_at(swarm: Swarm, worker: CoordinatorClient) -> int:
    """Works until a file is not drawn for an audit as a whole; its batch is recalled, audited and recorded again."""
    for step in range(12):
        swarm.clock.advance(2.0)
        swarm.work(worker)
        claim = swarm.claim()
        swarm.accept(claim)
        swarm.record(step)
        if step > 2 and claim.audit_groups != [0, 1]:
            swarm.client("trainer").recall(api.RecallBody(epoch=0, step=step, attempt=0, reason="kl_update is 7"))
            swarm.accept()
            swarm.record(step)
            return step
        swarm.publish(step + 1)
    raise AssertionError("every group of twelve files was drawn")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    with running(tmp_path_factory.mktemp("eventful"), CONFIG) as swarm:
        eventful(swarm)
        return export(swarm)


def test_a_ledger_with_a_recall_and_rewinds_holds(lines: list[bytes]) -> None:
    result = check(lines)
    assert result.findings == []
    kinds = [fact["kind"] for fact in facts_of(lines)]
    assert (kinds.count("recalled"), kinds.count("rewound"), kinds.count("ban")) == (1, 2, 1)
    assert sum("returned the run to version" in note for note in result.notes) == 2


def sign(body: dict[str, object], key: str = "run") -> None:
    message = rewound_message("run-1", int(str(body["epoch"])), int(str(body["version"])), str(body["manifest"]))
    body["signature"] = keypair(key).sign(message)


def rewound(facts: list[Facts], which: int = 0) -> Facts:
    return [fact for fact in facts if fact["kind"] == "rewound"][which]


def forge(facts: list[Facts]) -> None:
    """The operator has the coordinator's key, not the run key."""
    at = facts[-1]["at"]
    entry = copy.deepcopy(rewound(facts, 1))
    body = entry["body"] | {"epoch": 3, "step": 1, "version": 1}
    body["manifest"] = next(
        one["body"]["manifest"] for one in facts if one["kind"] == "version" and one["body"]["version"] == 1
    )
    body["signature"] = COORDINATOR.sign(rewound_message("run-1", 3, 1, body["manifest"]))
    facts.append({"at": at, "kind": "rewound", "body": body})


def change_version(facts: list[Facts]) -> None:
    rewound(facts)["body"] |= {"version": 1, "step": 1}


def lower_epoch(facts: list[Facts]) -> None:
    body = rewound(facts, 1)["body"]
    body["epoch"] = 1
    sign(body)


def skip_epoch(facts: list[Facts]) -> None:
    body = rewound(facts, 1)["body"]
    body["epoch"] = 5
    sign(body)


def go_forward(facts: list[Facts]) -> None:
    body = rewound(facts)["body"]
    body |= {"version": 90, "step": 90}
    sign(body)


def other_manifest(facts: list[Facts]) -> None:
    body = rewound(facts)["body"]
    body["manifest"] = "7" * 64
    sign(body)


def drop_credit(facts: list[Facts]) -> None:
    """Takes back what the voided work had earned."""
    place = facts.index(rewound(facts))
    worker = keypair("ann").public
    body = {"worker": worker, "held": -20, "released": 0, "submission": "x"}
    facts.insert(place + 1, {"at": facts[place]["at"], "kind": "credit", "body": body})


def leave_out_payment(facts: list[Facts]) -> None:
    """A file that was in flight is accepted and not paid."""
    place = facts.index(rewound(facts, 1))
    verdict = next(n for n in range(place, len(facts)) if facts[n]["kind"] == "verdict")
    assert facts[verdict + 1]["kind"] == "credit"
    del facts[verdict + 1]


def late_file(facts: list[Facts]) -> None:
    """Work of the voided epoch that arrives after the rewind is not paid."""
    place = facts.index(rewound(facts, 1))
    verdict = next(fact for fact in facts[place:] if fact["kind"] == "verdict")
    assert verdict["body"]["epoch"] == 1
    verdict["body"]["position"] = place + 1


def use_old_groups(facts: list[Facts]) -> None:
    """A batch of the new epoch with groups that the rewind withdrew."""
    place = facts.index(rewound(facts))
    new = next(fact for fact in facts[place:] if fact["kind"] == "recorded")
    step = new["body"]["step"]
    old = next(fact for fact in facts if fact["kind"] == "recorded" and fact["body"]["step"] == step)
    new["body"]["groups"] = old["body"]["groups"]


def keep_secret(facts: list[Facts]) -> None:
    rewound(facts)["body"]["step_secrets"] = []


def other_secret(facts: list[Facts]) -> None:
    rewound(facts)["body"]["step_secrets"][0][3] = "5" * 64


def reuse_secret(facts: list[Facts]) -> None:
    """The operator repeats a secret that everybody knows: slots and draws of the new epoch could be predicted."""
    place = facts.index(rewound(facts))
    new = next(fact for fact in facts[place:] if fact["kind"] == "recorded")
    step = StepId(*(new["body"][name] for name in ("epoch", "step", "attempt")))
    old = next(fact for fact in facts if fact["kind"] == "recorded" and fact["body"]["step"] == step.step)
    secret = old["body"]["step_secret"]
    new["body"]["step_secret"] = secret
    commitment = next(
        fact for fact in facts if fact["kind"] == "commitment" and [fact["body"][n] for n in step._fields] == list(step)
    )
    commitment["body"]["commitment"] = step_commitment(step, bytes.fromhex(secret))


def version_of_old_epoch(facts: list[Facts]) -> None:
    place = facts.index(rewound(facts))
    next(fact for fact in facts[place:] if fact["kind"] == "version")["body"]["epoch"] = 0


def leave_out_rewind(facts: list[Facts]) -> None:
    facts.remove(rewound(facts))


def recall_of_old_epoch(facts: list[Facts]) -> None:
    next(fact for fact in facts if fact["kind"] == "recalled")["body"]["epoch"] = 4


def second_recall(facts: list[Facts]) -> None:
    """A batch that a version was trained on is 'recalled' after the fact."""
    place = facts.index(rewound(facts))
    recalled = copy.deepcopy(next(fact for fact in facts if fact["kind"] == "recalled"))
    recalled["body"]["step"] = 1
    facts.insert(place, recalled | {"at": facts[place]["at"]})


CHANGES: list[tuple[Callable[[list[Facts]], None], str]] = [
    (forge, "the run key did not sign the rewind"),
    (change_version, "the run key did not sign the rewind"),
    (lower_epoch, "the epoch before is 1"),
    (skip_epoch, "the epoch before is 1"),
    (go_forward, "which is not published"),
    (other_manifest, "another manifest"),
    (drop_credit, "nothing calls for this credit entry"),
    (leave_out_payment, "a credit entry is missing"),
    (late_file, "arrived after a rewind had voided that step"),
    (use_old_groups, "no verdict accepted it, or it is used or withdrawn"),
    (keep_secret, "without publishing its secret"),
    (other_secret, "is not the one that entry"),
    (reuse_secret, "which was public"),
    (version_of_old_epoch, "does not follow version"),
    (leave_out_rewind, "while step"),
    (recall_of_old_epoch, "is recalled, which was not recorded or is trained on"),
    (second_recall, "is recalled, which was not recorded or is trained on"),
]


@pytest.mark.parametrize(("change", "text"), CHANGES, ids=lambda one: getattr(one, "__name__", ""))
def test_a_changed_rewind_or_recall_is_found(
    lines: list[bytes], change: Callable[[list[Facts]], None], text: str
) -> None:
    found = tampered(lines, change)
    assert any(text in one.text for one in found), [one.text for one in found]


def test_the_finding_names_the_forged_entry(lines: list[bytes]) -> None:
    found = tampered(lines, change_version)
    assert number_of(lines, "rewound") in {one.entry for one in found}


def test_no_secret_serves_two_steps(lines: list[bytes]) -> None:
    facts = facts_of(lines)
    published = [fact["body"]["step_secret"] for fact in facts if fact["kind"] == "recorded"]
    published += [secret for fact in facts if fact["kind"] == "rewound" for *_, secret in fact["body"]["step_secrets"]]
    recalled = [fact["body"]["step"] for fact in facts if fact["kind"] == "recalled"]
    assert len(set(published)) == len(published) - len(recalled), "a recalled batch is recorded again with its secret"


def test_every_draw_can_be_repeated_after_a_rewind(lines: list[bytes]) -> None:
    """The secrets of voided steps are published, so that files in flight can be checked too."""
    result = check(lines)
    assert result.draws == result.verdicts
    assert not any("audit draws" in text for text in result.unchecked)
