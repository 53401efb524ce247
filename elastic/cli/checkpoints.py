"""`elastic checkpoints …`: what each subcommand takes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from elastic.cli import actions
from elastic.cli.arguments import count, positive

_EPILOG = """\
RUN is a run's directory (storage_path/name; where its checkpoints are in a store, its records say
which), its checkpoint directory, or a store URL such as file:///runs/llama or
s3://BUCKET/PREFIX/NAME. STEP is a number, or `newest`. S3 is reached as
boto3's environment says: AWS_PROFILE, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL_S3, ~/.aws, and the
machine's role.

examples:
  elastic checkpoints list runs/llama
  elastic checkpoints verify s3://bucket/runs/llama newest
  elastic checkpoints export runs/llama newest --to hf llama-hf
  elastic checkpoints import runs/next --from dcp outputs/checkpoint/step-1000
"""


def add_to(commands: Any) -> None:
    """Adds `checkpoints` and its subcommands to the parsers of `commands`."""
    group = commands.add_parser(
        "checkpoints",
        help="list, check, export, import, keep and delete checkpoints",
        description="Works on the checkpoints of one run; but for import, the run may be going on.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = group.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_looks(verbs)
    _add_exchange(verbs)
    _add_fates(verbs)


def _add_looks(verbs: Any) -> None:
    verb = _verb(verbs, "list", "what checkpoints there are", actions.list_checkpoints)
    _json(verb)
    verb = _verb(
        verbs, "show", "what a checkpoint holds, from its manifest", actions.show, step=True
    )
    verb.add_argument("--tensors", action="store_true", help="every tensor and where it lies")
    _json(verb)
    verb = _verb(
        verbs,
        "verify",
        "read and check every byte",
        actions.verify,
        step=True,
        more="Checks the manifest's seal, that the slices cover every element once, and the size "
        "and CRC32s of every segment. Exit status 1 where anything is wrong; else the checkpoint "
        "is noted as verified, and the newest such one is not deleted.",
    )
    verb.add_argument(
        "--threads", type=count, default=8, help="reads at once, 16 MiB each (default: 8)"
    )
    _json(verb)


def _add_exchange(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "export",
        "write a checkpoint in the form of another system",
        actions.export,
        step=True,
        more="hf: a directory for transformers' from_pretrained, weights only. dcp: one for "
        "torch.distributed.checkpoint, weights and optimizer, under torchtitan's names.",
    )
    verb.add_argument(
        "target", type=Path, metavar="DIR", help="a directory that is empty or not there yet"
    )
    verb.add_argument("--to", required=True, choices=("hf", "dcp"), help="the form")
    verb.add_argument(
        "--config", type=Path, help="config.json of a model that the checkpoint lacks"
    )
    verb.add_argument(
        "--shard-gb", type=positive, default=5.0, help="bound on an hf file (default: 5)"
    )
    verb = _verb(
        verbs,
        "import",
        "commit the state of another system as a checkpoint, for a run to go on from",
        actions.import_state,
        more="hf: weights, with a new optimizer. dcp: weights, and the optimizer's moments if they "
        "are there; its metadata is a pickle, which is read without running any of it.",
    )
    verb.add_argument("source", type=Path, metavar="DIR", help="the directory to read")
    verb.add_argument("--from", dest="form", required=True, choices=("hf", "dcp"), help="its form")
    verb.add_argument("--step", type=count, help="step to go on from; dcp knows its own")
    verb.add_argument(
        "--config", type=Path, help="dcp: config.json of the model, to check it against"
    )
    verb.add_argument(
        "--moments",
        type=_names,
        metavar="NAME,NAME",
        help="of the run's optimizer, where that is not AdamW; '' for none",
    )


def _add_fates(verbs: Any) -> None:
    _verb(
        verbs, "pin", "keep a checkpoint whatever the retention rules say", actions.pin, step=True
    )
    _verb(
        verbs, "unpin", "leave a checkpoint to the retention rules again", actions.unpin, step=True
    )
    verb = _verb(
        verbs,
        "delete",
        "delete a checkpoint",
        actions.delete,
        step=True,
        more="Segments that other checkpoints refer to stay. A pinned checkpoint is never deleted.",
    )
    verb.add_argument(
        "--force", action="store_true", help="also the newest one, and the newest verified one"
    )


def _verb(
    verbs: Any, name: str, what: str, action: Any, *, step: bool = False, more: str = ""
) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}. {more}"
    )
    verb.add_argument("run", metavar="RUN", help="run directory, or URL of its store")
    if step:
        verb.add_argument("step", metavar="STEP", type=_step, help="a step, or `newest`")
    verb.set_defaults(action=action)
    return verb


def _json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", action="store_true", help="one JSON object, for scripts")


def _step(text: str) -> int | None:
    return None if text == "newest" else int(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


_step.__name__ = "step"  # argparse puts it into its message
