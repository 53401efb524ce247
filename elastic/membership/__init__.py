"""Who is there and what follows from it: pure, without Ray, clock or file.

- `machine.py`: the state machine, with facts in and `Effects` out (`decisions.py`).
- `places.py`, `formations.py`, `topology.py`, `repairs.py`, `reassembly.py`: who has a place, and
  new replicas; `versions.py`: whose are not the run's.
- `calls.py`, `planned.py`: who is called away, and why a roster is left without a fault.
- `heals.py`, `conclusion.py`: who lacks state, and how a regroup ends.
- `resumption.py`: all of it after a restart of the coordinator.

`elastic/protocol/roster.py` deals out slots and lanes.
"""
