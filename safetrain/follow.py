"""The launcher of a machine that is not node 0: it does what node 0 says, with the config that node 0 has resolved."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from pathlib import Path

from safetrain.config import Config
from safetrain.crew import Follower, LauncherLost
from safetrain.errors import UsageError
from safetrain.failure import read_failures
from safetrain.job import prepare
from safetrain.launch import Ended, launch, number_of_ranks
from safetrain.machines import environment_of, saved_word, verdict_on_lost
from safetrain.orders import FAILED, OK, WRONG, JobEnded, Outcome, Report, Share, TrainingFailed
from safetrain.rank_log import fresh_line
from safetrain.signals import Interrupted
from safetrain.verdict import published
from safetrain.versions import facts

_SEEN_WITHIN_S = 3.0  # a network file system may show a new file late
_LOOK_S = 0.2


def follow(config: Config, crew: Follower, said: Collection[str] = ()) -> float | None:
    """Take part in a job; ``config`` is this machine's own, from which only the number of its ranks is taken. ``said``:
    the environment variables that the command line sets. Returns the configured metric.

    Raises:
        UsageError: there is no job, or it was wrong.
        TrainingFailed: a rank, or a machine, failed; in node 0's words, if it still speaks.
        JobEnded: a signal ended it.
    """
    crew.say({"kind": "ready", "ranks": number_of_ranks(config), "versions": facts()})
    share: Share | None = None
    shared = True
    while True:
        try:
            message = crew.next()
        except LauncherLost as lost:
            raise TrainingFailed(_without_leader(crew, str(lost), share)) from lost
        if message.pop("kind") == "ask":
            shared = _sees(**message)
            crew.say({"kind": "answer", "sees": shared})
        elif "share" in message:
            share = Share(**message["share"])
            config = Config.from_yaml(message["config"])
            if not shared:
                Path(config.run_dir).mkdir(parents=True, exist_ok=True)
                prepare(config)
            crew.say(_run(config, share, crew, said).to_message())
        else:
            outcome = Outcome(**message)
            if not outcome.again:
                return _end(outcome)
            print(f"{fresh_line(sys.stderr)}{outcome.text}", file=sys.stderr, flush=True)


def _run(config: Config, share: Share, crew: Follower, said: Collection[str]) -> Report:
    run_dir = Path(config.run_dir)
    print(
        f"{config.name}: {crew.me} runs {share.in_words()} of {share.world_size} for {crew.leader}, {run_dir}",
        flush=True,
    )
    try:
        ended = launch(
            run_dir / "config.yaml", share, crew, options=config.launch, env=environment_of(config, crew, said)
        )
    except Interrupted:
        ended = Ended(False, [])
    mine = [failure for failure in read_failures(run_dir) if failure.rank in share.numbers]
    return Report(ended.ok, ended.exits, mine, published(run_dir))


def _sees(proof: str, word: str) -> bool:
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while saved_word(proof) != word:
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def _end(outcome: Outcome) -> float | None:
    if outcome.exit_code == OK:
        return outcome.metric
    if outcome.exit_code == WRONG:
        raise UsageError(outcome.text)
    if outcome.exit_code == FAILED:
        raise TrainingFailed(outcome.text)
    raise JobEnded(outcome.text, outcome.exit_code)


def _without_leader(crew: Follower, why: str, share: Share | None) -> str:
    verdict = verdict_on_lost([(crew.leader, None, why)])
    ran = f", which ran {share.in_words()}, " if share else " "
    text = verdict.text(None)
    return f"{text}\n{crew.me}{ran}has ended because it can't reach node 0 any more.\n"
