"""How a guarded rank ends when something went wrong: it finds out whose fault it was, somebody tells it once, all go.

A rank that raised tells its own story. One whose collective broke is as a rule a victim: it looks for a rank that left
a record, that is gone without a word, or that has left the others, in this order, for a moment. SIGTERM, by which an
elastic agent ends survivors, is answered by the same look.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn, TypeVar

from safetrain import rank_log
from safetrain.advice import FOR_A_SCRIPT
from safetrain.board import Board
from safetrain.causes import OTHER_SIZE
from safetrain.comm import is_communication_error
from safetrain.departure import be_the_one_who_leaves, leave_now, print_verdict, within
from safetrain.elastic_report import note_for_torchrun
from safetrain.failed import verdict_on
from safetrain.failure import Exit, Failure, headline, read_failures
from safetrain.flight_recorder import last_collectives
from safetrain.forking import own_signals_in_children
from safetrain.peers import gone_ranks
from safetrain.rank_log import RankLog
from safetrain.retelling import retold, spread
from safetrain.run_script import without_our_frames
from safetrain.stacks import stack_of, user_frame
from safetrain.verdict import Verdict, published
from safetrain.watched import RankZeroIsDone
from safetrain.words import call_in_words, ranks_in_words

T = TypeVar("T")

ENDED = "ended its script"
RANK_0_IS_DONE = "logs/.rank_0_is_done"
TOLD_TO_LEAVE = "was told to leave"
_NOT_SURELY_FAILED = (None, -signal.SIGTERM, 128 + signal.SIGTERM)
_EVIDENCE_S = 1.0  # a victim's longest wait for what tells whose fault it was
_FAREWELL_S = 1.0  # and for a culprit to tell it
_RETOLD_S = 4.0
_RECORDER_S = 0.5
_EXIT_FUNCTIONS_S = 3.0
_LOOK_S = 0.02


class Ending:
    """This rank's way out. ``board`` is the main thread's."""

    def __init__(self, rank: int, world_size: int, run_dir: Path, log: RankLog, board: Board) -> None:
        self._rank, self._world_size, self._run_dir, self._log, self._board = rank, world_size, run_dir, log, board

    # --- this rank's own error ----------------------------------------------------------------------------------

    def by_error(self, error: BaseException) -> NoReturn:
        """The script raised: as a culprit or as a victim, this process ends here."""
        code = _exit_code(error)
        if isinstance(error, KeyboardInterrupt):
            self._safely(lambda: self._board.leave(f"{TOLD_TO_LEAVE} (Ctrl-C)"), None)
            self._go(code)
        without_our_frames(error)
        failure = _record(error, self._rank)
        note_for_torchrun(failure)
        try:
            failure.write(self._run_dir)
            within(_RECORDER_S, lambda: _with_collectives(failure).write(self._run_dir))
        except OSError as obstacle:
            print(f"rank {self._rank} could not write its record ({obstacle})", file=sys.stderr)
        hook = sys.excepthook  # torch's own marks each line with the rank, which the log's name says
        if not failure.victim and hook is not sys.__excepthook__ and not str(hook.__module__).startswith("torch."):
            hook(type(error), error, error.__traceback__)
        self._log.stop_following()  # what a victim says is no news
        with self._log.path.open("a") as file:
            file.write(f"{failure.traceback}\n")
        be_the_one_who_leaves()
        if failure.victim:
            self._tell_of_another(failure)
        else:
            self._tell(verdict_on(self._run_dir, self._world_size), self._board)
        self._go(code)

    def _tell_of_another(self, failure: Failure) -> None:
        deadline = time.monotonic() + _EVIDENCE_S
        while True:
            late = time.monotonic() > deadline
            if any(not one.victim for one in read_failures(self._run_dir)) or self._safely(self._board.failed, False):
                self._leave_it_to_the_culprit()
                return
            left = self._left()
            if any(how.startswith(TOLD_TO_LEAVE) for how in left.values()):
                return
            if ends := [one for one in gone_ranks(at_once=True) if one.rank not in left]:
                self._tell(self._on_gone(ends, failure.place), self._board)
                return
            if left and (late or all(how.startswith(ENDED) for how in left.values())):
                self._tell(of_those_who_left(left, failure, self._world_size), self._board)
                return
            if late:
                self._tell(verdict_on(self._run_dir, self._world_size), self._board)
                return
            time.sleep(_LOOK_S)

    def _leave_it_to_the_culprit(self) -> None:
        deadline = time.monotonic() + _FAREWELL_S
        while time.monotonic() < deadline and published(self._run_dir) is None:
            time.sleep(_LOOK_S)
        if published(self._run_dir) is None and any(not one.victim for one in read_failures(self._run_dir)):
            self._tell(verdict_on(self._run_dir, self._world_size), self._board)  # it died over it
        else:
            print_verdict(retold(self._run_dir, _RETOLD_S))

    def _left(self) -> dict[int, str]:
        """How ranks have left, by rank; none where the store went with one of them."""
        ranks = [rank for rank in range(self._world_size) if rank != self._rank]
        hows: list[str] = self._safely(lambda: [self._board.left(rank) for rank in ranks], [])
        return {rank: how for rank, how in zip(ranks, hows, strict=False) if how}

    def _safely(self, ask: Callable[[], T], otherwise: T) -> T:
        """The store may be gone, or not answer, since it may be in a rank that is."""
        answers: list[T] = []

        def try_it() -> None:
            try:
                answers.append(ask())
            except Exception:  # noqa: BLE001  whatever the store raises
                return

        within(_EVIDENCE_S, try_it)
        return answers[0] if answers else otherwise

    # --- another one's ------------------------------------------------------------------------------------------

    def look_round(self, board: Board) -> None:
        """Leave where another rank has failed. For a thread beside the script, with a board of its own."""
        ended = [one for one in gone_ranks(at_once=True) if one.code != 0]
        # who is surely a failure is not asked for in the store, which may have gone with it, and then not answer
        gone = [one for one in ended if one.code not in _NOT_SURELY_FAILED]
        try:
            failed = not gone and board.failed()
            if not gone and not failed:
                gone = [one for one in ended if not board.left(one.rank)]
        except Exception:  # the store went with rank 0, which served it
            failed = published(self._run_dir) is not None
            done = self._rank_0_is_done()
            gone = [] if failed or done else ended
            if done and not failed:
                raise RankZeroIsDone from None
            if not failed and not gone:
                raise
        if not failed and not gone:
            return
        be_the_one_who_leaves()
        if failed:
            print_verdict(retold(self._run_dir, _RETOLD_S))
        else:
            time.sleep(_LOOK_S)  # the kernel has its exit code now
            frame = user_frame(stack_of(threading.main_thread().ident or 0))
            self._tell(self._on_gone(gone, "" if frame is None else f"{frame.file}:{frame.line}"), board)
        leave_now()

    def note_end(self) -> None:
        """The script has ended well; where this rank serves the store, the others can't ask it any more."""
        self._safely(lambda: self._board.leave(ENDED), None)
        if self._rank == 0:
            self._done.touch()

    def _rank_0_is_done(self) -> bool:
        return self._done.exists()

    @property
    def _done(self) -> Path:
        return self._run_dir / RANK_0_IS_DONE

    def _on_gone(self, gone: Sequence[Exit], place: str) -> Verdict:
        """On ranks that ended without a word; ``place`` is where this one was."""
        verdict = verdict_on(self._run_dir, self._world_size, gone)
        pending = next((one for one in last_collectives() if not one.done), None)
        doing = f"in {call_in_words(pending)}, at" if pending else "at"
        here = (f"Rank {self._rank} was {doing} {place}.",) if place else ()
        remedy = FOR_A_SCRIPT.together if verdict.cause.startswith(OTHER_SIZE) else verdict.remedy
        return replace(verdict, others=(*here, *verdict.others), remedy=remedy)

    def answer_sigterm(self, board: Board) -> None:
        """From now on SIGTERM ends this process as ever, but the survivors of a failure tell of it first.

        A handler of the script's own takes its place, and is left alone unless a rank has failed.
        """
        inbox, outbox = socket.socketpair()
        outbox.setblocking(False)
        signal.signal(signal.SIGTERM, self._heard)
        # so its number goes to the thread also while this one is in a collective
        signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
        own_signals_in_children(lambda: (signal.SIGTERM,), self._in_child)
        self._outbox = outbox  # kept open
        threading.Thread(target=self._listen, args=(inbox, board), name="safetrain-signals", daemon=True).start()

    def _heard(self, number: int, _frame: object) -> None:
        """A script that has a wakeup descriptor of its own (an event loop) has taken ours away."""
        with suppress(BlockingIOError):  # full of numbers that nobody has read yet
            self._outbox.send(bytes([number]))

    def _in_child(self) -> None:
        """In a forked child, a loader process: signals are its own."""
        if signal.getsignal(signal.SIGTERM) == self._heard:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)

    def _listen(self, inbox: socket.socket, board: Board) -> None:
        while number := inbox.recv(1):
            if number[0] != signal.SIGTERM:
                continue
            self._safely(lambda: self.look_round(board), None)
            if signal.getsignal(signal.SIGTERM) == self._heard:
                self._safely(lambda: board.leave(f"{TOLD_TO_LEAVE} (SIGTERM)"), None)
                be_the_one_who_leaves()
                within(_RECORDER_S, rank_log.flush)
                os._exit(128 + signal.SIGTERM)

    # ------------------------------------------------------------------------------------------------------------

    def _tell(self, verdict: Verdict, board: Board) -> None:
        text = verdict.publish(self._run_dir)
        if text is not None:
            print_verdict(text)
            spread(text)
        self._safely(board.fail, None)

    def _go(self, code: int) -> NoReturn:
        """As Python ends, but for what may wait for other ranks."""
        for child in multiprocessing.active_children():
            child.kill()
        within(_EXIT_FUNCTIONS_S, atexit._run_exitfuncs)
        within(_RECORDER_S, self._log.flush)
        os._exit(code)


