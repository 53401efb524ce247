"""Signs of an incident, and the verdicts that they make. Two workers on each of four machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from health.diagnosis import Facts, diagnose
from health.signatures import find_sign
from health.verdict import Role, Sign, Source, Step, Subject, Verdict

NODES = {f"w{rank}": f"n{rank // 2}" for rank in range(8)}
REPLICAS = {worker: f"replica {node}" for worker, node in NODES.items()}


def loss(worker: str, cause: str = "crash", role: Role = "root") -> Sign:
    return Sign(
        name=cause,
        source="loss",
        role=role,
        cause=cause,
        subject="worker",
        detail=f"{worker} is lost",
        worker=worker,
        node=NODES[worker],
        decisive=True,
    )


def sign(
    name: str,
    node: str,
    *,
    source: Source = "log",
    role: Role = "root",
    cause: str = "gpu_error",
    subject: Subject = "gpu",
    worker: str | None = None,
    peer: str | None = None,
    decisive: bool = False,
    repeated: bool = False,
    remedy: Step | None = None,
    of: str = "",
) -> Sign:
    return Sign(
        name=name,
        source=source,
        role=role,
        cause=cause,
        subject=subject,
        detail=f"{node} shows {name}",
        worker=worker,
        node=node,
        peer=peer,
        decisive=decisive,
        repeated=repeated,
        remedy=remedy,
        of=of,
    )


def verdicts(*signs: Sign, replicas: Mapping[str, str] = REPLICAS) -> list[Verdict]:
    names = {"i-2": "n2", "i-0": "n0", "i-1": "n1"}
    return diagnose(Facts(signs=signs, nodes=NODES, replicas=replicas, names=names))


def verdict(*signs: Sign) -> Verdict:
    (found,) = verdicts(*signs)
    return found


def whom(found: Verdict) -> tuple[str, tuple[str, ...], tuple[str, ...], str]:
    return found.cause, found.workers, found.nodes, found.confidence


def test_nothing_is_wrong() -> None:
    assert verdicts() == []


# -- losses ----------------------------------------------------------------------------------------


def test_a_loss_that_nothing_explains_stands_for_itself() -> None:
    assert whom(verdict(loss("w2"))) == ("crash", ("w2",), (), "certain")


def test_some_losses_are_about_their_machine() -> None:
    for cause in ("node", "link", "network"):
        assert whom(verdict(loss("w2", cause))) == (cause, ("w2",), ("n1",), "certain")


def test_what_its_machine_shows_explains_a_loss() -> None:
    found = verdict(loss("w2"), sign("xid_79", "n1", remedy="reboot", of="0000:05:00"))
    assert whom(found) == ("gpu_error", ("w2",), ("n1",), "certain")
    assert found.evidence == ("n1 shows xid_79", "w2 is lost")
    assert (found.signs, found.remedy) == (("xid_79",), "reboot")


def test_what_another_machine_shows_does_not() -> None:
    found, weak = verdicts(loss("w2"), sign("xid_79", "n3"))
    assert whom(found) == ("crash", ("w2",), (), "certain")
    assert whom(weak) == ("gpu_error", (), ("n3",), "weak")


def test_what_is_known_of_another_worker_on_the_machine_does_not() -> None:
    found = verdict(loss("w2"), sign("xid_79", "n1", worker="w3"))
    assert whom(found) == ("crash", ("w2",), (), "certain")


def test_the_kernel_has_ended_a_worker_for_its_memory() -> None:
    oom = sign("oom_killed", "n1", cause="out_of_memory", subject="worker", worker="w2")
    assert whom(verdict(loss("w2"), oom)) == ("out_of_memory", ("w2",), (), "certain")


def killed(worker: str) -> Sign:
    """By the kernel's count: some process on its machine was ended when it ended."""
    shown = sign("oom_killed", NODES[worker], cause="out_of_memory", subject="worker")
    return replace(shown, worker=worker, source="reading")


def test_the_kernel_has_ended_a_process_when_a_worker_crashed() -> None:
    assert whom(verdict(loss("w2"), killed("w2"))) == ("out_of_memory", ("w2",), (), "likely")
    ill = sign("xid_48", "n1", remedy="reset_gpu")
    assert whom(verdict(loss("w2"), killed("w2"), ill)) == (
        "gpu_error",
        ("w2",),
        ("n1",),
        "certain",
    )
    assert verdict(loss("w3"), killed("w2")).cause == "crash"
    assert verdict(loss("w2", "hang"), killed("w2")).cause == "hang"
    assert verdicts(killed("w2")) == []


