"""Checks of what a machine has, against what its ranks take: cores, open files, GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from safetrain import limits
from safetrain.finding import Finding, Here, Said, of_hosts, ranks_of, size, where
from safetrain.words import ranks_in_words

_FILES_OF_A_RANK = 256  # libraries, sockets to peers, logs
_FILES_OF_A_BATCH = 4  # a tensor in shared memory is an open file, here and in the loader process
_OTHERS_MAY_HOLD = 1 << 30  # a desktop, a notebook that was left open


@dataclass(frozen=True)
class Cores:
    """Ranks, their threads and their loader processes against the cores that there are."""

    name: str = "cores"

    def look(self, here: Here) -> dict[str, Any]:
        return {"cores": limits.cores(), "workers": here.loader.num_workers, "threads": torch.get_num_threads()}

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        findings = [self._of_machine(some, said) for some in of_hosts(said)]
        return [one for one in findings if one.verdict != "ok"] or findings[:1]

    def _of_machine(self, some: Sequence[Said], said: Sequence[Said]) -> Finding:
        ranks, cores = len(some), min(one.facts["cores"] for one in some)
        workers, threads = (max(one.facts[what] for one in some) for what in ("workers", "threads"))
        value = f"{cores:g} cores, {ranks} rank{'s' * (ranks > 1)} x {workers} loader processes"
        place = where(some, said)
        words = remedy = ""
        if ranks * workers > max(cores, 1):
            words = f"{ranks} x {workers} loader processes on {place}, which has {cores:g} cores for them."
            remedy = f"Set loader.num_workers={max(0, int(cores // ranks))}: that many fit."
        elif ranks > max(cores, 1):
            words = f"{ranks} ranks on {place}, which has {cores:g} cores: they wait for each other."
            remedy = f"Set launch.nproc_per_node={max(1, int(cores))}, unless you only try something out."
        elif ranks > 1 and ranks * threads > max(cores, ranks):
            words = f"{ranks} ranks of {threads} threads each on {place}, which has {cores:g} cores."
            remedy = f"Set OMP_NUM_THREADS={max(1, int(cores // ranks))}."
        return Finding(self.name, value, "warn" if words else "ok", ranks_of(some) if words else (), words, remedy)


@dataclass(frozen=True)
class OpenFiles:
    """The limit of open files against what loader processes hand over in."""

    name: str = "open_files"

    def look(self, here: Here) -> dict[str, int]:
        loader = here.loader
        ahead = loader.num_workers * (loader.prefetch_factor or 2)
        return {"limit": limits.open_files(), "need": _FILES_OF_A_RANK + _FILES_OF_A_BATCH * ahead}

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        few = [one for one in said if 0 <= one.facts["limit"] < one.facts["need"]]
        if not few:
            return [Finding(self.name, f"{min(one.facts['limit'] for one in said)} a process")]
        limit, need = few[0].facts["limit"], few[0].facts["need"]
        words = f"a process may open {limit} files on {where(few, said)}, and a rank here needs about {need}."
        remedy = f"Raise the limit (ulimit -n {max(4096, 2 * need)}), or use fewer loader processes."
        return [Finding(self.name, f"{limit} a process", "warn", ranks_of(few), words, remedy)]


@dataclass(frozen=True)
class Gpus:
    """Each rank has a GPU of its own, and nobody else fills it."""

    name: str = "gpus"

    def look(self, here: Here) -> dict[str, Any]:
        device = here.comm.device
        if device.type != "cuda":
            visible = torch.cuda.device_count() if here.settings.get("device", "auto") != "cpu" else 0
            return {"gpu": "", "name": "", "visible": visible, "total": 0, "others": 0}
        free, total = torch.cuda.mem_get_info(device)
        properties = torch.cuda.get_device_properties(device)
        return {
            "gpu": str(getattr(properties, "uuid", device.index)),
            "name": properties.name,
            "visible": torch.cuda.device_count(),
            "total": total,
            "others": max(0, total - free - torch.cuda.memory_reserved(device)),
        }

    def judge(self, said: Sequence[Said]) -> list[Finding]:
        if not any(one.facts["gpu"] for one in said):
            return [Finding(self.name, "none: all ranks compute on CPUs")]
        without = [one for one in said if not one.facts["gpu"]]
        findings = []
        if without:
            have = "has" if len(without) == 1 else "have"
            words = f"{ranks_in_words(ranks_of(without))} {have} no GPU, and other ranks have."
            remedy = "Give every rank a GPU (nvidia-smi shows what a machine has), or set device=cpu."
            findings.append(Finding(self.name, "CPU", "refuse", ranks_of(without), words, remedy))
        findings += [finding for some in of_hosts(said) for finding in self._of_machine(some, said)]
        if findings:
            return findings
        names = ", ".join(dict.fromkeys(one.facts["name"] for one in said))
        idle = max(some[0].facts["visible"] - len(some) for some in of_hosts(said))
        return [Finding(self.name, f"{names}, one a rank" + (f"; {idle} visible without a rank" if idle > 0 else ""))]

    def _of_machine(self, some: Sequence[Said], said: Sequence[Said]) -> list[Finding]:
        findings, place = [], where(some, said)
        by_gpu: dict[str, list[Said]] = {}
        for one in some:
            by_gpu.setdefault(one.facts["gpu"], []).append(one)
        for gpu, sharers in by_gpu.items():
            if gpu and len(sharers) > 1:
                words = f"{ranks_in_words(ranks_of(sharers))} on {place} have one GPU between them."
                remedy = "Set CUDA_VISIBLE_DEVICES once, for the launcher, or not at all: a rank takes its own."
                findings.append(Finding(self.name, gpu, "refuse", ranks_of(sharers), words, remedy))
        for one in some:
            if one.facts["others"] > max(_OTHERS_MAY_HOLD, one.facts["total"] // 10):
                held = size(one.facts["others"])
                words = f"{held} of the GPU of rank {one.rank} ({place}) are held by other processes."
                remedy = "nvidia-smi shows whose; end them, or choose other GPUs by CUDA_VISIBLE_DEVICES."
                findings.append(Finding(self.name, f"{held} in use", "warn", (one.rank,), words, remedy))
        return findings
