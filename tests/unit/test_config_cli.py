"""What is wrong on the command line is told before a process starts: exit code 2, one message, no traceback."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safetrain import cli, launch
from safetrain.user_path import search_user_code_last

TOOLS = ("chaos", "export", "guard", "lint", "new", "page", "preflight", "profile", "tune")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """``python -m safetrain`` in this process, in a user's folder, where no rank may start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    search_user_code_last()
    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("a process was started"))
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\n# My own.\ntrainer: {_target_: cli_mine.Mine}\n"
        "model: {_target_: torch.nn.Linear, in_features: 2, out_features: 1}\n"
        "optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.1}\n"
    )
    (tmp_path / "cli_mine.py").write_text(
        "import safetrain\nclass Mine(safetrain.Trainer):\n    def training_step(self, batch): ...\n"
    )

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["safetrain", *arguments])
        try:
            code = cli.main(arguments)
        except SystemExit as leave:
            code = int(leave.code or 0)
        return code, *capsys.readouterr()

    yield command
    sys.modules.pop("cli_mine", None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["recipe=mien"],
            "recipe=mien: no such choice. Did you mean mine? Allowed: finetune_ddp, gan_ddp, gpt_ddp, mine, ",
        ),
        (["loop.epochs=3"], "recipe is missing: say recipe=NAME. Allowed: finetune_ddp, gan_ddp, "),
        (
            ["recipe=mine", "strategy=dpp"],
            "strategy=dpp: no such choice. Did you mean ddp? Allowed: ddp, fsdp, single.",
        ),
        (
            ["recipe=mine", "policy/skip=al"],
            "policy/skip=al: no such choice. Did you mean all? Allowed: all, any, partial.",
        ),
        (["recipe=mine", "policy/skpi=any"], "policy/skpi=any: no such key. Did you mean policy/skip?"),
        (["recip=mine"], "recip=mine: no such key. Did you mean recipe?"),
        (["recipe=mine", "loop.epchs=3"], "loop.epchs=3: no such key. Did you mean epochs? Allowed: accumulate,"),
        (["recipe=mine", "+loop.epchs=3"], "loop.epchs: no such key. Did you mean epochs?"),
        (["recipe=mine", "loop.epochs=0"], "loop.epochs=0: must be at least 1"),
        (["recipe=mine", "loop.epochs=many"], "loop.epochs='many': must be a whole number, not text"),
        (["recipe=mine", "loop.epochs=null"], "loop.epochs=None: must be a whole number, not null"),
        (["recipe=mine", "loader.batch_size=0"], "loader.batch_size=0: must be at least 1"),
        (
            ["recipe=mine", "resume=outputs/mine/monday"],
            "resume=outputs/mine/monday: there is no such run or checkpoint. Allowed: auto, none, a path.",
        ),
        (
            ["recipe=mine", "metric=val/loss"],
            "metric=val/loss: there is no validation that could give it, since data.val is null.",
        ),
        (["recipe=mine", "device=gpu"], "device='gpu': must be one of auto, cpu, cuda"),
        (["recipe=mine", "device=gpu"], "device='gpu': must be one of auto, cpu, cuda. Did you mean cuda?"),
        (["recipe=mine", "policy.skip=partial"], "names what to build. Did you mean policy/skip=partial?"),
        (["recipe=mine", "recipe.data=imagefolder"], "no such key. Did you mean recipe/data=imagefolder? Allowed:"),
        (["recipe=mine", "model.bias=false"], "model.bias=false: no such key. To add it: +model.bias=false\n"),
        (["recipe=mine", "model.biass=false"], "model.biass=false: no such key. Allowed: _target_, in_features,"),
        (["recipe=mine", "env.MY_OWN=1"], "env.MY_OWN=1: no such key. To add it: +env.MY_OWN=1\n"),
        (["recipe=mine", "vars.a.b=1"], "vars.a.b=1: no such key. To add it: +vars.a.b=1\n"),
        (["recipe=mine", "scheduler.gamma=0.5"], "scheduler.gamma=0.5: no such key: scheduler is null in this recipe."),
        (
            ["recipe=mine", "scheduler._target_=torch.optim.lr_scheduler.StepLR"],
            "To add one: +scheduler._target_=torch.optim.lr_scheduler.StepLR +scheduler._partial_=true\n",
        ),
        (
            ["recipe=mine", "scheduler.gamma=0.5"],
            "To add one: +scheduler._target_=... +scheduler._partial_=true +scheduler.gamma=0.5\n",
        ),
        (["recipe=mine", "model.in_features=abc"], "model.in_features='abc': Linear takes a whole number (int) here"),
        (["recipe=mine", "optimizer.lr=abc"], "optimizer.lr='abc': SGD takes a number (float) here"),
        (
            ["recipe=mine", "policy.skip.max_consecutive=abc"],
            "policy.skip.max_consecutive='abc': SkipAny takes a whole number (int) here",
        ),
        (["recipe=mine", "model._target_=spirals.mlp"], "there is no module spirals: no spirals.py in "),
        (["recipe=mine", "--resolve"], "--resolve says how to print a config, and goes with --cfg job or --help"),
        (["recipe=mine", "strategy.bucket_cap_mb=0"], "strategy.bucket_cap_mb=0"),
        (["recipe=mine", "strategy.comm_hook=fp8"], "strategy.comm_hook='fp8'"),
        (
            ["recipe=mine", "strategy=fspd"],
            "strategy=fspd: no such choice. Did you mean fsdp? Allowed: ddp, fsdp, single.",
        ),
        (["recipe=mine", "strategy=fsdp", "strategy.shard=Block"], "strategy.shard='Block': must be null or a list of"),
        (["recipe=mine", "strategy=fsdp", "strategy.param_dtype=fp8"], "allowed are null, fp32, bf16, fp16"),
        (
            ["recipe=mine", "strategy=fsdp", "strategy.replicas=3", "launch.nproc_per_node=4", "device=cpu"],
            "strategy.replicas=3: 4 ranks can't be divided into that many equal groups. Allowed here: 1, 2, 4.",
        ),
        (
            ["recipe=mine", "strategy=single", "launch.nproc_per_node=2", "device=cpu"],
            "strategy=single is for one rank, and 2 are asked for: set launch.nproc_per_node=1 launch.nnodes=1, or",
        ),
        (["recipe=mine", "policy.skip.max_consecutive=-1"], "policy.skip: max_consecutive=-1"),
        (["recipe=mine", "+model.widht=3"], "model.widht: torch.nn.Linear takes no such argument."),
        (["recipe=mine", "~model.in_features"], "model: torch.nn.Linear can't be called with what the config gives it"),
        (
            ["recipe=mine", "model._target_=torch.nn.Linaer"],
            "model._target_=torch.nn.Linaer: torch.nn has no Linaer. Did you",
        ),
        (
            ["recipe=mine", "trainer._target_=cli_mine.Mien"],
            "trainer._target_=cli_mine.Mien: cli_mine has no Mien. Did you",
        ),
        (["recipe=mine", "trainer._target_=torch.nn.ReLU"], "trainer._target_=torch.nn.ReLU: must be a subclass of"),
        (
            ["recipe=mine", "+trainer.looop=3"],
            "trainer.looop: cli_mine.Mine takes no such argument. Did you mean loop?",
        ),
        (["recipe=mine", "optimizer.lr=0.1,0.2"], "Ambiguous value for argument 'optimizer.lr=0.1,0.2'"),
        (["recipe=mine", "loop.epochs=[1"], "loop.epochs=[1: can't be read as key=value."),
        (["recipe=mine", "loop"], "loop: can't be read as key=value."),
        (["recipe=mine", "+vars.a=${loop.epohcs}"], "vars.a: Interpolation key 'loop.epohcs' not found"),
        (["recipe=mine", "trainer=???"], "trainer is missing: the recipe, or trainer=VALUE, has to say it"),
        (["recipe=resnet_ddp", "recipe/data=imagefolder"], "data.root is missing: the recipe, or data.root=VALUE, has"),
        (["recipe=mine", "device=cuda"], "device=cuda: torch sees no GPU on this machine. Allowed here: auto, cpu."),
    ],
)
def test_a_mistake_is_refused_with_the_remedy(run: Run, overrides: list[str], message: str) -> None:
    code, _, err = run(*overrides)
    assert message in err
    assert code == 2
    assert "Traceback" not in err
    assert not Path("outputs").exists()  # nothing is left of a job that was refused


