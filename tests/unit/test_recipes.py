"""The recipes' data and models, and what their first lines say."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from safetrain.catalog import recipes
from safetrain.config import Loader, Loop
from safetrain.errors import DataError
from safetrain.recipes import finetune_ddp, gan_ddp, gpt_ddp, stream_ddp
from safetrain.recipes.resnet_ddp import Classifier, Digits, ImageFolder, ResNet, warmup_cosine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures of two classes, in several formats and sizes."""
    for split, count in (("train", 6), ("val", 3)):
        for name, colour in (("cat", (200, 30, 30)), ("dog", (30, 30, 200))):
            (tmp_path / split / name).mkdir(parents=True)
            for index in range(count):
                suffix = ("png", "jpg", "gif")[index % 3]
                picture = Image.new("RGB", (20 + 5 * index, 30), colour)
                picture.save(tmp_path / split / name / f"{index}.{suffix}")
    return tmp_path


def test_digits_are_split_once_and_for_all() -> None:
    train, val = Digits("train"), Digits("val")
    assert (len(train), len(val)) == (1437, 360)
    assert [val[index][1] for index in range(10)] == [0, 5, 0, 5, 0, 5, 0, 5, 8, 3]
    image, label = train[0]
    assert (image.shape, image.dtype, label) == ((3, 8, 8), torch.float32, 1)
    assert torch.equal(image[0], image[1])
    assert 0 <= float(image.min()) < float(image.max()) <= 1
    held_out = {image.numpy().tobytes() for image, _ in (val[index] for index in range(360))}
    assert not any(train[index][0].numpy().tobytes() in held_out for index in range(1437))


@pytest.mark.parametrize("size", [8, 9, 32])
def test_resnet_scores_every_class_at_any_size(size: int) -> None:
    model = ResNet(num_classes=7)
    assert model(torch.rand(4, 3, size, size)).shape == (4, 7)


def test_resnet_grows_with_width_and_blocks() -> None:
    def parameters(model: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    small, wide, deep = ResNet(10), ResNet(10, width=32), ResNet(10, blocks=(2, 2, 2, 2))
    assert parameters(small) == 78042
    assert parameters(wide) > 3 * parameters(small)
    assert deep(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    assert parameters(deep) > parameters(wide)


def test_the_model_gets_as_many_classes_as_the_data_has(folder: Path) -> None:
    trainer = Classifier(functools.partial(ResNet, width=8), ImageFolder(str(folder), "train", 8))
    model = trainer.build_model()
    assert isinstance(model, ResNet)
    assert model.head.out_features == 2


def test_a_whole_model_is_taken_as_it_is() -> None:
    model = ResNet(10)
    assert Classifier(model).build_model() is model


def test_cosine_rises_then_falls_to_zero() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = warmup_cosine(optimizer, total_steps=8, warmup_steps=3)
    rates = []
    for _ in range(9):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[8] == pytest.approx(0)


def test_training_learns_the_digits_and_the_schedule_ends_with_the_run() -> None:
    trainer = Classifier(
        ResNet,
        Digits("train"),
        Digits("val"),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        scheduler=functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1),
        loop=Loop(epochs=2),
        loader=Loader(batch_size=64, val_batch_size=180),
        device="cpu",
    )
    result = trainer.fit()
    assert result.step == trainer.total_steps == 46  # the last batch of 1437 is smaller
    assert set(result.metrics) == {"val/loss", "val/accuracy"}
    assert result.metrics["val/accuracy"] > 0.9
    assert trainer.schedulers["optimizer"].get_last_lr()[0] < 1e-3


def test_image_folder_labels_sizes_and_channels(folder: Path) -> None:
    (folder / "train/cat/notes.txt").write_text("not a picture")
    Image.new("L", (1, 1)).save(folder / "train/cat/grey.png")
    Image.new("P", (7, 300)).save(folder / "train/dog/palette.gif")
    data = ImageFolder(str(folder), "train", image_size=16)
    assert (len(data), data.num_classes) == (14, 2)
    assert [label for _, label in (data[index] for index in range(14))] == [0] * 7 + [1] * 7
    assert {tuple(data[index][0].shape) for index in range(14)} == {(3, 16, 16)}


def test_training_pictures_vary_and_validation_pictures_do_not(folder: Path) -> None:
    picture = Image.effect_noise((40, 40), 100).convert("RGB")
    for split in ("train", "val"):
        picture.save(folder / split / "cat/0.png")
    train, val = (ImageFolder(str(folder), split, image_size=16) for split in ("train", "val"))
    torch.manual_seed(1)
    first, second = train[0][0], train[0][0]
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(train[0][0], first)
    assert torch.equal(val[0][0], val[0][0])


def test_validation_takes_the_middle_and_normalises(folder: Path) -> None:
    picture = Image.new("RGB", (60, 20), (255, 0, 0))
    picture.paste((0, 0, 255), (20, 0, 40, 20))
    picture.save(folder / "val/cat/0.png")
    image, _ = ImageFolder(str(folder), "val", image_size=10)[0]
    blue = (torch.tensor([0.0, 0.0, 1.0]) - ImageFolder.mean.flatten()) / ImageFolder.std.flatten()
    assert torch.allclose(image, blue.view(3, 1, 1).expand(3, 10, 10), atol=1e-5)


def test_a_missing_folder_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match=r"there is no folder .*nowhere/train: data.root must hold"):
        ImageFolder(str(folder / "nowhere"), "val", 8)