def test_ray_has_ended_a_worker_for_the_memory_of_its_machine() -> None:
    """Another process may have taken it: another machine is tried before the run is ended."""
    oom = sign("ray_oom_killed", "n1", cause="out_of_memory", subject="worker", worker="w2")
    assert whom(verdict(loss("w2"), oom)) == ("out_of_memory", ("w2",), (), "likely")


def test_memory_that_ran_out_on_most_machines_ran_out() -> None:
    everywhere = ["w0", "w2", "w4"]
    found = verdicts(*map(loss, everywhere), *map(killed, everywhere))
    assert [(v.cause, v.workers) for v in found] == [("out_of_memory", (w,)) for w in everywhere]


def test_a_line_about_a_process_of_who_knows_whom_explains_nothing_and_is_evidence() -> None:
    line = "Out of memory: Killed process 7 (python) total-vm:1kB"
    said = find_sign(line, "kernel", "n1", 5.0, None)
    assert said is not None
    found = verdict(loss("w2"), said)
    assert (found.cause, found.evidence) == ("crash", ("w2 is lost", line))


def test_an_error_of_the_users_code_stays_one_whatever_its_words() -> None:
    found = verdict(loss("w2", "user_error"), sign("cuda_ecc", "n1"))
    assert whom(found) == ("user_error", ("w2",), (), "certain")


@pytest.mark.parametrize(
    "number", ["[Errno 28] No space left on device", "[Errno 5] Input/output error"]
)
@pytest.mark.parametrize(("cause", "role"), [("crash", "root"), ("collective", "cascade")])
def test_what_a_worker_says_of_its_files_takes_no_machine(
    number: str, cause: str, role: Role
) -> None:
    """A quota, a file system that all share, or an error that was caught."""
    line = f"OSError: {number}: '/shared/x'"
    said = find_sign(line, "worker", "n1", 5.0, {}, writer="w2")
    assert said is not None
    found = verdict(loss("w2", cause, role), said)
    assert (found.cause, found.nodes, found.remedy) == (cause, (), None)
    assert (line in found.evidence) == (role == "root")
    assert verdicts(said) == []


def test_what_the_disk_itself_shows_beside_it_does() -> None:
    said = find_sign("[Errno 5] Input/output error", "worker", "n1", 5.0, {}, writer="w2")
    shown = sign("disk_lost", "n1", source="reading", cause="node", subject="storage")
    assert said is not None and verdict(shown).confidence == "weak"
    assert whom(verdict(shown, said)) == ("node", (), ("n1",), "likely")


def test_of_several_explanations_the_instrument_and_the_larger_remedy_count() -> None:
    found = verdict(
        loss("w2"),
        sign("xid_79", "n1", remedy="reboot"),
        sign("disk_lost", "n1", source="reading", cause="node", decisive=True, remedy="other_seat"),
    )
    assert (found.cause, found.remedy) == ("node", "reboot")
    assert found.signs == ("disk_lost", "xid_79")


def test_the_workers_of_a_machine_go_with_it_in_one_verdict() -> None:
    found = verdict(loss("w2", "node"), loss("w3", "node"))
    assert whom(found) == ("node", ("w2", "w3"), ("n1",), "certain")


def test_two_unrelated_losses_are_two_verdicts() -> None:
    assert [v.workers for v in verdicts(loss("w2"), loss("w6", "user_error"))] == [("w2",), ("w6",)]


def test_what_follows_from_a_loss_blames_nobody() -> None:
    found = verdict(loss("w2"), loss("w4", "collective", role="cascade"))
    assert whom(found) == ("crash", ("w2",), (), "certain")


def test_a_collective_that_fails_for_no_visible_reason() -> None:
    found = verdict(loss("w4", "collective", role="cascade"))
    assert whom(found) == ("collective", ("w4",), (), "likely")


# -- groups ----------------------------------------------------------------------------------------


def does(worker: str, name: str) -> Sign:
    return sign(
        name,
        NODES[worker],
        source="reading",
        role="confirmation",
        cause="hang",
        subject="worker",
        worker=worker,
    )


HUNG = loss("w2", "hang"), loss("w3", "hang")


