"""The wheel: what is in it, what it says about itself, and that it works without the checkout."""

from __future__ import annotations

import email.message
import email.parser
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_BUILT = ("safetrain", "configs", "recipes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder of the checkout gets into it; without the network."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in _BUILT:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(target),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    (built,) = target.glob("*.whl")
    return built


def test_it_holds_every_module_and_every_yaml_and_nothing_else(wheel: Path) -> None:
    expected = {"safetrain/py.typed"}
    for folder, inside in (
        ("safetrain", "safetrain"),
        ("configs", "safetrain/configs"),
        ("recipes", "safetrain/recipes"),
    ):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml"):
                expected.add(f"{inside}/{path.relative_to(ROOT / folder)}")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "safetrain/configs/train.yaml" in expected
    assert any(name.endswith("LICENSE") for name in names)


def test_it_says_what_it_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (path,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    metadata: email.message.Message = email.parser.Parser().parsestr(archive.read(path).decode())
    assert metadata["Name"] == "safetrain"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    core = sorted(line.split(">")[0] for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line)
    assert core == ["hydra-core<1.4,", "omegaconf<2.4,", "tensorboard", "torch", "tqdm"]
    assert set(metadata.get_all("Provides-Extra", [])) == {"recipes", "sweep", "bench", "dev"}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the wheel installed; everything else comes from this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(
        subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    )
    zipfile.ZipFile(wheel).extractall(site)
    here = next(path for path in sys.path if (Path(path) / "torch").is_dir())
    (site / "dependencies.pth").write_text(f"{here}\n")
    return python


def run(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", "safetrain", *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_it_lists_its_recipes_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for recipe in (ROOT / "recipes").glob("*_ddp.py"):
        assert f"  {recipe.stem} " in done.stdout


def test_it_begins_a_project(installed: Path, tmp_path: Path) -> None:
    command = [installed, "-m", "safetrain.new", "fox"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "fox/recipe/fox.yaml").exists()


_ANOTHER = [
    pytest.param(recipe, ranks, marks=pytest.mark.exhaustive)
    for recipe in ("gpt_ddp", "stream_ddp", "gan_ddp", "finetune_ddp")
    for ranks in (1, 2, 4)
]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "ranks"), [("resnet_ddp", 2), *_ANOTHER])
def test_it_trains_its_recipes_from_an_empty_folder(installed: Path, tmp_path: Path, recipe: str, ranks: int) -> None:
    short = ("loop.max_steps=2", f"launch.nproc_per_node={ranks}", "device=cpu")
    done = run(installed, tmp_path, f"recipe={recipe}", *short)
    assert done.returncode == 0
    # a small machine has too few cores for some
    assert [line for line in done.stderr.splitlines() if "WARNING safetrain: preflight: cores: " not in line] == []
    (result,) = tmp_path.glob(f"outputs/{recipe}/*/result.json")
    assert result.exists()


@pytest.mark.slow
def test_an_installed_one_works_from_the_checkout_too(installed: Path) -> None:
    """There, ./safetrain comes first on the import path, and configs and recipes lie beside it."""
    done = run(installed, ROOT, "recipe=resnet_ddp", "--cfg", "job")
    assert (done.returncode, done.stderr) == (0, "")
    assert "safetrain.recipes.resnet_ddp" in done.stdout