def test_a_recipe_that_is_no_yaml_is_refused(run: Run) -> None:
    Path("recipe", "broken.yaml").write_text("# @package _global_\nmodel: {_target_: a.b\nloop: 3\n")
    code, _, err = run("recipe=broken")
    assert code == 2
    said = "line 3: is no YAML: while parsing a flow mapping, expected ',' or '}', but got ':'."
    assert err == f"{Path.cwd()}/recipe/broken.yaml, {said}\n"


@pytest.mark.parametrize("override", ["seed=1", "optimizer.lr=3"])
def test_a_recipe_that_does_not_say_where_its_keys_belong_is_refused(run: Run, override: str) -> None:
    mine = Path("recipe", "mine.yaml")
    mine.write_text(mine.read_text().removeprefix("# @package _global_\n"))
    code, _, err = run("recipe=mine", override)
    assert code == 2
    assert "the recipe's keys (trainer, model, optimizer) came to lie below `recipe`" in err
    assert "write `# @package _global_` as the first line" in err


def test_what_takes_any_argument_may_be_given_one_more(run: Run) -> None:
    mine = Path("recipe", "mine.yaml")
    mine.write_text(mine.read_text().replace("torch.nn.Linear", "cli_mine.linear"))
    with Path("cli_mine.py").open("a") as module:
        module.write("def linear(**settings): ...\n")
    code, _, err = run("recipe=mine", "model.biass=1")
    assert code == 2
    assert err.startswith("model.biass=1: no such key. Allowed: ")
    assert err.endswith(" To add it: +model.biass=1\n")