def test_of_a_group_that_hung_the_one_that_differs_from_the_run_is_to_blame() -> None:
    rest = [does(worker, "idle") for worker in ("w0", "w1", "w4", "w5")]
    found = verdict(*HUNG, does("w2", "busy"), does("w3", "idle"), *rest)
    assert whom(found) == ("hang", ("w2",), (), "certain")
    spinning = [does(worker, "busy") for worker in ("w0", "w1", "w4", "w5")]  # as NCCL waits
    found = verdict(*HUNG, does("w2", "busy"), does("w3", "idle"), *spinning)
    assert found.workers == ("w3",)


def test_the_one_that_the_kernel_holds_is_to_blame() -> None:
    found = verdict(*HUNG, does("w3", "in_kernel"), does("w2", "idle"), does("w3", "idle"))
    assert found.workers == ("w3",)


def test_where_it_cannot_be_told_the_group_goes_together() -> None:
    assert whom(verdict(*HUNG)) == ("hang", ("w2", "w3"), (), "likely")
    found = verdict(*HUNG, does("w2", "busy"), does("w3", "idle"))
    assert whom(found) == ("hang", ("w2", "w3"), (), "likely")


def test_a_group_is_a_replica_wherever_its_workers_are() -> None:
    hung = loss("w1", "hang"), loss("w2", "hang")
    (found,) = verdicts(*hung, replicas={"w1": "replica 0", "w2": "replica 0"})
    assert whom(found) == ("hang", ("w1", "w2"), (), "likely")
    apart = verdicts(*HUNG, replicas={"w2": "replica 0", "w3": "replica 1"})
    assert [v.workers for v in apart] == [("w2",), ("w3",)]


# -- machines that lost nobody ---------------------------------------------------------------------


def read(name: str, node: str = "n1", decisive: bool = False, repeated: bool = False) -> Sign:
    return sign(name, node, source="reading", decisive=decisive, repeated=repeated)


def test_a_gpu_that_is_lost_is_enough() -> None:
    assert whom(verdict(read("gpu_lost", decisive=True))) == ("gpu_error", (), ("n1",), "certain")


def test_one_sign_is_weak_two_sources_are_not_and_lines_are_one_source() -> None:
    line = sign("xid_48", "n1", repeated=True)
    assert verdict(line).confidence == "weak"
    assert verdict(line, sign("xid_64", "n1", repeated=True)).confidence == "weak"
    assert verdict(read("ecc_uncorrected")).confidence == "weak"
    assert verdict(line, read("ecc_uncorrected")).confidence == "likely"
    assert verdict(read("ecc_uncorrected", repeated=True)).confidence == "likely"
    assert [v.confidence for v in verdicts(line, read("ecc_uncorrected", "n2"))] == ["weak", "weak"]


@pytest.mark.parametrize(
    ("of", "confidence"),
    [("0000:05:00", "likely"), ("", "likely"), ("index 3", "likely"), ("0000:9b:00", "weak")],
)
def test_what_another_gpu_shows_is_no_second_source_for_a_gpu(of: str, confidence: str) -> None:
    line = sign("xid_48", "n1", remedy="reset_gpu", of="0000:05:00")
    links = replace(read("nvlink_recoveries"), role="confirmation", subject="link", of=of)
    assert verdict(line, links).confidence == confidence


def test_a_switch_has_its_second_source_in_any_gpu() -> None:
    switch = sign("sxid_fatal", "n1", subject="link", of="0000:c5:00.0")
    links = replace(read("nvlink_errors"), role="confirmation", subject="link", of="0000:05:00")
    assert verdict(switch, links).confidence == "likely"


def test_the_switch_or_network_device_that_shows_why_is_named() -> None:
    switch = sign("sxid_fatal", "n1", subject="link", of="0000:c5:00.0")
    device = sign("nic_failed", "n1", cause="node", subject="link", of="0000:a0:00.0")
    gpu = sign("xid_79", "n1", of="0000:05:00")
    beside = sign("nvlink_errors", "n1", role="confirmation", subject="link", of="0000:9b:00")
    named = ("0000:a0:00.0", "0000:c5:00.0")
    assert verdict(switch, device, gpu, beside).links == named
    assert verdict(loss("w2"), switch, device, gpu, beside).links == named
    assert verdict(gpu).links == () and verdict(loss("w2", "link")).links == ()


def test_an_xid_in_the_kernels_log_and_as_an_event_was_told_once() -> None:
    line = sign("xid_48", "n1", remedy="reset_gpu")
    event = replace(line, source="reading", detail="told")
    assert verdict(line, event).confidence == "weak"
    found = verdict(line, replace(event, repeated=True))
    assert (found.confidence, found.remedy, found.signs) == ("likely", "reset_gpu", ("xid_48",))