def test_a_folder_without_classes_is_named(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="train holds no folders"):
        ImageFolder(str(tmp_path), "train", 8)


def test_an_empty_class_is_named(folder: Path) -> None:
    for split in ("train", "val"):
        (folder / split / "emu").mkdir()
    with pytest.raises(DataError, match=r"class emu is empty: .*train/emu has no file that ends in \.bmp"):
        ImageFolder(str(folder), "train", 8)


def test_classes_of_only_one_split_are_named(folder: Path) -> None:
    (folder / "val/dog").rename(folder / "val/bird")
    with pytest.raises(DataError, match="Only in one of them: bird, dog"):
        ImageFolder(str(folder), "val", 8)


@pytest.mark.parametrize(("damage", "num_workers"), [("text", 0), ("truncated", 0), ("empty", 0), ("truncated", 1)])
def test_an_unreadable_picture_is_named(folder: Path, damage: str, num_workers: int) -> None:
    path = folder / "train/dog/1.jpg"
    whole = path.read_bytes()
    path.write_bytes({"text": b"hello", "truncated": whole[: len(whole) // 2], "empty": b""}[damage])
    loader = DataLoader(ImageFolder(str(folder), "train", 8), batch_size=2, num_workers=num_workers)
    with pytest.raises(DataError, match=r"train/dog/1\.jpg can't be read as a picture") as caught:
        list(loader)
    assert f"python -m safetrain.recipes.resnet_ddp {folder / 'train'}" in str(caught.value)
    del caught, loader
    gc.collect()  # the exception's frames keep the loader's process alive


def test_all_unreadable_pictures_are_listed(folder: Path) -> None:
    command = [sys.executable, "-m", "safetrain.recipes.resnet_ddp", str(folder)]
    whole = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (whole.returncode, whole.stdout, whole.stderr) == (0, "", "")
    for name in ("train/cat/0.png", "val/dog/1.jpg"):
        (folder / name).write_text("damaged")
    damaged = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert damaged.returncode == 1
    first, second = damaged.stdout.splitlines()
    assert first.startswith(f"{folder / 'train/cat/0.png'} can't be read as a picture (")
    assert second.startswith(f"{folder / 'val/dog/1.jpg'} can't be read as a picture (")


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", [recipe.name for recipe in recipes() if recipe.shipped])
def test_the_first_lines_of_a_recipe_and_the_table_in_the_readme_name_its_command(name: str) -> None:
    head = (ROOT / f"configs/recipe/{name}.yaml").read_text().partition("\n\n")[0]
    assert f"#   python -m safetrain recipe={name}\n" in head
    assert f"python -m safetrain recipe={name}\n" in (ROOT / f"recipes/{name}.py").read_text()
    assert f"| [`{name}`](configs/recipe/{name}.yaml) |" in (ROOT / "README.md").read_text()


def test_text_is_split_by_file_and_no_block_leaves_its_file() -> None:
    train, val = (gpt_ddp.StandardLibrary(split, context=64) for split in ("train", "val"))
    assert 20 * len(val) < len(train)
    text = (Path(gpt_ddp.sysconfig.get_path("stdlib")) / "__future__.py").read_bytes()
    blocks = [val[index] for index in range(-(-(len(text) - 1) // 64))]  # the first file in the order of their names
    seen = b"".join(bytes(block[following != gpt_ddp.PADDING].tolist()) for block, following in blocks)
    following = b"".join(bytes(each[each != gpt_ddp.PADDING].tolist()) for _, each in blocks)
    assert (seen, following) == (text[:-1], text[1:])
    assert {block.shape for block, _ in blocks} == {(64,)}


def test_gpt_sees_only_what_came_before_and_its_embedding_is_there_once() -> None:
    model = gpt_ddp.GPT(context=16, width=32, heads=2, layers=2)
    text = torch.randint(0, 256, (3, 16))
    changed = text.clone()
    changed[:, 10:] = 0
    before, after = model(text), model(changed)
    assert before.shape == (3, 16, 256)
    assert torch.allclose(before[:, :10], after[:, :10], atol=1e-6)
    assert not torch.allclose(before[:, 10:], after[:, 10:], atol=1e-3)
    assert [name for name, value in model.state_dict().items() if 256 in value.shape] == ["bytes.weight"]
    assert gpt_ddp.generate(model, b"a" * 20, 5).startswith(b"a" * 20)


def test_a_stream_deals_out_whole_files(tmp_path: Path) -> None:
    stream_ddp.write_digits(tmp_path / "digits", files=5)
    sizes = {path.name: len(path.read_text().splitlines()) for path in (tmp_path / "digits").iterdir()}
    train = [size for name, size in sorted(sizes.items()) if name.startswith("train")]
    assert (len(train), sum(train), sum(sizes.values())) == (5, 1437, 1797)
    assert train == sorted(train)
    data = stream_ddp.Lines(tmp_path / "digits", "train", shuffle=True)
    orders = []
    for epoch in (0, 1, 0):
        data.set_epoch(epoch)
        shards = []
        for shard in range(3):
            data.set_shard(shard, 3)
            shards.append([(label, tuple(pixels.tolist())) for pixels, label in data])
        orders.append(shards)
    assert orders[0] == orders[2] != orders[1]
    assert [sum(map(len, shards)) for shards in orders] == [1437] * 3
    assert {sample for shard in orders[0] for sample in shard} == {sample for shard in orders[1] for sample in shard}


def test_a_stream_without_files_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no train_\*\.txt in .*nowhere"):
        stream_ddp.Lines(tmp_path / "nowhere", "train", shuffle=True)


def test_the_gans_classifier_knows_real_digits() -> None:
    pair = gan_ddp.Pair(width=8)
    pixels, labels = gan_ddp.digits("val").tensors
    distances = torch.cdist(pixels, pair.class_means)
    assert (distances.argmin(dim=1) == labels).float().mean() > 0.85
    spread = (distances.gather(1, labels[:, None])[:, 0] / pair.real_spread).mean()
    assert float(spread) == pytest.approx(1, abs=0.05)
    assert pair.draw(labels).shape == (360, 64)


def test_old_and_new_digits_are_labelled_from_0() -> None:
    old, new = (finetune_ddp.digits("train", first=first).tensors for first in (0, 5))
    assert len(old[1]) + len(new[1]) == 1437
    for images, labels in (old, new):
        assert images.shape[1:] == (1, 8, 8)
        assert set(labels.tolist()) == set(range(5))