def test_a_trainer_that_does_not_pass_its_parts_on_is_refused(run: Run) -> None:
    Path("cli_mine.py").write_text(
        "import safetrain\nclass Mine(safetrain.Trainer):\n    def __init__(self, width=3): super().__init__()\n"
    )
    code, _, err = run("recipe=mine")
    assert code == 2
    assert "trainer.model: cli_mine.Mine takes no such argument" in err


def test_without_arguments_the_recipes_are_listed(run: Run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "  resnet_ddp    A small ResNet" in out
    assert "  mine          My own.  (./recipe/mine.yaml)" in out
    assert "python -m safetrain recipe=finetune_ddp" in out


def test_resolve_goes_with_cfg(run: Run) -> None:
    code, out, err = run("recipe=mine", "--cfg", "job", "--resolve")
    assert (code, err) == (0, "")
    assert "name: mine" in out


def test_help_tells_the_commands_the_choices_and_the_values(run: Run) -> None:
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    for text in (
        "python -m safetrain -m recipe=NAME",
        "policy/skip: all, any, partial",
        "recipe: finetune_ddp, gan_ddp, gpt_ddp, resnet_ddp",
        "  epochs: 1",
        *(f"python -m safetrain.{name} " for name in TOOLS if name != "guard"),
        "torchrun ... -m safetrain.guard ",
    ):
        assert text in out, text


@pytest.mark.parametrize("name", TOOLS)
def test_each_tool_has_a_help_of_its_own(
    name: str, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    main = importlib.import_module(f"safetrain.{name}").main
    try:
        code = main(["--help"]) if inspect.signature(main).parameters else main()
    except SystemExit as left:  # argparse's
        code = left.code
    assert code == 0
    out, err = capsys.readouterr()
    assert f"python -m safetrain.{name}" in out or f"-m safetrain.{name} " in out
    assert err == ""


def test_what_a_recipe_leaves_out_is_added_as_the_refusal_says(run: Run) -> None:
    target = "+scheduler._target_=torch.optim.lr_scheduler.ExponentialLR"
    code, out, err = run("recipe=mine", target, "+scheduler._partial_=true", "+scheduler.gamma=0.5", "--cfg", "job")
    assert (code, err) == (0, "")
    assert "  _partial_: true\n  gamma: 0.5\n" in out


def test_cfg_job_prints_what_will_run(run: Run) -> None:
    code, out, err = run("recipe=mine", "loop.epochs=7", "--cfg", "job")
    assert (code, err) == (0, "")
    assert "  _target_: cli_mine.Mine" in out
    assert "  epochs: 7" in out
    assert not Path("outputs").exists()