def test_what_only_strengthens_makes_no_verdict() -> None:
    throttled = sign("throttled", "n1", source="reading", role="confirmation", cause="slow")
    assert verdicts(throttled, sign("nvlink_nonfatal", "n1", role="confirmation")) == []


def test_what_most_machines_show_is_no_machines_fault() -> None:
    shared = [sign("xid_79", f"n{number}") for number in range(3)]
    assert whom(verdict(loss("w2"), *shared)) == ("crash", ("w2",), (), "certain")
    half = verdicts(loss("w2"), *shared[:2])
    assert [v.cause for v in half] == ["gpu_error", "gpu_error"]


def test_a_sure_sign_counts_on_however_many_machines() -> None:
    lost = [read("gpu_lost", f"n{number}", decisive=True) for number in range(3)]
    assert [v.nodes for v in verdicts(*lost)] == [("n0",), ("n1",), ("n2",)]


# -- machines that others name ---------------------------------------------------------------------


def names(reporter: str, peer: str) -> Sign:
    return sign("efa", reporter, cause="link", subject="node", peer=peer)


COLLECTIVES = [loss(worker, "collective", role="cascade") for worker in ("w0", "w2")]


def test_the_machine_that_two_others_name_is_blamed_and_not_they() -> None:
    found = verdict(*COLLECTIVES, names("n0", "i-2"), names("n1", "i-2"))
    assert whom(found) == ("link", (), ("n2",), "likely")


def test_one_that_names_it_twice_is_one() -> None:
    collective, weak = verdicts(COLLECTIVES[0], names("n0", "i-2"), names("n0", "i-2"))
    assert (whom(collective)[0], whom(weak)) == ("collective", ("link", (), ("n2",), "weak"))


def test_lines_that_nothing_stands_beside_do_not_take_a_machine() -> None:
    assert verdict(names("n0", "i-2"), names("n1", "i-2")).confidence == "weak"


def test_two_that_name_each_other_are_as_good_as_none() -> None:
    found = verdict(COLLECTIVES[0], names("n0", "i-2"), names("n2", "i-0"))
    assert found.cause == "collective"


def test_a_loss_there_explains_what_others_say() -> None:
    found = verdict(loss("w4"), *COLLECTIVES, names("n0", "i-2"), names("n1", "i-2"))
    assert whom(found) == ("crash", ("w4",), (), "certain")
    assert "n0 shows efa" in found.evidence


def test_a_name_that_nobody_has_is_passed_by() -> None:
    assert verdicts(names("n0", "i-9"), names("n1", "i-9")) == []


# -- slow workers ----------------------------------------------------------------------------------


def paces(**little_or_much: str) -> list[Sign]:
    return [
        sign(
            f"waits_{how}",
            NODES[worker],
            role="confirmation",
            cause="slow",
            subject="worker",
            worker=worker,
        )
        for worker, how in little_or_much.items()
    ]


def test_the_replica_that_waits_for_nobody_while_most_wait_is_slow() -> None:
    others = {worker: "much" for worker in ("w0", "w1", "w4", "w5")}
    found = verdict(*paces(w2="little", w3="little", **others))
    assert whom(found) == ("slow", ("w2", "w3"), (), "likely")
    throttled = sign("throttled", "n1", role="confirmation", cause="slow", source="reading")
    found = verdict(throttled, *paces(w2="little", w3="little", **others))
    assert whom(found) == ("slow", ("w2", "w3"), ("n1",), "likely")


def test_of_a_slow_replica_the_worker_whose_gpu_is_slowed_is_named() -> None:
    others = {worker: "much" for worker in ("w0", "w1", "w4", "w5")}
    throttled = sign("throttled", "n1", role="confirmation", cause="slow", worker="w3")
    found = verdict(throttled, *paces(w2="little", w3="little", **others))
    assert whom(found) == ("slow", ("w3",), ("n1",), "likely")


def test_two_slow_replicas_or_too_few_that_wait_say_nothing() -> None:
    assert verdicts(*paces(w2="little", w4="little", w0="much", w1="much", w6="much")) == []
    assert verdicts(*paces(w2="little", w0="much", w1="much")) == []
    half = {worker: "much" for worker in ("w0", "w1", "w4")}
    assert verdicts(*paces(w2="little", w3="little", **half)) == []
