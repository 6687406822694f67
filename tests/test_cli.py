"""The command line: exit codes, one line for every kind of wrong input, JSON and nothing else on stdout."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import draftsmith
from draftsmith import cli
from draftsmith.errors import UserError, run_script
from draftsmith.pipeline.signals import Terminated

CONFIG = "target: {path: nowhere/target}\ndata: {train: nowhere.jsonl}\n"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return str(path)


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Any) -> None:
    """Puts `functions` in the place of a module that a command imports."""
    fake = types.ModuleType(module)
    for name, function in functions.items():
        setattr(fake, name, function)
    monkeypatch.setitem(sys.modules, module, fake)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must refuse: exit code 2, one line on stderr, nothing on stdout. Returns the line."""
    assert cli.main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("draftsmith: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (["train"], "Missing argument 'CONFIG'"),
        (["train", "a.yaml", "--max-minutes", "soon"], "Invalid value for '--max-minutes'"),
        (["train", "a.yaml", "--max-minutes", "-1"], "Invalid value for '--max-minutes'"),
        (["train", "a.yaml", "--plan", "--resume"], "--plan only plans"),
        (["train", "a.yaml", "--fast"], "No such option: --fast"),
        (["eval", "drafter"], "Missing option '--"),
        (["data"], "Missing command"),
        (["data", "generate", "out.jsonl", "--target", "t"], "give either --prompts FILE or --invent COUNT"),
        (["data", "generate", "o", "--target", "t", "--prompts", "p", "--invent", "3"], "give either --prompts"),
        (["data", "generate", "o", "--target", "t", "--invent", "3", "--top-p", "1.5"], "Invalid value for '--top-p'"),
        (["init"], "Missing argument 'TARGET'"),
        (["init", "target"], "Missing argument 'DATA'"),
        (["demo", "--seed", "-1"], "Invalid value for '--seed'"),
        (["bench", "step", "--geometry", "tini"], "--geometry: 'tini' is not a geometry (use one of"),
        (["doctor", "--restore", "r", "--against", "r"], "are asked one at a time"),
        (["doctor", "--restore", "nowhere"], "nowhere: no such run folder"),
    ],
)
def test_wrong_command_lines(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in refused(capsys, *arguments)


@pytest.mark.parametrize("temperature", ["1e-40", "inf", "nan", "-1"])
@pytest.mark.parametrize(
    "command",
    [
        "eval d --target t --prompts p",
        "chat d --target t",
        "bench decode d --target t --prompts p",
        "data generate o --target t --invent 3",
        "data regenerate o p --target t",
    ],
)
def test_a_temperature_that_cannot_be_sampled_with(
    capsys: pytest.CaptureFixture[str], command: str, temperature: str
) -> None:
    assert "Invalid value for '--temperature'" in refused(capsys, *command.split(), "--temperature", temperature)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.block_size=256", "drafter.block_size: Input should be less than or equal to 128"),
        ("drafter.taps=[1, 1]", "names a layer twice"),
        ("drafter.tap=[1]", "did you mean 'taps'?"),
        ("pipeline.drafters=[cpu, cpu]", "some would never get a row"),
        ("drafter.layers", "is not section.key=value"),
    ],
)
def test_wrong_overrides(capsys: pytest.CaptureFixture[str], config: str, override: str, message: str) -> None:
    assert message in refused(capsys, "train", config, override)


def test_missing_files(capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path) -> None:
    assert "none.yaml: no such config file" in refused(capsys, "train", str(tmp_path / "none.yaml"))
    prompts = str(tmp_path / "none.txt")
    assert "none.txt: no such prompt file" in refused(capsys, "eval", "d", "--target", "t", "--prompts", prompts)
    assert "none.txt: no such prompt file" in refused(
        capsys, "data", "generate", str(tmp_path / "o"), "--target", "t", "--prompts", prompts
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "run.yaml"]
    folder = refused(capsys, "eval", "d", "--target", "t", "--prompts", str(tmp_path))
    assert f"{tmp_path}: is a folder, not a prompt file (give a file of prompts" in folder


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"prompt": "a"}\n{"prompt": \n', "prompts:2: not valid JSON"),
        ('{"prompt": "a"}\n["b"]\n', "prompts:2: a list, not a prompt"),
        ('{"question": "a"}\n', "prompts:1: has neither a prompt nor messages"),
        ('{"prompt": " "}\n', "prompts:1: has neither a prompt nor messages"),
        ('{"messages": [{"content": "a"}]}\n', "prompts:1: message 1 has no role"),
        ('{"messages": [{"role": "pope", "content": "a"}]}\n', "message 1 has the unknown role 'pope'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "prompts:1: nobody asks anything"),
        ('{"messages": "a"}\n', "prompts:1: messages is a str, not a list"),
    ],
)
def test_broken_prompt_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts"
    path.write_text(content, encoding="utf-8")
    assert message in refused(capsys, "eval", "drafter", "--target", "t", "--prompts", str(path))


