"""The wheel: what is in it, what it says about itself, and that it works without the checkout."""

from __future__ import annotations

import email.message
import email.parser
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import safetrain

ROOT = Path(__file__).parents[1]
_BUILT = ("safetrain", "configs", "recipes")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that no build folder of the checkout gets into what is built."""
    folder = tmp_path_factory.mktemp("source")
    for name in (*_BUILT, "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "MANIFEST.in", "mkdocs.yml", "LICENSE", *(path.name for path in ROOT.glob("*.md"))):
        shutil.copy(ROOT / name, folder / name)
    return folder


def wheel_of(source: Path, target: Path) -> Path:
    """The wheel of a folder or of an sdist, built without the network."""
    arguments = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(target), str(source)]
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=100)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(source, tmp_path_factory.mktemp("wheel"))


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


def test_an_sdist_holds_what_readme_links_to_and_gives_the_same_wheel(
    wheel: Path, source: Path, tmp_path: Path
) -> None:
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=100)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "docs/api.md", "docs/window.svg", "configs/train.yaml"} <= names
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.*")} <= names
    again = wheel_of(sdist, tmp_path)
    assert again.name == wheel.name
    one, other = (sorted(zipfile.ZipFile(built).namelist()) for built in (wheel, again))
    assert one == other


def test_it_says_what_it_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (path,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    metadata: email.message.Message = email.parser.Parser().parsestr(archive.read(path).decode())
    assert (metadata["Name"], metadata["Version"]) == ("safetrain", safetrain.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    core = sorted(line.split(">")[0] for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line)
    assert core == ["hydra-core<1.4,", "omegaconf<2.4,", "tensorboard", "torch", "tqdm"]
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "recipes",
        "sweep",
        "metrics",
        "loggers",
        "docs",
        "bench",
        "dev",
    }


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


@pytest.mark.parametrize("module", ["safetrain", "safetrain.preflight"])
def test_it_tells_its_own_version(installed: Path, tmp_path: Path, module: str) -> None:
    done = subprocess.run(
        [installed, "-m", module, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"safetrain {safetrain.__version__}\n", "")
    assert list(tmp_path.iterdir()) == []


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
