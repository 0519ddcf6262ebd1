"""The command line of every entry: options, key=value, --help, exit codes, Hydra's answers."""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import normexp
from normexp import api, train
from normexp.__main__ import main as commands
from normexp.cli import entry, parse_command, read_options
from normexp.errors import UserError
from normexp.training.config.compose import compose_config
from normexp.training.config.groups import GROUPS, group_choices
from normexp.training.config.help import USAGE, help_text
from normexp.training.config.keys import KEYS
from normexp.training.config.slots import PLACEMENTS
from normexp.training.config.validate import OPTIONS
from normexp.training.records.files import write_text

ENTRIES = sorted(USAGE)


def test_options_and_overrides_stand_in_any_order():
    here = Path(__file__).parent
    command = parse_command(["seed=1", "-m", "-cd", str(here), "lr=2", "--config-dir", "/"])
    folders = f'hydra.searchpath=["file://{here}","file:///"]'
    assert [one.input_line for one in command.overrides] == [folders, "seed=1", "lr=2"]
    assert command.multirun and not command.shows_config


@pytest.mark.parametrize(
    ("entry", "line", "value"),
    [
        ("report", "study=[a, b]", ["a", "b"]),
        ("report", "study=[2026,b]", ["2026", "b"]),
        ("report", "study=2026_11", ["2026_11"]),
        ("report", "tolerance=1e-2 study=a", 0.01),
        ("report", "tolerance=null study=a", None),
        ("report", "watch=True study=a", True),
        ("status", "study=2026", "2026"),
        ("status", 'runs_dir="a=[b,c]" study=a', "a=[b,c]"),
        ("evaluate", "run=runs/my study/x", "runs/my study/x"),
        ("evaluate", "evaluate_with=[running,'batch'] run=a", ["running", "batch"]),
    ],
)
def test_a_plain_value_is_read_as_its_rule_wants(entry: str, line: str, value: object):
    words = re.split(r" (?=\w+=)", line)
    options = read_options(entry, words)
    assert options[line.partition("=")[0]] == value
    assert options.keys() == OPTIONS[entry].keys()


