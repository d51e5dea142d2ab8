"""The preflight of real jobs: refused in one message, on its own under torchrun, and transports tried in processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import pytest

from safetrain import Comm
from safetrain.testing import run_ranks
from safetrain.transports import find_setting, in_words, try_out
from tests.launch.project import Project

pytestmark = pytest.mark.slow


def test_what_is_refused_is_told_once_by_all(project: Project) -> None:
    done = project.run("recipe=mine", "loader.num_workers=9", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert done.code == 1
    (run_dir,) = project.run_dirs()
    told = (run_dir / "failure.txt").read_text()
    assert told.startswith(
        "Refused before the first step.\n\n"
        "    settings: TORCH_DISTRIBUTED_DEBUG=DETAIL on all ranks: DistributedDataParallel crashes under it with Gloo"
    )
    assert "To train in spite of it: preflight.checks.settings=warn" in told
    assert done.err.count("Refused before the first step.") == 1
    assert "Traceback" not in done.err
    assert (done.out + done.err).count("preflight: cores: 2 x 9 loader processes on this machine") == 1


def test_under_torchrun_it_only_looks(project: Project) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = project.run("recipe=mine", program=[*torchrun, "-m", "safetrain.preflight"])
    assert done.code == 0, done.err
    assert done.out.count("check          verdict  found") == 1
    assert "dataset        ok       Numbers of 32 samples, items 0, 16, 31 the same" in done.out
    assert "all_reduce     ok       right, in " in done.out
    assert not list(project.folder.rglob("stepping_*")), "nothing was trained"
    assert not (project.folder / "outputs").exists(), "nothing is left"


_HANGS_UNLESS_SET = """
import os, time
from safetrain import links, transports
right = links.sum_of_ranks
links.sum_of_ranks = lambda comm: right(comm) if "NCCL_P2P_DISABLE" in os.environ else str(time.sleep(600))
transports.main()
"""


def _isolate(comm: Comm) -> str:
    program = (sys.executable, "-c", _HANGS_UNLESS_SET)
    os.environ["SAFETRAIN_TRY_DEVICE"] = "cpu"

    def attempt(number: int, setting: Mapping[str, str]) -> bool:
        return comm.agree(try_out(setting, number, 1.0, program), "all")

    return in_words(find_setting(attempt))


@pytest.mark.exhaustive
def test_the_transport_that_hangs_is_found_in_processes_to_throw_away() -> None:  # S09
    first, second = run_ranks(_isolate, 2, timeout_s=110)
    assert first == second
    assert first.startswith("Tried again, it works without peer-to-peer between GPUs: add ++env.NCCL_P2P_DISABLE=1 to")
    assert "NCCL_P2P_DISABLE" not in os.environ


def test_a_preflight_of_a_sweep_is_wrong_use(project: Project) -> None:
    done = project.run("-m", "recipe=mine", "seed=1,2", program=[sys.executable, "-m", "safetrain.preflight"])
    assert done.code == 2
    assert "a preflight is of one job" in done.err
    assert not (project.folder / "outputs").exists()
