"""The failure page in a real browser: what a person would see, laid out by headless Chromium, where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from safetrain import page
from safetrain.verdict import Verdict
from tests import failing

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((path for name in _NAMES if (path := shutil.which(name))), None)
MEASURE = """
<script>
const box = e => e.getBoundingClientRect(), all = s => [...document.querySelectorAll(s)], svg = all("svg")[0];
const outside = all("svg text").filter(t => box(t).right > box(svg).right || box(t).left < box(svg).left);
const bars = all(".bar").filter(b => box(b.querySelector("text")).right > box(b.querySelector("rect")).right);
const names = all(".lane").map(l => [box(l.querySelector(".name")).right, box(l.querySelector(".rail")).left]);
const closed = document.body.scrollHeight; all("details").forEach(d => d.open = true);
document.body.innerHTML = "<pre id=found>" + JSON.stringify({
  too_wide: document.documentElement.scrollWidth > innerWidth,
  outside: outside.map(t => t.textContent), over: bars.map(b => b.textContent),
  names: names.filter(([name, rail]) => name > rail).length,
  lanes: all(".lane").length, grown: document.body.scrollHeight - closed,
  stacks: all("ol.stack li").filter(f => box(f).height > 0).length,
}) + "</pre>";
</script>
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here (apt-get install chromium)"),
]


def browse(file: Path, *arguments: str) -> str:
    """Without a network, as a person would open the file."""
    assert BROWSER is not None
    profile = f"--user-data-dir={file.parent / 'profile'}"
    fixed = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--proxy-server=127.0.0.1:9", profile)
    done = subprocess.run(
        [BROWSER, *fixed, *arguments, file.as_uri()], capture_output=True, text=True, timeout=110, check=True
    )
    return done.stdout


def stuck(_: Path) -> Verdict:
    return failing.stuck(64, culprit=17, ranks_a_host=8)


def differ(_: Path) -> Verdict:
    return failing.different_calls()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("make", "width", "lanes", "frames"),
    [(stuck, 1240, 2, 3), (differ, 500, 4, 8), pytest.param(failing.raised, 1240, 2, 0, marks=pytest.mark.exhaustive)],
)
def test_all_is_where_it_can_be_read(
    tmp_path: Path, make: Callable[[Path], Verdict], width: int, lanes: int, frames: int
) -> None:
    """Names beside their lanes, words inside their bars, no page wider than its window; a click opens a stack."""
    html = page.draw(failing.facts(make(tmp_path), tmp_path))
    file = tmp_path / "failure.html"
    file.write_text(re.sub("<meta http-equiv[^>]*>", "", html).replace("</body>", f"{MEASURE}</body>"))
    dom = browse(file, f"--window-size={width},1000", "--dump-dom")
    found: dict[str, Any] = json.loads(re.findall(r'<pre id="found">(.*?)</pre>', dom)[0])
    assert found.pop("grown") > 100
    assert found.pop("stacks") == frames
    assert found == {"too_wide": False, "outside": [], "over": [], "names": 0, "lanes": lanes}


@pytest.mark.timeout(240)
def test_it_is_light_by_day_and_dark_by_night_and_runs_no_script(tmp_path: Path) -> None:
    facts = failing.facts(failing.stuck(), tmp_path)
    file = tmp_path / "failure.html"
    script = "<script>document.body.style.background = 'rgb(0, 255, 0)'</script>"  # as if nothing were escaped
    file.write_text(page.draw(facts).replace("</body>", f"{script}</body>"))
    corners = []
    for scheme, culprit in (("1", (179, 38, 30)), ("0", (255, 138, 128))):
        picture = tmp_path / f"{scheme}.png"
        browse(
            file,
            "--window-size=1240,1200",
            f"--screenshot={picture}",
            f"--blink-settings=preferredColorScheme={scheme}",
        )
        with Image.open(picture) as image:
            pixels = image.convert("RGB")
            corners.append(pixels.getpixel((2, 2)))
            colours = {colour for _, colour in pixels.getcolors(1 << 24)}
            assert culprit in colours, "the bar of the culprit"
    assert corners == [(251, 251, 250), (19, 20, 24)]