def of_those_who_left(left: dict[int, str], victim: Failure, world_size: int) -> Verdict:
    """Ranks that have gone their way, while another one was in a collective with them."""
    ranks = sorted(left)
    advice, place = FOR_A_SCRIPT, f" at {victim.place}" if victim.place else ""
    others = [rank for rank in range(world_size) if rank not in left]
    return Verdict(
        sentence=f"Training failed: {ranks_in_words(ranks)} {left[ranks[0]]}, while {ranks_in_words(others)} went on.",
        culprits=tuple(ranks),
        others=(f"Rank {victim.rank} was in a collective with it{place}: {headline(victim.message)}",),
        cause=advice.left_cause,
        remedy=advice.left_remedy,
        evidence=(f"Traceback of rank {victim.rank}, from your code on:", victim.traceback),
        ranks=(victim,),
        world_size=world_size,
    )


def _record(error: BaseException, rank: int) -> Failure:
    failure = Failure.of(error, rank, victim=_is_victim(error))
    if isinstance(error, SystemExit):
        return replace(failure, message=f"exit code {error.code}" if isinstance(error.code, int) else str(error.code))
    return failure


def _is_victim(error: BaseException) -> bool:
    link: BaseException | None = error
    while link is not None:
        if is_communication_error(link):
            return True
        link = link.__cause__
    return False


def _with_collectives(failure: Failure) -> Failure:
    return replace(failure, collectives=[asdict(one) for one in last_collectives()])


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 130 if isinstance(error, KeyboardInterrupt) else 1