REFUSED = [
    ("train", "norm=nrom", "norm=nrom: no such norm; did you mean"),
    ("train", "norm=naive_var", "deviations/"),
    ("train", "batch_size=0", "batch_size=0: must be greater than 0 (samples)"),
    ("train", "--confg-dir a", "--confg-dir"),
    ("train", "--norm group", "write keys as key=value"),
    ("train", "--config-dir", "--config-dir"),
    ("train", "--config-dir nowhere", "--config-dir nowhere: no such folder"),
    ("train", "--cfg everything", "everything"),
    ("train", "--cfg job -m", "drop -m"),
    ("train", "--config-name mine -m", "a recipe of yours is --config-dir FOLDER experiment=mine"),
    ("train", "-cp my_conf", "normexp has one config"),
    ("train", "--cfg job optim=sgdd", "optim=sgdd: no such optim"),
    ("train", "norm.momentum=1 +norm.momentum=2", "norm.momentum is given twice; name it once"),
    (
        "train",
        "-m norm=batch norm=group",
        "if the shell has split braces, type -m norm=batch,group",
    ),
    ("train", "norm.at=a:rms norm.at=b:none", "split braces, type 'norm.at={a:rms,b:none}'"),
    ("train", "runs_dir=$NO_SUCH/a", "runs_dir=$NO_SUCH/a: $NO_SUCH is not set; export it"),
    ("train", "data_dir=${NO_SUCH}/a", "data_dir=$NO_SUCH/a: $NO_SUCH is not set; export it"),
    ("train", "data=text_file data.path=$NO_SUCH", "data.path=$NO_SUCH: $NO_SUCH is not set"),
    ("train", "--config-dir $NO_SUCH", "--config-dir=$NO_SUCH: $NO_SUCH is not set"),
    ("train", "hydra.sweeper.params.lr=3", "search with python -m normexp.tune"),
    ("train", "-m lr=range(0,1,0)", "lr=range(0,1,0): range() arg 3 must not be zero"),
    ("train", "-m lr=interval(1,2)", "lr=interval(1,2): an interval has no list; use a,b or"),
    ("train", "DROP_LAST=true", "DROP_LAST: unknown key; did you mean drop_last"),
    ("tune", "lr=intervall(0.1,1)", "lr=intervall(0.1,1): the value cannot be read"),
    ("tune", "lr=choice(1,2) tune.metric=val/f1", "tune.metric=val/f1: nothing is chosen"),
    ("tune", "norm=batch", "nothing to search"),
    ("tune", "lr=choice(1,2) tune.metric=val/loss@", "tune.metric=val/loss@: needs evaluate_with"),
    ("check", "norm=grup", "did you mean group"),
    ("check", "norm.view=sequence", "norm.view=sequence"),
    ("check", "norm.half_life=100", "norm.half_life=100: has no effect on a card"),
    ("check", "norm=group norm.nun_groups=3", "did you mean norm.num_groups"),
    ("check", "formt=json", "did you mean format?"),
    ("check", "norm=as_built", "norm=as_built: has no effect on a card; it takes a norm"),
    ("check", "format=csv", "format=csv: must be 'table' or 'json'"),
    ("check", "batch_size=4", "batch_size=4: has no effect on a card"),
    ("check", "eps=1e-5,-1", "eps=-1: must be greater than or equal to 0"),
    ("evaluate", "", "run is missing"),
    ("evaluate", "run=a evaluate_wth=[batch]", "did you mean evaluate_with"),
    ("evaluate", f"run={__file__}", f"{__file__} is no cell"),
    ("evaluate", "run=a evaluate_with=[exact]", "evaluate_with=[exact]: must be"),
    ("evaluate", "run=a evaluate_batch_sizes=[0]", "evaluate_batch_sizes=[0]: must be"),
    ("report", "runs/mine", "'runs/mine' is not key=value, as in study=NAME"),
    ("report", "study=a serve=true", "serve: unknown key"),
    ("report", "study=[a,a]", "study=[a,a]: must be a list of different values"),
    ("report", "study=a,b", "of at most 200 bytes; type study=[a,b]"),
    ("report", "study=a study=b", "split braces, type 'study=[a,b]'"),
    ("report", "runs_dir=${NO_SUCH}/a", "${NO_SUCH} is not set; export it"),
    ("report", "study=a tolerance=nan", "tolerance=nan: must be"),
    ("report", "study=a watch=maybe", "watch=maybe: must be true or false"),
    ("status", "study=", "study=null: must be a string"),
    ("status", "", "study is missing"),
    ("status", "studdy=s", "did you mean study"),
    ("status", "study=nowhere", "runs_dir=runs has no studies yet"),
    ("report", "", "runs_dir=runs has no studies yet"),
    ("report", "watch=true", "watch=true: set study=... too"),
    ("report", "runs_dir=nowhere", "runs_dir=nowhere has no studies yet"),
    ("evaluate", "run=nowhere/x", "nowhere/x does not exist"),
    ("status", "study=../up", "study=../up: must be a folder name"),
]


@pytest.mark.parametrize(("entry", "line", "part"), REFUSED, ids=lambda value: value or "nothing")
def test_a_mistake_is_one_line_and_exit_code_2(
    entry: str, line: str, part: str, capsys, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert importlib.import_module(f"normexp.{entry}").main(line.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith("normexp: ") and err.count("\n") == 1 and out == ""
    assert part in err


def test_variables_in_paths_are_filled_in(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    config = compose_config(["runs_dir=$SCRATCH/runs", "data_dir=${runs_dir}/../data"])
    assert config["runs_dir"] == "/scratch/me/runs"
    assert config["data_dir"] == "/scratch/me/runs/../data"
    assert read_options("report", ["runs_dir=${SCRATCH}/runs"])["runs_dir"] == "/scratch/me/runs"
    words = ["data=image_folder", "data.root=${SCRATCH}/images"]
    assert compose_config(words)["data"]["root"] == "$SCRATCH/images"  # ids count it as typed


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"\xef\xbb\xbf# @package _global_\nsteps: 2\n", "begins with a byte order mark"),
        (b"# @package _global_\nnotes: caf\xe9\n", "is not UTF-8 (byte 0xe9 in line 2)"),
        ("# @package _global_\nsteps: 2\n".encode("utf-16"), "is not UTF-8 (byte 0xff in line 1)"),
    ],
)
def test_a_recipe_in_another_encoding_is_named(tmp_path: Path, capsys, content: bytes, fault: str):
    file = tmp_path / "caf\u00e9" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    file.with_name("other.yaml").write_text("# @package _global_\nsteps: 2\n")
    words = ["--config-dir", str(file.parents[1]), "--cfg", "job"]
    main = importlib.import_module("normexp.train").main
    assert main([*words, "experiment=mine"]) == 2
    assert f"{file} {fault}; save it as UTF-8" in capsys.readouterr().err
    assert main([*words, "experiment=other"]) == 0


