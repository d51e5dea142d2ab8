"""All benchmarks, one after the other, and the picture: more than an hour on 2 idle cores.

pip install 'safetrain[bench]'
python -m benchmarks
"""

from __future__ import annotations

import subprocess
import sys

ALL = ("step_cost", "peers", "start_and_leave", "growth", "checkpoint_hold", "kill_and_resume", "gauntlet", "plot")

for name in ALL:
    print(f"\n=== {name}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