def test_a_target_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("a\n")
    (tmp_path / "config.json").write_text("{}")  # a folder without one is refused before its target is looked for
    arguments = ["eval", str(tmp_path), "--target", str(tmp_path / "t"), "--prompts", str(tmp_path / "prompts")]
    assert "no such target" in refused(capsys, *arguments)
    assert "--device: 'gpu' is not a device" in refused(capsys, *arguments, "--device", "gpu")
    assert "--device: 'cuda:99' does not exist" in refused(capsys, *arguments, "--device", "cuda:99")


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "d", "--target", "demo", "--prompts", "{prompts}"],
        ["chat", "d", "--target", "demo"],
        ["data", "generate", "out.jsonl", "--target", "demo", "--prompts", "{prompts}"],
        ["data", "regenerate", "out.jsonl", "{prompts}", "--target", "demo"],
        ["bench", "step"],
        ["bench", "memory"],
        ["bench", "decode", "d", "--target", "demo", "--prompts", "{prompts}"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
@pytest.mark.parametrize(
    ("device", "said"),
    [("meta", "'meta' is not supported"), ("cpu:1", "'cpu:1' does not exist"), ("gpu", "'gpu' is not a device")],
)
def test_every_command_refuses_the_same_devices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str], device: str, said: str
) -> None:
    (tmp_path / "prompts").write_text("a\n")
    arguments = [word.format(prompts=tmp_path / "prompts") for word in command]
    assert f"--device: {said}" in refused(capsys, *arguments, "--device", device)