def test_a_file_of_a_recipe_that_cannot_be_read_is_named(tmp_path: Path, capsys):
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "latin.yaml").write_bytes(b"# @package _global_\nnotes: caf\xe9\n")
    (folder / "zero.yaml").write_bytes(b"# @package _global_\nnotes: \0\n")
    main = importlib.import_module("normexp.train").main
    for name, fault in {"latin": " is not UTF-8", "zero": ": YAML forbids the char"}.items():
        (folder / "mine.yaml").write_text(f"# @package _global_\ndefaults: [{name}]\n")
        assert main(["--config-dir", str(tmp_path), "experiment=mine", "--cfg", "job"]) == 2
        assert f"{folder / name}.yaml{fault}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("optim.momentum: 0.5", "optim.momentum: a recipe nests its keys"),
        ("logger: null", "logger=null: a recipe has keys below logger, as in"),
        ("optim:", "optim=null: a recipe has keys below optim, as in"),
        ("schedule: linear", "in `defaults`, by `- override /schedule: linear`"),
        ("optim: [1]", "experiment/mine.yaml: a list in place of a group"),
        ("optim: {schedule: linear}", "optim.schedule: unknown key; the word is schedule=..."),
        ("defaults: [mine]", "experiment=mine: `defaults` of a YAML file lead back"),
    ],
)
def test_a_line_of_a_recipe_that_sets_nothing_is_refused(tmp_path: Path, capsys, line, fault):
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(f"# @package _global_\n{line}\n")
    main = importlib.import_module("normexp.train").main
    assert main(["--config-dir", str(tmp_path), "experiment=mine", "--cfg", "job"]) == 2
    assert fault in capsys.readouterr().err


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", b"1 +- 2 * a# |-| cafe ?\n"),
        ("latin-1", b"1 \xb1 2 * a# |-| caf\xe9 ?\n"),
        ("utf-8", "1 ± 2 ● a† │─│ café 中\n".encode()),
    ],
)
def test_signs_that_an_encoding_lacks_give_way(monkeypatch, encoding: str, shown: bytes):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))

    def show(_: list[str]) -> int:
        print("1 ± 2 ● a† │─│ café 中")
        return 0

    assert entry("report")(show)([]) == 0
    assert written.getvalue() == shown


def test_a_command_in_a_removed_folder_is_refused_in_a_line(tmp_path: Path, capsys, monkeypatch):
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    monkeypatch.setattr(sys, "argv", ["normexp-train"])
    assert importlib.import_module("normexp.train").main() == 2
    assert capsys.readouterr().err.startswith("normexp: No such file or directory; it has gone")


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path, capsys):
    path = tmp_path / "file" / "table"
    path.parent.touch()
    assert entry("report")(lambda _: write_text(path, "") or 0)([]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"normexp: {path}: Not a directory; a file is") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "path", "code", "remedy"),
    [
        (errno.EACCES, "/data/a", 2, "/data/a: Permission denied; change its permissions"),
        (errno.EROFS, "/data/a", 2, "/data/a: Read-only file system; name another folder"),
        (errno.ENAMETOOLONG, "/data/a", 2, "/data/a: File name too long; give shorter names"),
        (errno.ENOLCK, "/data/.lock", 2, "/data/.lock: No locks available; file locks do not"),
        (errno.EIO, "/data/a", 2, "/data/a: Input/output error; see to it"),
        (errno.ECONNREFUSED, None, 2, "Connection refused; see to it"),
        (errno.ENOSPC, "/data/a", 1, "the disk is full"),
    ],
)
def test_an_error_of_the_file_system_is_one_line_with_its_path_and_what_to_do(
    number: int, path: str | None, code: int, remedy: str, capsys: pytest.CaptureFixture[str]
):
    def act(_: list[str]) -> int:
        raise OSError(number, os.strerror(number), path)

    assert entry("report")(act)([]) == code
    said = capsys.readouterr().err
    assert said.startswith(f"normexp: {remedy}") and said.count("\n") == 1


