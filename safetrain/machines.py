"""A job on several machines, seen by node 0: one run directory, and one verdict from what each of them knows."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from safetrain import machine, network
from safetrain.alone import Alone
from safetrain.config import Checkpoint, Config
from safetrain.crew import Follower, Leader
from safetrain.errors import UsageError
from safetrain.failed import verdict_on
from safetrain.failure import Exit
from safetrain.launch import number_of_ranks
from safetrain.nodes import Node
from safetrain.orders import Report, Share
from safetrain.verdict import Verdict
from safetrain.versions import facts

_PROOF = ".nodes"


def agree(config: Config, crew: Leader) -> None:
    """Before ranks are started: every machine knows how many it runs, runs the same versions, and sees the run
    directory, unless that does not matter.

    Raises:
        UsageError: that is not so.
    """
    crew.agree(number_of_ranks(config), facts(), config.launch.endpoint[0])
    proof, word = Path(config.run_dir, _PROOF), secrets.token_hex(8)
    proof.write_text(word)
    try:
        answers = crew.ask({"kind": "ask", "proof": str(proof), "word": word})
    finally:
        proof.unlink(missing_ok=True)
    blind = [node.host for node in crew.nodes[1:] if not answers[node.number]["sees"]]
    if not blind:
        return
    problem = f"{' and '.join(blind)} can't see the run directory {config.run_dir} of {crew.me.host}"
    if saves(config.checkpoint):
        raise UsageError(
            f"{problem}, where all ranks save their part of a checkpoint. Put it on a file system that all machines "
            "share (hydra.run.dir=/shared/...), or save nothing: checkpoint.every_steps=null "
            "checkpoint.every_minutes=null checkpoint.every_epochs=null checkpoint.at_end=false."
        )
    print(f"{problem}: the logs of the ranks there are in a directory of that name on their own machine.", flush=True)


def saved_word(proof: str) -> str:
    """What node 0 has written, as this machine sees it."""
    try:
        list(Path(proof).parent.parent.iterdir())  # a network file system looks again
        return Path(proof).read_text()
    except OSError:
        return ""


def environment_of(config: Config, crew: Alone | Leader | Follower, said: Collection[str] = ()) -> dict[str, str]:
    """The environment of the ranks. On a machine that is not node 0, what its own shell says stays, but for what was
    ``said`` on the command line.

    Gloo looks up the machine's own name to tell others its address; where that means
    the machine itself, on every machine, it gets the interface by which the launchers have met."""
    variables = {name: str(value) for name, value in config.env.items()}
    if isinstance(crew, Follower):
        variables = {n: value for n, value in variables.items() if n in said or n not in os.environ}
    name = "GLOO_SOCKET_IFNAME"
    if isinstance(crew, Alone) or name in variables or name in os.environ:
        return variables
    if network.is_loopback(network.gloo_address()) and (interface := network.interface_of(crew.me.address)):
        print(f"{machine.host()} is a name for {network.gloo_address()} here: {name}={interface} instead.", flush=True)
        variables[name] = interface
    return variables


def saves(checkpoint: Checkpoint) -> bool:
    """Whether checkpoints are saved at all."""
    intervals = (checkpoint.every_steps, checkpoint.every_minutes, checkpoint.every_epochs)
    return checkpoint.at_end or any(interval is not None for interval in intervals)


def verdict_on_machines(
    run_dir: Path, crew: Alone | Leader, exits: Sequence[Exit], reports: Sequence[Report]
) -> Verdict:
    """Why the job failed: from the records and exits of all machines, and from which of them are gone."""
    everywhere = [*exits, *(each for report in reports for each in report.exits)]
    records = [failure for report in reports for failure in report.failures]
    verdict = verdict_on(run_dir, crew.shares[0].world_size, everywhere, records)
    if not crew.lost:
        return verdict
    assert isinstance(crew, Leader)
    gone = [(crew.nodes[number], crew.shares[number], why) for number, why in crew.lost.items()]
    by_itself = any(not failure.victim for failure in verdict.ranks if hasattr(failure, "victim"))
    if by_itself:
        return replace(verdict, others=(*verdict.others, *(f"Also, {_gone(*each)}." for each in gone)))
    return replace(verdict_on_lost(gone), ranks=verdict.ranks)


def lost_in_words(crew: Alone | Leader) -> str:
    """The machines that are gone, for the end of a story that does not tell of them; empty where none is."""
    if isinstance(crew, Alone):
        return ""
    gone = [_gone(crew.nodes[number], crew.shares[number], why) for number, why in crew.lost.items()]
    return "".join(f"\nAlso, {each}.\n" for each in gone)


def verdict_on_lost(gone: Sequence[tuple[Node, Share | None, str]]) -> Verdict:
    """Why a job failed that has lost machines: each with its ranks, if known, and what is known of it, in words."""
    first, *others = gone
    node, share, why = first
    silent = why.startswith("silent")
    return Verdict(
        sentence=f"Training failed: {_gone(*first)}.",
        culprits=() if share is None else tuple(share.numbers),
        others=tuple(f"Also, {_gone(*each)}." for each in others),
        cause=f"{node.host} is down or overloaded, or the network between is cut."
        if silent
        else f"the launcher on {node.host} was killed, or {node.host} went down.",
        remedy=f"see the launcher's terminal on {node.host}; is {node.host} up, and does it answer at {node.address} "
        "(`ping`)? Then run the job again with resume=auto."
        + (" If it was only slow, raise launch.node_timeout_s." if silent else ""),
    )


def _gone(node: Node, share: Share | None, why: str) -> str:
    ranks = f", with {share.in_words()}," if share else ""
    return f"{node}{ranks} " + (f"is {why}" if why.startswith("silent") else f"is gone: {why}")
