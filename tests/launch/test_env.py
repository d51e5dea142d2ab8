"""Environment templates in real commands: what the ranks get, what is said, what is kept (S06-S08)."""

from __future__ import annotations

import sys

import pytest
from omegaconf import OmegaConf

from tests.launch.project import Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "safetrain"]


@pytest.mark.exhaustive
def test_ranks_get_what_is_said_and_saved(project: Project) -> None:
    asked = ["recipe=mine", "env=debug", "preset=debug", "env.NCCL_DEBUG_SUBSYS=ALL", "loop.max_steps=1"]
    done = project.run(*asked, NCCL_DEBUG="WARN", NCCL_DEBUG_SUBSYS="NET", NCCL_BLOCKING_WAIT="1")
    assert done.code == 0, done.err
    (run_dir,) = project.run_dirs()
    (line,) = [line for line in done.out.splitlines() if line.startswith("environment: ")]
    assert "NCCL_DEBUG=WARN instead of INFO, NCCL_BLOCKING_WAIT=1 (your shell)" in line
    assert "NCCL_DEBUG_SUBSYS=ALL (command line)" in line
    assert f"NCCL_DEBUG_FILE={run_dir}/logs/nccl_%h_%p.log, TORCH_CPP_LOG_LEVEL=INFO" in line
    assert "warning: NCCL_BLOCKING_WAIT is called TORCH_NCCL_BLOCKING_WAIT now" in done.err
    env = OmegaConf.load(run_dir / "config.yaml").env
    assert (env.NCCL_DEBUG, env.NCCL_DEBUG_SUBSYS, env.TORCH_CPP_LOG_LEVEL) == ("WARN", "ALL", "INFO")
    saved = (run_dir / "environment.yaml").read_text().splitlines()
    assert {'NCCL_DEBUG: "WARN"  # your shell', 'TORCH_CPP_LOG_LEVEL: "INFO"  # env=debug'} <= set(saved)
    assert "[I" in (run_dir / "logs" / "rank_0.log").read_text()  # a line of c10's log: the rank has its level


@pytest.mark.exhaustive
def test_under_torchrun_what_comes_too_late_is_said_once(project: Project) -> None:
    done = project.run("recipe=mine", "env=debug", "loop.max_steps=1", program=TORCHRUN)
    assert done.code == 0, done.err
    (warning,) = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert "TORCH_CPP_LOG_LEVEL=INFO TORCH_DISTRIBUTED_DEBUG=INFO: too late" in warning
    assert "TORCH_SHOW_CPP_STACKTRACES=1 (env=debug)" in done.out
