"""What the coordinator (`elastic/coordinator.py`) is made of.

- `switchboard.py` carries out what membership decides; `run_log.py` writes it down.
- `crew.py`, `agents.py`: who has started, will go, is lost; the nodes' leases.
- `take_up.py`, `recall.py`: the run after a restart of the coordinator.
- `receipts.py`, `publisher.py`, `snapshots.py`: what has been saved.
- `heal_news.py`, `injections.py`: heals, and injected faults.
- `store_keys.py`: the store where process groups meet is kept small.
"""
