"""Idea 4, leave: from the records of ranks that failed, and from how processes ended, to one verdict.

The culprit is the first to fail that is not another one's victim; where all records are of victims, the rank that they
were told of, or one that ended without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from safetrain import causes
from safetrain.errors import Preempted, PreflightError, RanksDiffer
from safetrain.failure import Exit, Failure, headline, log_end, read_failures, user_lines
from safetrain.verdict import Verdict, newest_checkpoint
from safetrain.words import ranks_in_words

_LOG_LINES = 8


def verdict_on(
    run_dir: Path, world_size: int, exits: Sequence[Exit] = (), elsewhere: Sequence[Failure] = ()
) -> Verdict:
    """Why the job in ``run_dir`` failed.

    ``exits`` are the ranks that ended by themselves, not by the launcher's hand after another one's failure;
    ``elsewhere`` are the records of other machines, which may or may not be in the directory, too.
    """
    by_rank = {failure.rank: failure for failure in (*elsewhere, *read_failures(run_dir))}
    failures = [by_rank[rank] for rank in sorted(by_rank)]
    silent = _silent(failures, exits)
    in_time = sorted(failures, key=lambda failure: failure.time_ns)
    culprits = [failure for failure in in_time if not failure.victim]
    witness = next((failure for failure in failures if failure.victim and failure.culprits), None)
    if culprits:
        verdict, told = _of_records(culprits), [failure.rank for failure in culprits]
        if culprits[0].error in (RanksDiffer.__name__, PreflightError.__name__):
            told = list(range(world_size))
    elif witness is not None:
        verdict, told = _of_witness(witness), witness.culprits
    elif silent:
        verdict, told = _of_exits(silent, run_dir), [one.rank for one in silent]
    elif in_time:  # nobody says why: the first to suffer is the best there is
        verdict, told = _of_records(in_time[:1]), [in_time[0].rank]
    else:
        return Verdict("Training failed; no rank says why.")
    victims = [rank for rank in range(world_size) if rank not in told]
    others = list(verdict.others)
    if victims:
        others.append(
            f"{ranks_in_words(victims).capitalize()} did not fail: ended because {ranks_in_words(sorted(told))} did."
        )
    kept = next((failure.kept for failure in failures if failure.kept), "")
    if verdict.remedy and not kept and (saved := newest_checkpoint(run_dir)):
        kept = f"The last checkpoint is {saved}."
    return replace(verdict, others=tuple(others), kept=kept, ranks=(*failures, *silent), world_size=world_size)


def preempted(left: Preempted, run_dir: Path) -> Verdict:
    """No failure: the run was told to leave, and can go on."""
    told = ranks_in_words(list(left.told))
    names = " and ".join(sorted(set(left.told.values())))
    kept = f"the run is saved in {run_dir / 'checkpoints'}" if left.saved else "nothing is saved"
    return Verdict(
        sentence=f"Preempted: {told} got {names}; all ranks stopped together after step {left.step}, and {kept}.",
        remedy="run the same command with resume=auto." if left.saved else "run it again.",
        exit_code=left.EXIT_CODE,
    )


def _silent(failures: Sequence[Failure], exits: Sequence[Exit]) -> list[Exit]:
    """The ranks that ended without a record, those with an error code before those without."""
    recorded = {failure.rank for failure in failures}
    unrecorded = [one for one in exits if one.rank not in recorded]
    return [one for one in unrecorded if one.code != 0] or unrecorded


def _of_records(failures: Sequence[Failure]) -> Verdict:
    """The first one's story; those that failed alike are in its first sentence, others have one of their own."""
    first = failures[0]
    same = sorted(one.rank for one in failures if (one.error, one.message) == (first.error, first.message))
    where = f"in {first.phase} " if first.phase else ""
    when = "" if first.step is None else f"at step {first.step} "
    sentence = f"Training failed on {ranks_in_words(same)} {when}{where}({first.host}, process {first.pid})."
    cause = causes.of_error(first.error, first.message)
    if first.error == RanksDiffer.__name__:  # no rank failed; as a rule nobody knows which of them is right
        return Verdict(f"Training ended at {first.message}", tuple(first.culprits), cause=cause)
    if first.error == PreflightError.__name__:  # the same on all ranks, and nobody's fault
        return Verdict("Refused before the first step.", detail=first.message.replace("\n", "\n    "))
    evidence: tuple[str, ...]
    if not first.traceback:  # it left by os._exit
        evidence = ()
    elif first.place:
        evidence = (f"Traceback of rank {first.rank}, from your code on:", first.traceback)
    else:
        evidence = ("None of your code was running; the traceback is in the log.",)
    return Verdict(
        sentence=sentence,
        culprits=tuple(same),
        place=first.place,
        detail=f"{first.error}: {headline(first.message)}",
        batch="; ".join(f"rank {one.rank} was at {one.batch}" for one in failures if one.batch),
        others=tuple(_failed_too(one) for one in failures if one.rank not in same),
        cause=cause,
        remedy=first.remedy,
        evidence=evidence,
    )


def _failed_too(failure: Failure) -> str:
    place = f" at {failure.place}" if failure.place else ""
    return f"Rank {failure.rank} failed too{place}: {failure.error}: {headline(failure.message)}"


def _of_witness(witness: Failure) -> Verdict:
    """A failure in the words of another rank: the culprit could not write its own record."""
    who = ranks_in_words(witness.culprits).capitalize()
    return Verdict(
        sentence=f"Training failed: {witness.message}.",
        culprits=tuple(witness.culprits),
        others=(f"{who} could leave no record of its own; rank {witness.rank} was told.",),
        cause=causes.of_error("", witness.message),
    )


def _of_exits(silent: Sequence[Exit], run_dir: Path) -> Verdict:
    first, *others = silent
    text = first.log or log_end(run_dir, first.rank)
    crash = causes.crash_in(text)
    evidence = [f"When last seen, up to 0.3 s before, it was {first.last_seen}."] if first.last_seen else []
    if crash:
        evidence += ["Where it crashed, innermost first:", *(f"  {line}" for line in crash)]
    elif text:
        evidence += [f"The last lines of rank {first.rank}'s log:"]
        evidence += [f"  {line}" for line in text.splitlines()[-_LOG_LINES:]]
    return Verdict(
        sentence=f"Training failed: {_ended(first)}",
        culprits=tuple(one.rank for one in silent),
        place=next(iter(user_lines("\n".join(crash))), ""),
        others=tuple(f"Also, {_ended(one)}" for one in others),
        cause=causes.of_error("", text) if crash else "",
        evidence=tuple(evidence),
    )


def _ended(one: Exit) -> str:
    where = f"{one.host}, " if one.host else ""
    return f"rank {one.rank} ({where}process {one.pid}) {causes.of_exit(one.code)}"
