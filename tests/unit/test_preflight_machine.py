"""What a machine has against what its ranks take: on this machine's own files, and on those of others."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from safetrain import limits, places
from safetrain.capacity import Cores, Gpus, OpenFiles
from safetrain.places import NameLookup, Ranks, lookup_s
from safetrain.settings import Settings
from tests.unit.fake_ranks import only, said

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# --- limits -----------------------------------------------------------------------------------------------------------


def test_this_machine_has_something() -> None:
    assert 0 < limits.cores() < 100_000
    assert 1 << 20 < limits.memory_left() < 1 << 50
    assert limits.open_files() > 0
    assert limits.free_bytes(Path("/nowhere")) is None


def test_a_container_of_version_2(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"self/cgroup": "0::/pod/job\n", "meminfo": "MemAvailable: 16777216 kB\n"})
    cgroup = tree(
        tmp_path / "cgroup",
        {
            "pod/job/memory.max": "max\n", "pod/job/memory.current": "5\n", "pod/job/cpu.max": "150000 100000\n",
            "pod/memory.max": f"{3 * GIB}\n", "pod/memory.current": f"{2 * GIB}\n",
            "pod/memory.stat": f"anon 7\ninactive_file {GIB}\n", "pod/cpu.max": "max 100000\n",
        },
    )  # fmt: skip
    assert limits.memory_left(proc, cgroup) == 2 * GIB  # the pod's limit counts, and files it has read can go
    assert limits.cores(proc, cgroup) <= 1.5


def test_a_container_of_version_1(tmp_path: Path) -> None:
    groups = "5:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/\n"
    proc = tree(tmp_path / "proc", {"self/cgroup": groups, "meminfo": "MemAvailable: 16777216 kB\n"})
    cgroup = tree(
        tmp_path / "cgroup",
        {
            "memory/memory.limit_in_bytes": f"{4 * GIB}\n", "memory/memory.usage_in_bytes": f"{GIB}\n",
            "memory/memory.stat": "total_inactive_file 0\n", "cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )  # fmt: skip  # the container sees its own folder as the root
    assert limits.memory_left(proc, cgroup) == 3 * GIB
    assert limits.cores(proc, cgroup) == 0.5


def test_no_limit(tmp_path: Path) -> None:
    proc = tree(tmp_path / "proc", {"self/cgroup": "4:memory:/\n", "meminfo": "MemAvailable: 1024 kB\n"})
    cgroup = tree(
        tmp_path / "cgroup",
        {"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "1\n"},
    )
    assert limits.memory_left(proc, cgroup) == 1 << 20


# --- cores, files, GPUs -----------------------------------------------------------------------------------------------


def cores(count: float, workers: int, threads: int = 1) -> dict[str, Any]:
    return {"cores": count, "workers": workers, "threads": threads}


def test_more_loader_processes_than_cores() -> None:
    found = only(Cores().judge(said(*[cores(8, 6)] * 2, hosts=["a", "a"])))
    assert found.verdict == "warn"
    assert found.words == "2 x 6 loader processes on this machine, which has 8 cores for them."
    assert found.remedy == "Set loader.num_workers=4: that many fit."


def test_the_machine_that_has_fewer_cores_is_named() -> None:
    found = only(Cores().judge(said(cores(8, 2), cores(8, 2), cores(2, 2), cores(2, 2), hosts=["a", "a", "b", "b"])))
    assert "on b, which has 2 cores" in found.words
    assert found.ranks == (2, 3)


def test_more_ranks_or_threads_than_cores() -> None:
    assert "4 ranks on this machine, which has 2 cores" in only(Cores().judge(said(*[cores(2, 0)] * 4))).words
    crowded = only(Cores().judge(said(*[cores(8, 0, threads=8)] * 2)))
    assert crowded.remedy == "Set OMP_NUM_THREADS=4."


def test_enough_cores() -> None:
    assert only(Cores().judge(said(*[cores(8, 3, threads=4)] * 2))).value == "8 cores, 2 ranks x 3 loader processes"


def test_open_files() -> None:
    assert only(OpenFiles().judge(said({"limit": 1024, "need": 300}))).verdict == "ok"
    found = only(OpenFiles().judge(said({"limit": 1024, "need": 300}, {"limit": 256, "need": 300})))
    assert (found.verdict, found.ranks) == ("warn", (1,))
    assert found.words == "a process may open 256 files on this machine, and a rank here needs about 300."


def gpu(uuid: str, others: int = 0) -> dict[str, Any]:
    return {"gpu": uuid, "name": "H200" if uuid else "", "visible": 2, "total": 100 * GIB, "others": others}


def test_a_gpu_each() -> None:
    assert only(Gpus().judge(said(gpu("a"), gpu("b")))).value == "H200, one a rank"
    assert only(Gpus().judge(said(gpu("a")))).value == "H200, one a rank; 1 visible without a rank"
    assert only(Gpus().judge(said(gpu(""), gpu("")))).value == "none: all ranks compute on CPUs"
    assert only(Gpus().judge(said(gpu("a"), gpu("a"), hosts=["x", "y"]))).verdict == "ok"


def test_one_gpu_for_two_ranks() -> None:
    found = only(Gpus().judge(said(gpu("a"), gpu("a"))))
    assert (found.verdict, found.words) == ("refuse", "ranks 0 and 1 on this machine have one GPU between them.")


def test_a_gpu_that_others_fill() -> None:
    found = only(Gpus().judge(said(gpu("a"), gpu("b", others=60 * GIB))))
    assert (found.verdict, found.ranks) == ("warn", (1,))
    assert found.words == "60 GiB of the GPU of rank 1 (this machine) are held by other processes."


def test_a_rank_without_a_gpu() -> None:
    assert "rank 1 has no GPU, and other ranks have" in Gpus().judge(said(gpu("a"), gpu("")))[0].words


# --- ranks, names, settings -------------------------------------------------------------------------------------------


def place(
    rank: int, *, of: int = 2, pid: int = 0, local: int | None = None, local_of: int | None = None
) -> dict[str, Any]:
    return {
        "rank": rank, "world_size": of, "local_rank": rank if local is None else local,
        "local_world_size": of if local_of is None else local_of, "pid": pid or 100 + rank,
        "interface": "lo (127.0.0.1)",
    }  # fmt: skip


def test_ranks_that_fit_together() -> None:
    assert only(Ranks().judge(said(place(0), place(1)))).value == "2 ranks on 1 machine; lo (127.0.0.1)"
    two = said(place(0, local=0, local_of=1), place(1, local=0, local_of=1), hosts=["a", "b"])
    assert only(Ranks().judge(two)).value == "2 ranks on 2 machines; lo (127.0.0.1)"


def test_ranks_that_do_not() -> None:  # S21
    assert Ranks().judge(said(place(0), place(0, pid=7)))[0].words == "rank 1 of 2 takes itself for rank 0 of 2."
    assert "ranks 0 and 1 are one process, 5 on vm" in Ranks().judge(said(place(0, pid=5), place(1, pid=5)))[0].words
    twice = only(Ranks().judge(said(place(0), place(1, local=0))))
    assert (twice.verdict, twice.words) == ("refuse", "ranks 0 and 1 on this machine all have LOCAL_RANK=0.")
    by_hand = Ranks().judge(said(place(0), place(1, local=0), hosts=["a", "b"]))
    assert [one.verdict for one in by_hand] == ["warn", "warn"]
    assert by_hand[0].words == "LOCAL_WORLD_SIZE=2 on a, where 1 of the ranks run."


def test_a_name_server_that_does_not_answer() -> None:
    never = threading.Event()
    assert lookup_s("192.0.2.1", 0.05, lambda _: never.wait(5)) == 0.05
    never.set()

    def unknown(_: str) -> None:
        raise OSError("Name or service not known")

    assert lookup_s("192.0.2.1", 5, unknown) < 5
    found = only(NameLookup().judge(said({"address": "::ffff:10.0.0.7", "seconds": 1.0}, hosts=["node1"])))
    assert found.verdict == "warn"
    assert "'10.0.0.7 node1' to /etc/hosts" in found.remedy
    assert "RES_OPTIONS" in found.remedy
    assert only(NameLookup().judge(said({"address": "::1", "seconds": 0.004}))).value == "4 ms"
    assert only(NameLookup().judge(said({"address": "", "seconds": 0.0}))).value == "not needed"


def test_the_address_that_the_store_sees() -> None:
    assert places.own_address("127.0.0.1") == "::ffff:127.0.0.1"
    assert places.own_address("no.such.host.invalid") == ""


def test_the_interface_and_why(monkeypatch: pytest.MonkeyPatch) -> None:  # H78
    assert ("lo", "127.0.0.1") in list(places.addresses())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert places.interface() == "eth7, by GLOO_SOCKET_IFNAME"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr("safetrain.network.gloo_address", lambda: "127.0.0.1")
    assert places.interface() == "lo (127.0.0.1), by the machine's name"


def setting(device: str = "cuda", **variables: str) -> dict[str, Any]:
    return {"set": variables, "device": device, "interfaces": ["lo", "eth0"]}


@pytest.mark.parametrize(
    ("facts", "verdict", "words"),
    [
        (setting("cpu", TORCH_DISTRIBUTED_DEBUG="DETAIL"), "refuse", "crashes under it with Gloo"),
        (setting(TORCH_DISTRIBUTED_DEBUG="detail"), "warn", "crashes under it with Gloo"),
        (setting(TORCH_NCCL_BLOCKING_WAIT="1"), "warn", "switches torch's own watchdog off"),
        (setting(CUDA_LAUNCH_BLOCKING="1"), "warn", "nothing overlaps"),
        (setting(NCCL_ASYNC_ERROR_HANDLING="1"), "warn", "its name today is TORCH_NCCL_ASYNC_ERROR_HANDLING."),
        (setting(NCCL_SOCKET_IFNAME="ib"), "refuse", "no such interface; there are lo, eth0."),
        (setting(NCCL_SOCKET_IFNAME="^lo,eth"), "refuse", "no such interface"),
    ],
)
def test_settings_that_do_harm(facts: dict[str, Any], verdict: str, words: str) -> None:  # S07
    found = only(Settings().judge(said(setting(facts["device"]), facts)))
    assert (found.verdict, found.ranks) == (verdict, (1,))
    assert words in found.words
    assert "on rank 1" in found.words


def test_the_new_name_with_the_old_ones_value() -> None:
    facts = setting(NCCL_BLOCKING_WAIT="1")
    assert only(Settings().judge(said(facts))).remedy == "Set TORCH_NCCL_BLOCKING_WAIT=1 in its place, if you need it."
    both = setting(NCCL_DESYNC_DEBUG="1", TORCH_NCCL_DESYNC_DEBUG="0")
    found = only(Settings().judge(said(both)))
    assert "TORCH_NCCL_DESYNC_DEBUG=0 is set, too" in found.words
    assert found.remedy == "Unset NCCL_DESYNC_DEBUG."


def test_settings_that_do_none() -> None:
    facts = setting(
        TORCH_DISTRIBUTED_DEBUG="INFO",
        TORCH_NCCL_BLOCKING_WAIT="0",
        NCCL_SOCKET_IFNAME="=eth0",
        CUDA_LAUNCH_BLOCKING="0",
    )
    assert only(Settings().judge(said(facts, facts))).value == "nothing known to do harm"
