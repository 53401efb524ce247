"""What happens on a node beside its workers. The actor that does it is `elastic/node_agent.py`.

- `beats.py`: heartbeats, both ends. `process_watch.py`: workers that end or freeze.
- `drain.py`: notices that the machine will go.
- `helpers.py`: how the uploader and the snapshot holder come to be watched.
- `snapshot_holder.py`, `snapshot_survey.py`: snapshots in the node's memory.
"""
