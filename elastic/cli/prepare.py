"""`elastic prepare`: a run's data, made before its machines are there."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from elastic.cli.program import READ, add_program_to, bad_input, find_trainer
from elastic.reporting.phases import phases
from trainer.progress import tell

_EPILOG = f"""\
Run it on a machine that sees storage_path as the run will, or `cache_dir` of the DataConfig; it
needs no GPU and no cluster. `fit` with the same text, settings and version of `tokenizers` finds
what is made, and so does this command.

{READ}

exit status: 0 where the data are there; 2 for bad input

examples:
  elastic prepare train.py
  elastic prepare train.py:trainer --json
"""


def add_to(commands: Any) -> None:
    """Adds the command to the parsers of `commands`."""
    verb = commands.add_parser(
        "prepare",
        help="make a run's data ready before its GPUs are there",
        description="Checks the model, tokenises the text of a run, and keeps the tokens where "
        "`fit` finds them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_program_to(verb)
    verb.add_argument("--json", action="store_true", help="one JSON object")
    verb.set_defaults(action=run)


def run(options: argparse.Namespace) -> int:
    """`prepare`"""
    with phases(sys.stderr):
        tell("reading the program")
        trainer = find_trainer(options.file)
        from elastic.driver.preparing import prepare_task
        from elastic.driver.resume import local_path
        from trainer.tasks.task import default_cache_dir

        cache_dir = default_cache_dir(local_path(trainer.run_config))
        with bad_input(options.file, "preparing its task"):
            task = prepare_task(trainer.train, cache_dir)
        held_out = task.eval_data()
        found = {
            "samples": len(task.train_data()),
            "held_out_samples": 0 if held_out is None else len(held_out),
            "task": dict(task.info),
        }
    print(json.dumps(found) if options.json else _in_words(found))
    return 0


def _in_words(found: dict[str, Any]) -> str:
    task = found["task"]
    lines = [f"{found['samples']:,} samples in an epoch, {found['held_out_samples']:,} held out"]
    if "train_tokens" in task:
        lines += [
            f"{task['train_tokens']:,} tokens, {task['val_tokens']:,} held out; "
            f"a vocabulary of {task['vocab_size']:,}",
            f"in {task['train_path']} and {task['val_path']}",
        ]
    return "\n".join(lines)
