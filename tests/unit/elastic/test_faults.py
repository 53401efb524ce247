from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.faults import Fault, check_faults, parse_faults
from trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("none", ()),
        ("kill@0", (Fault(step=0),)),
        ("kill@12:3", (Fault(step=12, worker=3),)),
        ("kill@5:0, kill@7", (Fault(step=5, worker=0), Fault(step=7))),
    ],
)
def test_what_the_user_writes(text: str, faults: tuple[Fault, ...]) -> None:
    assert parse_faults(text) == faults


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        ("kill", "'kill'"),
        ("kill@", "'kill@'"),
        ("kill@-1", "'kill@-1'"),
        ("kill@2:", "'kill@2:'"),
        ("stop@3", "'stop@3'"),
        ("kill@1;kill@2", "'kill@1;kill@2'"),
        ("kill@1,none", "'none'"),
    ],
)
def test_what_is_not_understood_is_quoted(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults(text)
    assert str(caught.value) == (
        f"fault = {text!r}: {part} is not understood. Write none or kill@STEP[:WORKER]."
    )


@settings(derandomize=True, deadline=None)
@given(
    st.lists(
        st.builds(
            Fault,
            step=st.integers(0, 10**6),
            worker=st.none() | st.integers(0, 10**4),
        ),
        min_size=1,
    )
)
def test_a_fault_is_written_as_it_is_read(faults: list[Fault]) -> None:
    assert parse_faults(",".join(map(str, faults))) == tuple(faults)


def test_the_last_slot_dies_where_none_is_named() -> None:
    assert Fault(step=1).slot_number(8) == 7
    assert Fault(step=1, worker=0).slot_number(8) == 0


def test_a_fault_that_can_fire_passes() -> None:
    check_faults(parse_faults("kill@0,kill@9:3"), steps=10, slots=4)


@pytest.mark.parametrize(
    ("fault", "fact"),
    [
        ("kill@10", "the run has steps 0 to 9"),
        ("kill@3:4", "the layout has workers 0 to 3"),
    ],
)
def test_a_fault_that_could_never_fire_is_refused(fault: str, fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        check_faults(parse_faults(fault), steps=10, slots=4)