@pytest.mark.parametrize(
    ("command", "idle"),
    [
        ("eval d --target t --prompts p", ("--top-k 0", "--top-p 1.0", "--seed 0")),
        (
            "eval d --target t --prompts p --parity",
            ("--temperature 0", "--top-k 0", "--top-p 1", "--seed 0", "--block-size 4", "--compile auto"),
        ),
        ("chat d --target t", ("--top-k 0", "--top-p 1.0", "--seed 0")),
        ("data generate o --target t --prompts p --temperature 0", ("--top-k 0", "--top-p 1.0")),
        ("data regenerate o p --server http://s", ("--batch-size 1", "--device auto")),
        (
            "data regenerate o p --target t",
            ("--model m", "--concurrency 64", "--attempts 8", "--timeout 600", "--api-key-env OPENAI_API_KEY"),
        ),
        ("data check c --no-score", ("--sample-tokens 20000", "--device auto")),
        ("train c --plan", ("--resume", "--overfit", "--max-minutes 1")),
        ("export d o", ("--engine vllm", "--private", "--gguf-file x")),
        ("import d o", ("--gguf-file x",)),
        (
            "export check o",
            (
                *("--layout zlab", "--verifier v", "--dtype as-is", "--evaluation e", "--licence", "--target-licence"),
                *("--data-licence", "--push p", "--private", "--gguf-file x"),
            ),
        ),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_also_with_its_default(
    capsys: pytest.CaptureFixture[str], command: str, idle: tuple[str, ...]
) -> None:
    for option in idle:
        name, *value = option.split()
        value = [""] if name.endswith("licence") else value
        assert f"{name} would do nothing (leave it out)" in refused(capsys, *command.split(), name, *value)


def test_a_default_that_is_not_given_is_not_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("a\n")
    (tmp_path / "config.json").write_text("{}")
    arguments = ["eval", str(tmp_path), "--target", str(tmp_path / "t"), "--prompts", str(tmp_path / "prompts")]
    assert "no such target" in refused(capsys, *arguments, "--parity")
    assert "no such target" in refused(capsys, *arguments, "--temperature", "1", "--top-k", "0", "--seed", "0")


def test_help_is_fine_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from draftsmith.cli import main\n"
        "codes = [main(list(a)) for a in ([], ['train', '--help'], ['data', 'generate', '--help'], ['version'])]\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'{codes} {heavy}' if codes != [0, 0, 0, 0] or heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "data" in result.stdout


def test_what_is_wrong_with_a_command_line_is_said_before_torch_is_loaded(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG)
    wrong = [
        *("data check nope.yaml", "data prepare nope.yaml", "data preview nope.yaml", "data features nope.yaml o"),
        *(f"compile {command} nope.yaml" for command in ("warm", "prove", "cache show", "cache verify")),
        *("compile cache pack nope.yaml c.tar.gz", f"compile cache unpack {config} nope.tar.gz"),
        *("doctor nope.yaml", "doctor --restore nope", "doctor --against nope", "doctor --restore r --against r"),
        *("eval d --target t --prompts nope", f"eval d --target t --prompts {tmp_path}"),
        *("eval d --target t --prompts p --top-k 4", "chat d --target t --top-k 4"),
        *("data generate o --target t --prompts p --invent 3", "data generate o --target t --prompts nope"),
        f"data generate o --target t --prompts {config} --exclude nope",
        *("data regenerate o p", "data regenerate o p --server http://s --extra nope"),
        *("bench step --geometry tini", "bench decode d --target t --prompts gsm8k=nope"),
        f"data check {config} --incidents {config}",
    ]
    code = (
        "import sys; from draftsmith.cli import main\n"
        "for command in sys.argv[1:]:\n"
        "    code = main(command.split())\n"
        "    if code != 2 or 'torch' in sys.modules: sys.exit(f'{command}: {code}')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *wrong], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("\n") == len(wrong)


def test_both_names_of_the_command() -> None:
    for command in ([sys.executable, "-m", "draftsmith"], [str(Path(sys.executable).with_name("draftsmith"))]):
        result = subprocess.run([*command, "version", "--json"], capture_output=True, text=True, check=True)
        assert json.loads(result.stdout)["draftsmith"] == draftsmith.__version__
        assert "torch" in result.stderr
        result = subprocess.run([*command, "train"], capture_output=True, text=True, check=False)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr


def test_json_is_alone_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: str
) -> None:
    @dataclass(frozen=True)
    class Plan:
        notices: tuple[str, ...] = ("slow",)

        def lines(self) -> list[str]:
            return ["20 steps", *self.notices]

        def to_json(self) -> dict[str, Any]:
            return {"steps": 20, "τ": None}

    def make_plan(run: Any, ranks: int) -> Plan:
        assert ranks == 1
        print("a library talks")
        return Plan()

    checked: list[Any] = []
    stand_in(monkeypatch, "draftsmith.pipeline.plan", make_plan=make_plan)
    functions = {"check_start": checked.append, "notes_on_folder": lambda _run: ["holds this run"]}
    stand_in(monkeypatch, "draftsmith.pipeline.starting", **functions)
    assert cli.main(["train", config, "--plan", "--json"]) == 0
    assert len(checked) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == {"steps": 20, "τ": None}
    assert err == "a library talks\n20 steps\nslow\nholds this run\n"
    assert cli.main(["train", config, "--plan"]) == 0
    assert capsys.readouterr().out == "a library talks\n20 steps\nslow\nholds this run\n"


def training_result(**changes: Any) -> types.SimpleNamespace:
    fields = {"reason": "all steps done", "step": 20, "loss": 1.5, "tau_proxy": 2.25, "checkpoint": Path("runs/a/20")}
    result = types.SimpleNamespace(
        **{**fields, "steps": 20, "losses": [1.5, 1.5], "succeeded": True, "rank": 0, **changes}
    )
    result.to_json = lambda: {"step": result.step}
    return result


@pytest.mark.parametrize(
    ("changes", "code"), [({}, 0), ({"succeeded": False}, 1), ({"reason": "interrupted"}, 130)], ids=str
)
def test_train_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: str,
    changes: dict[str, Any],
    code: int,
) -> None:
    asked: dict[str, Any] = {}

    def train(run: Any, *, listener: Any, **options: Any) -> types.SimpleNamespace:
        asked.update(options, steps=run.training.steps)
        listener({"kind": "step", "step": 1, "steps": 20, "loss": 3.0})
        return training_result(**changes)

    stand_in(monkeypatch, "draftsmith.pipeline.run", train=train)
    assert cli.main(["train", config, "training.steps=20", "--resume", "--max-minutes", "1.5"]) == code
    assert asked == {"steps": 20, "resume": True, "max_minutes": 1.5, "overfit": False, "last": True}
    out, err = capsys.readouterr()
    assert f"{changes.get('reason', 'all steps done')} at step 20: loss 1.500, τ proxy 2.25" in out
    assert ("NO: one row was not learned" in out) == (code == 1)
    assert err == "step 1/20 · loss 3.000\n"


@pytest.mark.parametrize(("reason", "code"), [("time limit", 1), ("interrupted", 130), ("terminated", 143)])
def test_an_overfit_run_that_was_stopped_has_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: str, reason: str, code: int
) -> None:
    stopped = training_result(succeeded=False, reason=reason, step=19, steps=500)
    stand_in(monkeypatch, "draftsmith.pipeline.run", train=lambda *_, **__: stopped)
    assert cli.main(["train", config, "--overfit"]) == code
    out = capsys.readouterr().out
    assert out.endswith("no verdict: stopped at step 19 of 500\n")
    assert "NO" not in out


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([46.7, 30.0, 18.6], "not in 3 updates (loss 46.700 → 18.600): raise training.steps, on the command line"),
        ([46.7], "not in 1 update (loss 46.700 → 46.700): raise training.steps, on the command line"),
        ([5.0 * 0.99**n for n in range(100)], "not in 100 updates (loss 5.000 → 1.849): raise training.steps"),
        ([9.0, float("nan"), 5.0, 4.0, 4.0, 4.0, 4.0, 3.99], "NO: one row was not learned (loss 9.000 → 3.990); data"),
        ([5.0, 5.0, 6.0], "NO: one row was not learned (loss 5.000 → 6.000); data, labels or gradients do not fit"),
        ([float("nan")], "NO: one row was not learned (no loss that is a number)"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_overfit_run_whose_loss_falls_still_is_no_no(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: str, losses: list[float], said: str
) -> None:
    ended = training_result(succeeded=False, losses=losses, step=len(losses), steps=len(losses))
    stand_in(monkeypatch, "draftsmith.pipeline.run", train=lambda *_, **__: ended)
    assert cli.main(["train", config, "--overfit"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(said)


def test_overfit_takes_its_number_of_updates_from_the_command_line_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: str
) -> None:
    asked: list[int | None] = []

    def train(run: Any, **_: Any) -> types.SimpleNamespace:
        asked.append(run.training.steps)
        return training_result()

    stand_in(monkeypatch, "draftsmith.pipeline.run", train=train)
    Path(config).write_text(CONFIG + "training: {steps: 3}\n")
    for arguments in ([], ["training.steps=7"], ["training={steps: 8}"]):
        assert cli.main(["train", config, "--overfit", *arguments]) == 0
    assert cli.main(["train", config]) == 0
    Path(config).write_text(CONFIG + "training: runs/a\n")
    capsys.readouterr()
    said = [refused(capsys, "train", config, *options) for options in ([], ["--overfit"])]
    assert said[0] == said[1]
    assert asked == [None, 7, 8, 3]


def test_an_overfit_run_is_not_resumed(capsys: pytest.CaptureFixture[str], config: str) -> None:
    text = refused(capsys, "train", config, "--overfit", "--resume")
    assert "--overfit begins anew each time" in text
    assert "--resume would do nothing" in text


def test_a_run_with_nothing_left_to_do_has_no_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: str
) -> None:
    nothing = training_result(losses=[], loss=float("nan"), tau_proxy=float("nan"))
    stand_in(monkeypatch, "draftsmith.pipeline.run", train=lambda *_, **__: nothing)
    assert cli.main(["train", config, "--resume"]) == 0
    assert "all steps done at step 20: no update was made" in capsys.readouterr().out


def raising(error: BaseException) -> Any:
    def train(*_: Any, **__: Any) -> None:
        raise error

    return train


def test_a_cache_folder_that_torch_cannot_make_is_one_line() -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": "/proc/no/such"}
    for arguments in (["doctor"], ["eval", "x", "--target", "demo", "--prompts", __file__]):
        command = [sys.executable, "-m", "draftsmith", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("draftsmith: TORCHINDUCTOR_CACHE_DIR=/proc/no")
        assert done.stderr.count("\n") == 1


def test_scripts_end_as_commands_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/one.py"])
    for main, code, line in (
        (lambda: None, 0, ""),
        (lambda: 1, 1, ""),
        (raising(UserError("no drafter", where="a", fix="add one")), 2, "one.py: a: no drafter (add one)\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            run_script(main)
        assert ended.value.code == code
        assert capsys.readouterr().err == line
    with pytest.raises(AssertionError):
        run_script(raising(AssertionError("ours")))


def test_user_errors_interrupts_and_our_own_bugs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: str
) -> None:
    stand_in(monkeypatch, "draftsmith.pipeline.run", train=raising(UserError("no taps", where="a", fix="add one")))
    assert refused(capsys, "train", config) == "draftsmith: a: no taps (add one)\n"
    for interrupt, code, line in (
        (KeyboardInterrupt(), 130, "draftsmith: interrupted\n"),
        (KeyboardInterrupt("interrupted twice"), 130, "draftsmith: interrupted twice\n"),
        (Terminated("terminated early"), 143, "draftsmith: terminated early\n"),
    ):
        stand_in(monkeypatch, "draftsmith.pipeline.run", train=raising(interrupt))
        assert cli.main(["train", config]) == code
        assert capsys.readouterr().err == line
    monkeypatch.setenv("RANK", "1")  # the first rank has said it
    assert cli.main(["train", config]) == 143
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("RANK")
    stand_in(monkeypatch, "draftsmith.pipeline.run", train=raising(AssertionError("invariant")))
    with pytest.raises(AssertionError, match="invariant"):
        cli.main(["train", config])


@pytest.mark.parametrize("passed", [True, False])
def test_demo_says_no_when_it_does_not_hold_what_it_stands_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, passed: bool
) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "result.json").write_text("{}")
    written: list[Path] = []

    def run_demo(output: Path, **_: Any) -> dict[str, Any]:
        written.append(output)
        return {"text": "τ 2.5", "tau": 2.5, "passed": passed}

    stand_in(monkeypatch, "draftsmith.demo.run", run_demo=run_demo)
    assert cli.main(["demo", "--output", str(tmp_path / "demo"), "--json"]) == (0 if passed else 1)
    assert json.loads(capsys.readouterr().out) == {"tau": 2.5, "passed": passed}
    assert written == [tmp_path / "demo-2"]


def test_an_output_folder_of_another_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path
) -> None:
    from draftsmith.config import load_config
    from draftsmith.observe.run_folder import open_run_folder

    output = f"training.output={tmp_path / 'run'}"
    open_run_folder(load_config(config, [output])).close()
    assert "already holds this run" in refused(capsys, "train", config, output)
    message = refused(capsys, "train", config, output, "drafter.layers=2", "--resume")
    assert "different run (drafter.layers 5 there, 2 here)" in message
    assert "no run here to resume" in refused(capsys, "train", config, output + "-2", "--resume")

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(UserError, match="cannot be used as run folder: Read-only file system"):
        open_run_folder(load_config(config, [output + "-3"]))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.ENAMETOOLONG])
def test_a_place_that_the_machine_refuses_is_one_line_wherever_it_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number), "/some/where")

    monkeypatch.setattr("draftsmith.observe.status.read_status", refuse)
    assert refused(capsys, "status", "run") == f"draftsmith: /some/where: cannot be used: {os.strerror(number)}\n"


def test_a_file_of_ours_that_is_missing_is_no_error_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def miss(*_: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/some/where")

    monkeypatch.setattr("draftsmith.observe.status.read_status", miss)
    with pytest.raises(FileNotFoundError):
        cli.main(["status", "run"])


def test_an_interrupt_ends_the_command_beside_threads_that_work_on() -> None:
    """As a second Ctrl-C leaves them, whoever waited for them."""
    script = """
import sys, threading, time
import draftsmith.observe.status as status
from draftsmith.cli import main

def interrupted(_run):
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise KeyboardInterrupt

status.read_status = interrupted
sys.argv = ["draftsmith", "status", "run"]
sys.exit(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "draftsmith: interrupted\n")
