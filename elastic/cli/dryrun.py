"""`elastic dryrun`: what a layout needs, before there are machines for it."""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastic.cli.arguments import count, positive
from elastic.cli.program import READ, add_program_to, bad_input, find_trainer
from elastic.cli.show import human_bytes, table
from trainer.dryrun.machines import MACHINES, Machine
from trainer.dryrun.on_nodes import describe_levels
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from elastic.api import ElasticTrainer
    from trainer.dryrun.changes import Change
    from trainer.dryrun.report import Report

_EPILOG = f"""\
{READ}

exit status: 0 where the layout fits, or no memory is known; 1 where it does not (above
1.0 of the memory; a run is refused above 1.1); 2 for bad input

examples:
  elastic dryrun train.py --instance p4d --nodes 128
  elastic dryrun train.py:trainer --memory-gb 96 --gpus-per-node 4 --json
"""

_FIX = "Mend the file, unless it is what a dry run cannot try (docs/dryrun.md): a run tells"


def add_to(commands: Any) -> None:
    """Adds the command to the parsers of `commands`."""
    verb = commands.add_parser(
        "dryrun",
        help="what a run needs of its machines: memory, collectives",
        description="Builds one worker and runs a step of it, without a GPU, without peers and "
        "without memory, and says what it needs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_program_to(verb)
    verb.add_argument("--instance", choices=list(MACHINES), help="machines of AWS")
    verb.add_argument("--nodes", type=count, metavar="N", help="how many machines there are")
    verb.add_argument("--memory-gb", type=positive, metavar="GB", help="of one GPU, in 10^9 bytes")
    verb.add_argument("--gpus-per-node", type=count, metavar="N", help="on other machines")
    verb.add_argument("--json", action="store_true", help="one JSON object")
    verb.set_defaults(action=run)


def run(options: argparse.Namespace) -> int:
    """`dryrun`"""
    machine = plan_machine(
        options.instance, options.memory_gb, options.gpus_per_node, options.nodes
    )
    trainer = find_trainer(options.file)
    if machine is not None:
        machine = machine.shared(trainer.scaling.gpus_per_worker)
    from trainer.dryrun.judge import Judge
    from trainer.dryrun.shape import prepare_shape
    from trainer.tasks.causal_lm import CausalLM

    warnings.simplefilter("ignore")  # torch's, on how a model is made
    of_text = isinstance(trainer.train.task, CausalLM)
    with bad_input(options.file, "its model and loss"):
        task = None if of_text else prepare_shape(trainer.train)
    judge = Judge(device=trainer.scaling.device, machine=machine, nodes=options.nodes, task=task)
    layout, change = (trainer.train, trainer.scaling.max_replicas), None
    with bad_input(options.file, "a step on tensors without memory", _FIX):
        found = judge.judge(*layout)
    if found.fits is False and not (found.lacks_gpus or found.misfit_refused):
        with bad_input(options.file, "a step with other settings", _FIX):
            change = judge.nearest(*layout)
    if options.json:
        print(json.dumps({**found.to_json(), "nearest": change.text if change else None}))
    else:
        print(_in_words(found, trainer, change))
    return int(found.fits is False)


def plan_machine(
    instance: str | None, memory_gb: float | None, gpus: int | None, nodes: int | None
) -> Machine | None:
    """The kind of machine that was asked for; None: none.

    Raises:
        ConfigError: the options contradict each other.
    """
    if instance is not None:
        machine = MACHINES[instance]
        if memory_gb is not None:
            machine = replace(machine, memory_bytes=int(memory_gb * 1e9))
        return machine if gpus is None else replace(machine, gpus=gpus)
    if memory_gb is None:
        if nodes is not None or gpus is not None:
            raise ConfigError(
                "--instance",
                None,
                "nothing says how much memory a GPU has",
                f"Use one of {', '.join(MACHINES)}, or --memory-gb",
            )
        return None
    return Machine(name="machines", gpus=gpus or 8, memory_bytes=int(memory_gb * 1e9))


def _in_words(found: Report, trainer: ElasticTrainer, change: Change | None) -> str:
    needs, machine = found.needs, found.machine
    layout = f"{trainer.scaling.max_replicas} replicas of {trainer.train.parallel.dims}"
    lines = [f"{needs.parameters:,} parameters; {layout}: {found.workers:,} workers"]
    lines += [
        "",
        table(_component_rows(found)),
        "",
        f"peak of a step: {human_bytes(needs.peak_bytes)}",
    ]
    if machine is not None:
        share = found.needed_bytes / machine.memory_bytes
        lines.append(
            f"needed: {human_bytes(found.needed_bytes)} of {human_bytes(machine.memory_bytes)} "
            f"({share:.2f}): {found.verdict}"
        )
    if found.offloaded_bytes:
        lines.append(_offloaded(found))
    lines += [f"{'does not fit' if one.refused else 'beware'}: {one}" for one in found.misfits]
    if machine is not None:
        levels = describe_levels(trainer.train.parallel, machine.gpus)
        lines += [] if levels is None else [levels]
    if found.lacks_gpus:
        lines.append(f"{found.workers:,} workers, but {found.gpus:,} GPUs: it does not fit")
    elif found.fits is False and not found.misfit_refused:
        lines.append(f"nearest change that fits: {change.text if change else 'none was found'}")
    if needs.collectives:
        lines += ["", table(_collective_rows(found))]
    return "\n".join([*lines, "", f"host syncs in a step: {needs.host_syncs}"])


def _offloaded(found: Report) -> str:
    size = None if found.machine is None else found.machine.host_memory_bytes
    there = f"offloaded: {human_bytes(found.offloaded_bytes)} of a machine's own memory"
    if size is None:
        return there
    verdict = "too large, half is left to others" if found.lacks_host_memory else "fits"
    return f"{there}, {human_bytes(size)} ({found.offloaded_bytes / size:.2f}): {verdict}"


def _component_rows(found: Report) -> list[tuple[str, str]]:
    rows = [(name, human_bytes(size)) for name, size in found.components.items()]
    return [("component", "bytes"), *rows]


def _collective_rows(found: Report) -> list[tuple[str, ...]]:
    return [
        ("group", "ranks", "kind", "calls", "bytes in a step"),
        *(
            (c.group, str(c.ranks), c.kind, f"{c.count:,}", human_bytes(c.bytes))
            for c in found.needs.collectives
        ),
    ]