def test_a_file_that_hides_another_module_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def act(_: list[str]) -> int:
        return module.nothing

    def fail(_: list[str]) -> int:
        raise AttributeError("module 'other' has no attribute 'nothing'")

    for name, is_told in (("my_norm", False), ("statistics", True), ("yaml", True)):
        module = ModuleType(name)
        module.__file__ = str(tmp_path / f"{name}.py")
        Path(module.__file__).touch()
        with monkeypatch.context() as imported:
            imported.setitem(sys.modules, name, module)
            if is_told:
                assert entry("report")(act)([]) == 2
                assert f"{name}.py hides another module {name}, " in capsys.readouterr().err
            for one in (fail,) if is_told else (act, fail):
                with pytest.raises(AttributeError):
                    entry("report")(one)([])


def test_code_that_ends_the_program_is_named_and_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "ends_all.py").write_text("import sys\n\nclass Norm: ...\n\nsys.exit()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("normexp.check").main(["norm=ends_all.Norm"]) == 2
    told = capsys.readouterr().err
    assert "your own code ends the program, by sys.exit (ends_all.py, line 5)" in told
    words = ["norm=ends_all.Norm", "workers=0", "replicas=1", "trainer=cpu"]
    assert train.main(words) == 1
    assert "SystemExit" in capsys.readouterr().err and not [*tmp_path.glob("runs/*/stacks/*")]


@pytest.mark.parametrize(
    ("function", "arguments", "part"),
    [
        ("run", [["lr", 3]], 'overrides=["lr", 3]: must be a'),
        ("run", ["norm=grup"], 'norm="grup": no such norm; did you mean group'),
        ("run", [["norm=group"], -1], "workers=-1: must be greater than or equal to 0"),
        ("load_study", [[]], "study=[]: must not be empty"),
        ("load_report", [[]], "study=[]: must not be empty"),
    ],
)
def test_a_mistake_in_python_is_one_line(function: str, arguments: list, part: str):
    with pytest.raises(UserError) as caught:
        getattr(normexp, function)(*arguments)
    assert part in str(caught.value)


def test_values_from_python_are_words_and_lists_are_swept():
    words = api._words(
        "-m norm=group 'study=a b'",
        {
            "lr": [0.1, 1],
            "evaluate_with": ["running", "precise"],
            "tags": ("x", "y, z"),
            "steps": 3,
        },
    )
    assert words == [
        *("-m", "norm=group", "study=a b", "-m", "lr=0.1,1", "evaluate_with=[running,precise]"),
        *('tags=[x,"y, z"]', "steps=3"),
    ]
    texts = {"notes": "it is: [good]", "logger": ["csv", "wandb"], "steps": None, "stack": False}
    words = api._words(["norm=batch"], texts)
    assert words[1:] == [
        'notes="it is: [good]"',
        "logger=[csv,wandb]",
        "steps=null",
        "stack=false",
    ]
    assert compose_config(words)["notes"] == "it is: [good]"


def test_a_notebook_shows_a_mistake_as_one_line():
    """IPython calls this method of an error, if it has it, for what it prints."""
    assert UserError("lr=0: must be above 0")._render_traceback_() == [
        "normexp: lr=0: must be above 0"
    ]


def test_a_console_script_imports_from_the_current_folder(tmp_path: Path):
    (tmp_path / "my_own.py").write_text("class Mine: ...\n")
    script = tmp_path / "bin" / "normexp-train"
    script.parent.mkdir()
    script.write_text("import sys; from normexp.train import main; sys.exit(main())")
    words = [sys.executable, script, "norm=my_own.Yours"]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.stderr == "normexp: norm._target_=my_own.Yours: my_own has no Yours; it has Mine\n"


@pytest.mark.parametrize("words", [["status", "--help"]])
def test_a_reader_that_goes_is_no_traceback(words: list[str]):
    """As in `--help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    run = [sys.executable, "-m", f"normexp.{words[0]}", *words[1:]]
    with os.fdopen(writer) as stdout:
        done = subprocess.run(run, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == ""


def raises(error: BaseException):
    def act(words: list[str]) -> int:
        assert words == ["a"]
        raise error

    return act


def test_exit_codes(capsys: pytest.CaptureFixture[str]):
    assert entry("status")(lambda _: 1)([]) == 1
    assert entry("status")(raises(UserError("lr=0: must be above 0")))(["a"]) == 2
    assert entry("status")(raises(KeyboardInterrupt()))(["a"]) == 130
    assert entry("status")(raises(KeyboardInterrupt("stopped")))(["a"]) == 130
    said = ["lr=0: must be above 0", "interrupted", "stopped"]
    assert capsys.readouterr().err.splitlines() == [f"normexp: {text}" for text in said]
    with pytest.raises(ZeroDivisionError):
        entry("status")(raises(ZeroDivisionError()))(["a"])


# --- help ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ENTRIES)
def test_help_fits_a_terminal_and_names_every_key(entry: str, capsys: pytest.CaptureFixture[str]):
    assert importlib.import_module(f"normexp.{entry}").main(["--help"]) == 0
    text = capsys.readouterr().out
    assert f"python -m normexp.{entry} " in text
    assert max(map(len, text.splitlines())) <= 100
    keys = {
        "train": [key for key in KEYS if "." not in key and key not in (*GROUPS, "tune")],
        "tune": [key for key in KEYS if key.startswith("tune.")],
    }
    for key in keys.get(entry) or OPTIONS[entry]:
        assert f"\n  {key}=" in text


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("entry", USAGE)
def test_help_breaks_no_word(monkeypatch: pytest.MonkeyPatch, entry: str, width: int):
    monkeypatch.setenv("COLUMNS", "100")
    words = help_text(entry).split()
    monkeypatch.setenv("COLUMNS", str(width))
    text = help_text(entry)
    assert text.split() == words
    assert all(len(line) <= width or len(line.split()) == 1 for line in text.splitlines())


def test_help_lists_every_choice_and_the_norms_by_family(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = help_text("train")
    for group in GROUPS:
        for name in group_choices(group):
            assert "/" in name or name in text
    assert all(f"\n  {name:<28}{phrase}\n" in text for name, phrase in PLACEMENTS.items())
    assert "\n  debug                       A first try of a model, norm or data set: can" in text
    assert "\n  gpu                         One CUDA GPU in bfloat16 mixed precision;" in text
    _, _, families = text.partition("Norms (norm=NAME) by family")
    assert "\n  token\n    bhyt" in families and "RMS norm: each position divided by" in families


@pytest.mark.parametrize(
    ("lines", "heavy"),
    [
        ([f"{entry} --help" for entry in ENTRIES], {"torch", "pandas", "hydra", "omegaconf"}),
        (
            [
                *("train norm=nrom", "train batch_size=0", "train --cfg job norm=nrom"),
                *(
                    "tune norm=batch",
                    "check norm=grup",
                    "evaluate run=a b=c",
                    "status",
                    "report watch=true",
                ),
            ],
            {"torch", "pandas"},
        ),
    ],
    ids=["help", "refusals"],
)
def test_help_and_refusals_import_nothing_heavy(lines: list[str], heavy: set[str]):
    """Runs the lines in turn in one process; returns exit codes and imported modules."""
    script = (
        "import importlib, sys\n"
        "for line in sys.argv[1:]:\n"
        "    entry, *words = line.split()\n"
        "    code = importlib.import_module(f'normexp.{entry}').main(words)\n"
        f"    print(line, code, {heavy} & set(sys.modules), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", script, *lines]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    code = 0 if "--help" in lines[0] else 2
    ends = [line for line in told.splitlines() if not line.startswith("normexp: ")]
    assert ends == [f"{line} {code} set()" for line in lines]


def test_the_config_of_a_cell_is_shown_and_nothing_written(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--cfg", "job", "optim=adamw", "batch_size=8"]) == 0
    told = capsys.readouterr().out
    assert "batch_size: 8" in told and "_target_: torch.optim.AdamW" in told
    assert list(tmp_path.iterdir()) == []


def test_the_package_lists_its_commands(capsys):
    assert commands([]) == 0
    listed = capsys.readouterr().out
    assert [name for name in USAGE if f"python -m normexp.{name} " in listed] == [*USAGE]
    assert commands(["trian"]) == 2
    assert "did you mean train?" in capsys.readouterr().err


def test_a_shell_may_close_both_streams(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    codes = train.main(["--help"]), train.main(["norm=grup"])
    for stream in (sys.stdout, sys.stderr):
        stream.close()
    assert codes == (0, 2)
