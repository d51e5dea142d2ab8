"""Environment variables of the ranks: who wins, what is said, what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from safetrain.compose import variables_said
from safetrain.environ import COMMAND_LINE, SHELL, Variable, announce, apply, environment, settle, shell
from safetrain.errors import ConfigError
from safetrain.variables import check_variable

TEMPLATE = "env=ethernet"
ENV = {"NCCL_IB_DISABLE": 1, "NCCL_SOCKET_IFNAME": "^lo"}
SOURCES = dict.fromkeys(ENV, TEMPLATE)


def test_the_shell_wins_over_a_template_and_this_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settled = settle(ENV, SOURCES, {"NCCL_SOCKET_IFNAME": "eth0"})
    assert settled == [
        Variable("NCCL_IB_DISABLE", "1", TEMPLATE),
        Variable("NCCL_SOCKET_IFNAME", "eth0", SHELL, instead_of="^lo"),
    ]
    announce(settled, tmp_path)
    said = "environment: NCCL_IB_DISABLE=1 (env=ethernet); NCCL_SOCKET_IFNAME=eth0 instead of ^lo (your shell)\n"
    assert capsys.readouterr().out == said


def test_the_command_line_wins_over_the_shell() -> None:
    sources = SOURCES | {"NCCL_SOCKET_IFNAME": COMMAND_LINE}
    assert settle(ENV, sources, {"NCCL_SOCKET_IFNAME": "eth0"})[1] == Variable(
        "NCCL_SOCKET_IFNAME", "^lo", COMMAND_LINE
    )


def test_null_leaves_a_variable_to_the_shell() -> None:
    env, sources = {"NCCL_DEBUG": None}, {"NCCL_DEBUG": COMMAND_LINE}
    assert settle(env, sources, {}) == []
    assert settle(env, sources, {"NCCL_DEBUG": "WARN"}) == [Variable("NCCL_DEBUG", "WARN", SHELL)]


def test_what_matters_of_the_shell_is_saved_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    announce(settle({}, {}, {"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "WARN # it", "SECRET": "x"}), tmp_path)
    saved = 'NCCL_DEBUG: "WARN # it"  # your shell\nOMP_NUM_THREADS: "4"  # your shell\n'
    assert (tmp_path / "environment.yaml").read_text() == saved
    assert capsys.readouterr().out == "environment: NCCL_DEBUG=WARN # it (your shell)\n"


def test_where_nothing_is_set_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    announce(settle({}, {}, {"PATH": "/bin"}), tmp_path)
    assert (capsys.readouterr(), (tmp_path / "environment.yaml").read_text()) == (("", ""), "")


@pytest.mark.parametrize("source", [SHELL, "env=debug"])
def test_a_renamed_variable_draws_a_warning_with_the_right_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    announce([Variable("NCCL_ASYNC_ERROR_HANDLING", "1", source)], tmp_path)
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: NCCL_ASYNC_ERROR_HANDLING is called TORCH_NCCL_ASYNC_ERROR_HANDLING now")


def test_what_comes_too_late_for_ranks_that_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO"}
    settled = [Variable(name, value, "env=debug") for name, value in names.items()]
    announce([*settled, Variable("LD_PRELOAD", "a.so", SHELL)], tmp_path, started=True)
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: OMP_NUM_THREADS=4 TORCH_CPP_LOG_LEVEL=INFO: too late, the ranks run already.")
    announce(settled, tmp_path)
    assert capsys.readouterr().err == ""


def test_another_host_keeps_what_its_own_shell_says() -> None:
    with environment({"NCCL_SOCKET_IFNAME": "ens3", "NCCL_DEBUG": "WARN", "NCCL_IB_DISABLE": "0"}):
        os.environ.pop("NCCL_IB_DISABLE")
        apply({"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1"}, {"NCCL_DEBUG"})
        found = [os.environ[name] for name in ("NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_IB_DISABLE")]
        os.environ["NCCL_IB_DISABLE"] = "0"
    assert found == ["ens3", "INFO", "1"]


def test_what_torchrun_sets_is_not_taken_for_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    assert {"OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"} <= set(shell())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert not {"OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"} & set(shell())
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "OMP_NUM_THREADS" in shell()


def test_the_command_line_is_told_by_its_overrides() -> None:
    arguments = [
        "-m",
        "--config-dir",
        "env.H",
        "recipe=x",
        "env=debug",
        "env.A=1",
        "+env.B=x",
        "++env.C=null",
        "~env.D",
        "+env={E: 1, F: x}",
    ]
    assert variables_said([*arguments, 'env.G="=eth0"', "environment.H=1"]) == {*"ABCDEFG"}


@pytest.mark.parametrize("value", ["text", "", 1, 0.5, None, "${HOME}"])
def test_text_and_numbers_are_taken(value: object) -> None:
    check_variable("NCCL_DEBUG", value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("NCCL_DEBUG", {"a": 1}, "env.NCCL_DEBUG={'a': 1}: must be text or a number, not a mapping"),
        ("NCCL_DEBUG", ["a"], "env.NCCL_DEBUG=['a']: must be text or a number, not a list"),
        ("NCCL_IB_DISABLE", True, "env.NCCL_IB_DISABLE=true: environment variables are text: write 1 or 0"),
        ("NCCL_DEBUG", "a\0b", "env.NCCL_DEBUG: the value has a NUL"),
        ("2ND", "x", "env.2ND: an environment variable's name has letters"),
        ("A-B", "x", "env.A-B: an environment variable's name has letters"),
        ("", "x", "env.: an environment variable's name has letters"),
        ("RANK", 0, "env.RANK: is set by what starts the ranks"),
        ("LOCAL_WORLD_SIZE", 0, "env.LOCAL_WORLD_SIZE: is set by what starts the ranks"),
        ("MASTER_PORT", 0, "env.MASTER_PORT: is set by what starts the ranks"),
        ("SAFETRAIN_PARENT_PID", 0, "env.SAFETRAIN_PARENT_PID: is set by what starts the ranks"),
    ],
)
def test_what_no_environment_can_hold_is_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_variable(name, value)
    assert str(refused.value).startswith(message)
