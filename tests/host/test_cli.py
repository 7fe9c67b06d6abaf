"""The command line: what it prints, what it writes, and that bad input is one line and exit code 2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from safetensors.numpy import save_file

from numba_kv import cli
from numba_kv.config import load_engine_config
from numba_kv.errors import DeviceError, InputError, NumbaKVError, PlanError
from numba_kv.plan import plan_memory
from numba_kv.replay import bench, commands, report
from numba_kv.replay.figures import Latency, PageHistory
from numba_kv.replay.fit import most_rows
from numba_kv.replay.models import builtin_names, find_config
from numba_kv.replay.sizes import format_bytes, parse_bytes
from numba_kv.replay.wording import in_options

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"

TINY = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_size": 8,
    "vocab_size": 32,
    "max_position_embeddings": 256,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    lines = [{"arrival_s": 0.1 * i, "input_tokens": 1 + 17 * i, "output_tokens": 1 + 5 * i} for i in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture(autouse=True)
def width_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the width of the terminal that runs the tests: what is printed must not depend on it."""
    monkeypatch.delenv("COLUMNS", raising=False)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = cli.main(args)
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run a command that must be refused, and return its one line."""
    code, out, err = run(capsys, *args)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("numba-kv")
    return err


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("512MiB", 2**29),
        ("1.5 kib", 1536),
        ("2TB", 2 * 10**12),
        ("4096", 4096),
        ("7B", 7),
        (" 0.5KB ", 500),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "24G", "24 gigs", "-1GiB", "1e9", "0", "0GiB", "0.3B", "nan", "1,5GB", "24GiBGiB", "٣GB"]
)
def test_bad_sizes(text: str) -> None:
    with pytest.raises(InputError, match="memory size|whole number of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1 GiB"), (-(2**20), "-1 MiB"), (2**50, "1,024 TiB")],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_help_is_there_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for command in commands.COMMANDS:
        assert command in out
        assert run(capsys, command, "--help")[0] == 0
    assert run(capsys)[0] == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("numba-kv ")


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "numba_kv", "--version"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "numba-kv")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom numba_kv import cli\ncli.main(['--help'])\n"
        "raise SystemExit(','.join(m for m in ('numpy', 'numba', 'rich', 'ml_dtypes', 'cuda') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["fly"], ["fly"]),
        (["plan"], ["CONFIG"]),
        (["plan", "gemma3_270m", "--memory", "24G"], ["--memory", "24G", "24GiB"]),
        (["plan", "gemma3_270m", "--capacity", "0"], ["--capacity", "0 is below 1"]),
        (["plan", "gemma3_270m", "--batch", "many"], ["--batch", "'many'"]),
        (["plan", "gemma3_270m", "--page-tokens", "3"], ["--page-tokens: 3"]),
        (["plan", "gemma3_270m", "--dtype", "int4"], ["--dtype: 'int4'"]),
        (["plan", "gemma3_270m", "--max-step-tokens", "-1"], ["--max-step-tokens", "-1"]),
        (
            ["plan", "gemma3_270m", "--memory", "1MiB"],
            ["--memory: 1,048,576 bytes (1 MiB)", "MiB) short", "lower --batch (16), --capacity (32768)", "--dtype"],
        ),
        (["plan", "gemma3_270m", "--batch", "9", "--max-batch-tokens", "8"], ["--max-batch-tokens: 8 is below --batch 9"]),
        (["plan", "gemma3_270m", "--batch", "1000000000"], ["raise --page-tokens or lower --batch"]),
        (["replay", "gemma3_270m", "generated", "--batch", "2147483647"], ["--batch + --chunk: 2147485695"]),
        (["plan", "absent.json"], ["CONFIG: 'absent.json' is neither a file nor a built-in model (gemma3_270m)"]),
        (["plan", "gemma3_270m", "--json", "absent/plan.json"], ["--json", "absent/plan.json"]),
        (["plan", "gemma3_270m", "--json", "."], ["--json", "folder"]),
        (["replay", "gemma3_270m"], ["TRACE"]),
        (["replay", "gemma3_270m", "absent.csv"], ["absent.csv", "cannot be read"]),
        (["replay", "gemma3_270m", "generated:x"], ["generated:x", "seed"]),
        (["replay", "gemma3_270m", "generated", "--limit", "0"], ["--limit", "0"]),
        (["replay", "gemma3_270m", "generated", "--audit-every", "-1"], ["--audit-every", "-1"]),
        (["replay", "gemma3_270m", "generated", "--chunk", "0"], ["--chunk", "0"]),
        (["replay", "gemma3_270m", "generated", "--target", "tpu"], ["--target", "tpu"]),
        (["replay", "gemma3_270m", "generated", "--picture", "absent/p.png"], ["--picture", "absent/p.png"]),
        (["inspect", "gemma3_270m", "--tokens", "5,x"], ["--tokens"]),
        (["inspect", "gemma3_270m", "--tokens", "5,6", "--batch", "1"], ["--batch", "2 sequences"]),
        (["inspect", "gemma3_270m", "--tokens", "90", "--capacity", "64"], ["--tokens", "capacity of 64"]),
        (["bench", "speed"], ["speed", "advance"]),
    ],
    ids=" ".join,
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], args: list[str], words: list[str]) -> None:
    line = refused(capsys, *args)
    for word in words:
        assert word in line


def test_a_file_without_anything_names_all_that_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("{}")
    line = refused(capsys, "plan", str(tmp_path / "empty.json"))
    assert "model_type, num_hidden_layers, num_attention_heads, head_dim (or hidden_size), max_position_embeddings" in line
    assert "(or pass --capacity)" in line


def test_keys_of_a_file_are_not_taken_for_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({"builder_config": {"max_batch_size": 0}, "num_hidden_layers": 1}))
    assert "builder_config.max_batch_size: 0" in refused(capsys, "plan", str(path))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (InputError("target: 'cuda' cannot work\n  here"), "--target: 'cuda' cannot work here"),
        (InputError("the target: all of max_batch_size"), "the target: all of --batch"),
        (InputError("'max_batch_size' and /tmp/page_tokens.json"), "'max_batch_size' and /tmp/page_tokens.json"),
        (DeviceError("4194304 bytes cannot be allocated"), "4,194,304 bytes (4 MiB) cannot be allocated"),
        (PlanError("pool: 2048000 pages; lower max_batch_size"), "pool: 2048000 pages; lower --batch"),
    ],
)
def test_wording(error: NumbaKVError, text: str) -> None:
    assert in_options(error, "plan") == text


def test_bad_trace_line(capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    good = {"arrival_s": 0, "input_tokens": 5, "output_tokens": 5}
    bad.write_text(json.dumps(good) + "\n" + json.dumps({**good, "input_tokens": -5}))
    line = refused(capsys, "replay", config, str(bad))
    assert "line 2: input_tokens is -5" in line


def test_interrupt_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(args: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setitem(commands.COMMANDS, "plan", interrupt)
    code, out, err = run(capsys, "plan", "gemma3_270m")
    assert (code, out, err) == (130, "", "numba-kv: interrupted\n")


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = [sys.executable, "-m", "numba_kv.cli", "plan", "gemma3_270m", "--json", "-"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
    assert process.returncode == 1
    assert "BrokenPipe" not in error


SHELL = [
    ("plan gemma3_270m >&-", "stdout is closed"),
    ("plan gemma3_270m --json - >&-", "stdout is closed"),
    ("--version >&-", "stdout is closed"),
    ("--help >&-", "stdout is closed"),
    ("plan gemma3_270m >/dev/full", "stdout cannot be written: No space left"),
    ("--version >/dev/full", "stdout cannot be written: No space left"),
    ("--help >/dev/full", "stdout cannot be written: No space left"),
]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("arguments", "reason"), SHELL)
def test_a_stdout_that_takes_nothing_is_one_line(arguments: str, reason: str, unbuffered: str) -> None:
    command = f"{sys.executable} -m numba_kv.cli {arguments}"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"numba-kv: {reason}")


@pytest.mark.parametrize("redirected", ["2>&-", "2>/dev/full"])
def test_a_stderr_that_takes_nothing_leaves_the_exit_code(redirected: str) -> None:
    command = f"{sys.executable} -m numba_kv.cli plan absent.json {redirected}"
    assert subprocess.run(command, shell=True, cwd=ROOT, check=False).returncode == 2


def test_what_is_no_file_is_not_read(capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for name in ("/dev/zero", str(pipe)):
        assert "not a regular file" in refused(capsys, "plan", name)
        assert "not a regular file" in refused(capsys, "replay", "gemma3_270m", name)
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate((16 << 20) + 1)
    assert "larger than 16 MiB" in refused(capsys, "plan", str(large))
    assert "line 1: longer than" in refused(capsys, "replay", "gemma3_270m", str(large))


def test_names_that_no_file_has(capsys: pytest.CaptureFixture[str]) -> None:
    long = "1" * 300
    for args, word in [
        (["plan", long], "CONFIG: "),
        (["replay", "gemma3_270m", long], "File name too long"),
        (["replay", "gemma3_270m", f"generated:{long}"], "not an integer of at most 18 digits"),
        (["replay", "gemma3_270m", "generated:\u0661"], "not an integer"),
        (["plan", "gemma3_270m", "--json", long], "--json: "),
        (["plan", ""], "CONFIG: the name is empty"),
        (["replay", "gemma3_270m", ""], "TRACE: the name is empty"),
        (["plan", "gemma3_270m", "--json", ""], "--json: the name is empty"),
        (["demo", "--out", ""], "--out: the name is empty"),
    ]:
        line = refused(capsys, *args)
        assert word in line
        assert len(line) < 400


def test_output_that_cannot_be_written_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def work(*_: object, **__: object) -> NoReturn:
        raise AssertionError("work began")

    monkeypatch.setattr(commands, "load_engine_config", work)
    monkeypatch.setattr(commands, "load_model", work)
    for name in ("/dev/full", "/proc/figures.json", str(tmp_path), str(tmp_path / "absent" / "a.json")):
        assert "--json: " in refused(capsys, "plan", "gemma3_270m", "--json", name)
    (tmp_path / "kept.json").write_text("{}")
    with pytest.raises(AssertionError, match="work began"):
        cli.main(["plan", "gemma3_270m", "--json", str(tmp_path / "kept.json")])
    with pytest.raises(AssertionError, match="work began"):
        cli.main(["plan", "gemma3_270m", "--json", str(tmp_path / "new.json")])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["{}"]


def test_keys_that_are_given_twice_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "twice"
    path.write_text(json.dumps(TINY)[:-1] + ', "head_dim": 16}')
    assert "key 'head_dim' is given twice" in refused(capsys, "plan", str(path))
    path.write_text('{"arrival_s": 0, "input_tokens": 1, "input_tokens": 2, "output_tokens": 1}\n')
    assert "line 1: broken JSON (key 'input_tokens' is given twice" in refused(capsys, "replay", "gemma3_270m", str(path))


def test_numbers_out_of_range_name_their_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--capacity: 1 token" in refused(capsys, "replay", "gemma3_270m", "generated", "--capacity", "1")
    assert "--chunk: 99999999999" in refused(capsys, "replay", "gemma3_270m", "generated", "--chunk", "99999999999")


def test_a_terminal_without_unicode(config: str) -> None:
    command = [sys.executable, "-m", "numba_kv.cli", "inspect", config, "--tokens", "40", "--target", "cpu"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "sliding 24" in done.stdout


# -- plan --------------------------------------------------------------------------------------------------------------


def test_builtin_model_is_gemma3_270m() -> None:
    assert builtin_names() == ("gemma3_270m",)
    config = load_engine_config(find_config("gemma3_270m"))
    assert len(config.layers) == 18
    assert [i for i, layer in enumerate(config.layers) if layer.window.is_full] == [5, 11, 17]
    assert {(layer.num_kv_heads, layer.head_dim) for layer in config.layers} == {(1, 256)}
    assert {layer.window.tokens for layer in config.layers} == {0, 512}
    assert config.max_kv_cache_capacity == 32768


def test_a_file_comes_before_a_builtin_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gemma3_270m").write_text(json.dumps(TINY))
    assert find_config("gemma3_270m") == "gemma3_270m"


def test_plan_json_on_stdout_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "plan", "gemma3_270m", "--batch", "4", "--capacity", "2048", "--memory", "1GiB", "--json", "-")
    assert code == 0
    assert "sliding 512" in err
    found = json.loads(out)
    assert found["batch"] == 4
    assert found["capacity"] == 2048
    assert found["config"] == "gemma3_270m"
    assert [(g["window"], g["layers"], g["ring_pages"]) for g in found["groups"]] == [("full", 3, 0), ("sliding 512", 15, 33)]
    assert found["nbytes"] == sum(region["nbytes"] for region in found["regions"])
    assert found["nbytes"] == sum(found["parts"].values())
    assert found["parts"]["pools"] == found["pool_nbytes"]
    assert (found["max_sequences"], found["max_tokens"]) == (4, 8192)
    assert found["rows_in_budget"] > 4


def test_plan_table_and_json_file(capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, out, err = run(capsys, "plan", config, "--json", str(path), "--max-step-tokens", "8", "--max-batch-tokens", "64")
    assert (code, err) == (0, "")
    assert "sliding 24" in out
    assert "KV caches of tiny: 16 rows" in out
    found = json.loads(path.read_text())
    assert (found["max_step_tokens"], found["max_batch_tokens"], found["rows_in_budget"]) == (8, 64, None)


MAMBA = {
    **{"model_type": "mamba2", "num_hidden_layers": 3, "hidden_size": 64, "num_heads": 4, "head_dim": 32, "expand": 2},
    **{"state_size": 16, "n_groups": 1, "conv_kernel": 4, "vocab_size": 32},
}


def test_plan_shows_what_recurrent_layers_keep(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mamba.json"
    path.write_text(json.dumps(MAMBA))
    _, out, _ = run(capsys, "plan", str(path), "--capacity", "64", "--batch", "2")
    assert "States of 3 recurrent layers" in out
    state = next(line for line in out.splitlines() if "recurrent_state" in line)
    assert "4 x 32 x 16 float32" in state
    assert "24 KiB" in state
    assert "48 KiB" in state
    assert "ring" not in out, "there is no group to show"
    code, out, _ = run(capsys, "inspect", str(path), "--capacity", "64", "--tokens", "3", "--target", "cpu")
    assert code == 0
    assert "No layer keeps keys and values" in out


@pytest.mark.parametrize("variable", ["COLUMNS", "LINES"])
@pytest.mark.parametrize("value", ["", "0", "-3", "²", "٣", "1e3", "9" * 5000, " 80"], ids=lambda v: repr(v[:4]))
def test_nonsense_for_a_size_is_no_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    wanted = run(capsys, "plan", "gemma3_270m")
    monkeypatch.setenv(variable, value)
    assert run(capsys, "plan", "gemma3_270m") == wanted


def test_brackets_in_names_are_no_markup(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "d[/red]"
    folder.mkdir(parents=True)  # the name has a slash
    (folder / "[bold]tiny.json").write_text(json.dumps(TINY))
    code, out, _ = run(capsys, "plan", str(folder / "[bold]tiny.json"))
    assert code == 0
    assert "KV caches of [bold]tiny: 16 rows" in out
    picture = folder / "[red]p.png"
    options = ("--limit", "1", "--target", "cpu", "--picture", str(picture))
    code, out, err = run(capsys, "replay", "gemma3_270m", "generated", *options)
    assert (code, "[red]p.png" in out.replace("\n", "")) == (0, True), err
    assert picture.is_file()


def test_inspect_splits_its_tables_where_they_do_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(capsys, "inspect", "gemma3_270m", "--target", "cpu")[1]
    monkeypatch.setenv("COLUMNS", "60")
    out = run(capsys, "inspect", "gemma3_270m", "--target", "cpu")[1]
    assert max(map(len, out.splitlines())) <= 60
    for line in wanted.splitlines():
        for cell in line.split("│")[1:-1]:
            assert cell.strip() in out


@pytest.mark.parametrize("width", [40, 60, 80, 100])
@pytest.mark.parametrize("command", ["plan", "replay"])
def test_tables_show_every_number_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    numbers = {"plan": "32,770 530 240 KiB 124.2 MiB 1.5 GiB 33 15", "replay": "2,078 30,720 97.41 MiB 475.8 MiB 1,825 447 33"}
    trace = ["generated:7", "--limit", "20", "--target", "cpu", "--audit-every", "100"] if command == "replay" else []
    _, out, _ = run(capsys, command, "gemma3_270m", *trace)
    assert max(map(len, out.splitlines())) <= width
    cells = [cell.strip() for line in out.splitlines() for cell in line.split("│")]
    for number in re.findall(r"[\d.,]+(?: [KMG]iB)?", numbers[command]):
        assert number in cells
    ends = {line.rstrip()[-1] for line in out.splitlines() if line[:1] in "┏┃┡│└"}
    assert ends <= set("┓┃┩│┘┐"), "a column is cut off"


def test_a_group_without_layers_is_in_the_json_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "windows.json"
    path.write_text(json.dumps({**TINY, "layer_types": ["sliding_attention"] * 2}))
    _, out, err = run(capsys, "plan", str(path), "--json", "-")
    assert [(group["window"], group["layers"]) for group in json.loads(out)["groups"]] == [("full", 0), ("sliding 24", 2)]
    assert "sliding 24" in err
    assert "full  " not in err


def test_plan_tells_planned_rows_from_possible_ones(capsys: pytest.CaptureFixture[str], config: str) -> None:
    nbytes = plan_memory(load_engine_config(TINY, max_batch_size=8)).nbytes
    _, out, _ = run(capsys, "plan", config, "--memory", str(nbytes))
    line = next(line for line in out.splitlines() if "of the 16 rows planned, at full capacity at once" in line)
    assert int(line.split()[-2]) < 8
    line = next(line for line in out.splitlines() if "largest --batch that has all its rows at full capacity" in line)
    assert int(line.split()[-2]) == 8


def test_most_rows_is_the_last_that_fits() -> None:
    config = load_engine_config(TINY, max_batch_size=2)

    def nbytes(rows: int) -> int:
        return plan_memory(load_engine_config(TINY, max_batch_size=rows)).nbytes

    assert most_rows(config, nbytes(37)) == 37
    assert most_rows(config, nbytes(37) - 1) == 36
    assert most_rows(config, nbytes(1)) == 1
    assert most_rows(config, nbytes(1) - 1) == 0
    assert most_rows(config, 1 << 62) == 1 << 20


@pytest.mark.skipif(not DATA.is_dir(), reason="public configurations are not beside the checkout (../shared/data)")
@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text", "v4_mistral_7b_v01"])
def test_plan_of_public_models(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = run(capsys, "plan", str(DATA / "configs" / f"{name}.json"), "--memory", "24GiB", "--json", "-")
    assert code == 0
    found = json.loads(out)
    assert found["nbytes"] <= 24 * 2**30
    assert found["max_sequences"] >= 1


# -- figures -----------------------------------------------------------------------------------------------------------


def test_history_keeps_a_bounded_number_of_even_samples() -> None:
    history = PageHistory(2, most=8)
    for step in range(1, 1001):
        if history.is_due(step):
            history.record(step, 10 * step, [step, 2 * step])
    gap = history.steps[1] - history.steps[0]
    assert 4 <= len(history.steps) <= 8
    assert history.steps == list(range(gap, 1001, gap))
    assert history.tokens == [10 * step for step in history.steps]
    assert history.pages == (history.steps, [2 * step for step in history.steps])


def test_latency() -> None:
    assert Latency.of(array("q")) == Latency(0, 0.0, 0.0, 0.0)
    assert Latency.of(array("q", range(0, 101_000, 1000))) == Latency(101, 50.0, 50.0, 99.0)


# -- replay, inspect, demo ---------------------------------------------------------------------------------------------


def replayed(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    code, out, err = run(capsys, "replay", *args, "--target", "cpu", "--json", "-")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    assert found["audit"] == "ok"
    return found


def test_replay_figures(capsys: pytest.CaptureFixture[str], config: str, trace: str) -> None:
    found = replayed(capsys, config, trace, "--batch", "3", "--chunk", "32", "--page-tokens", "8", "--audit-every", "1")
    assert found["target"] == "cpu"
    assert found["config"] == "tiny"
    assert found["sequences"] == 8
    assert found["tokens"] == {"prefill": 484, "decode": 148, "recomputed": 0, "total": 632}
    assert found["audits"] == found["steps"] + 1
    assert found["bytes_to_device_steady"] == 0
    assert found["preemptions"] == 0
    assert found["rotations"] > 0
    full, window = found["groups"]
    assert 0 < full["peak_pages"] <= full["bound_pages"]
    assert window["ring_pages"] == 4  # ceil((24 + 1 - 2) / 8) + 1
    assert window["peak_pages"] == window["bound_pages"] == 12


def test_replay_is_the_same_twice(capsys: pytest.CaptureFixture[str], config: str) -> None:
    args = (config, "generated:5", "--limit", "12", "--capacity", "256", "--batch", "4")
    first, second = replayed(capsys, *args), replayed(capsys, *args)
    for found in (first, second):
        for name in ("wall_s", "us_per_step", "us_per_steady_step"):
            del found[name]
    assert first == second


def test_replay_preempts_in_a_small_pool(capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path) -> None:
    trace = tmp_path / "long_answers.jsonl"
    trace.write_text('{"arrival_s": 0, "input_tokens": 20, "output_tokens": 200}\n' * 6)
    args = ["--batch", "4", "--page-tokens", "4", "--chunk", "64", "--capacity", "240"]
    roomy = replayed(capsys, config, str(trace), *args)
    model = load_engine_config(TINY, max_batch_size=4, max_kv_cache_capacity=240, page_tokens=4, max_batch_tokens=68)
    plan = plan_memory(model)
    # Two and a half rows' worth of full-attention pages.
    less = plan.groups[0].page_nbytes * 90
    found = replayed(capsys, config, str(trace), *args, "--memory", str(plan.nbytes - less), "--audit-every", "1")
    assert (roomy["preemptions"], found["preemptions"] > 0) == (0, True)
    assert found["tokens"]["decode"] == 1200
    assert found["tokens"]["prefill"] == 120 + found["tokens"]["recomputed"]
    full = found["groups"][0]
    assert full["peak_pages"] <= full["bound_pages"] < 240


def test_too_long_requests(capsys: pytest.CaptureFixture[str], config: str, trace: str) -> None:
    line = refused(capsys, "replay", config, trace, "--capacity", "100")
    assert "line 6" in line
    assert "112 tokens long" in line
    assert "capacity of a row is 100" in line
    found = replayed(capsys, config, trace, "--capacity", "100", "--skip-too-long")
    assert (found["sequences"], found["skipped"]) == (5, 3)


def test_capacity_follows_the_trace_up_to_the_model(capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text('{"arrival_s": 0, "input_tokens": 9, "output_tokens": 1}\n')
    assert replayed(capsys, "gemma3_270m", str(short), "--batch", "1")["capacity"] == 256
    long = tmp_path / "long.jsonl"
    long.write_text('{"arrival_s": 0, "input_tokens": 256, "output_tokens": 1}\n')
    assert "capacity of a row is 256" in refused(capsys, "replay", config, str(long))
    assert replayed(capsys, config, str(long), "--capacity", "300")["capacity"] == 300


def test_pictures_and_report(capsys: pytest.CaptureFixture[str], config: str, trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra viz")
    picture, page = tmp_path / "pages.png", tmp_path / "report.html"
    replayed(capsys, config, trace, "--picture", str(picture), "--report", str(page))
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "data:image/png;base64," in text
    assert "sliding 24" in text
    assert "http" not in text.replace("data:image", "")
    for command in (["replay", config, trace], ["bench", "copy"]):
        line = refused(capsys, *command, "--picture", str(tmp_path / "pages.xyz"))
        assert "--picture: pages.xyz ends with 'xyz', which is none of" in line


def test_without_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, config: str, trace: str, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    line = refused(capsys, "replay", config, trace, "--picture", str(tmp_path / "p.png"))
    assert "in a clone of numba_kv" in line
    assert "pip install -e '.[viz]'" in line
    with pytest.raises(report.MissingExtraError):
        report.check_drawing()


def test_a_bound_far_above_the_peak_is_written_not_drawn(
    capsys: pytest.CaptureFixture[str], config: str, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra viz")
    drawn = []
    monkeypatch.setattr(report, "_draw", lambda *given, draw=report._draw: drawn.append(draw(*given)) or drawn[-1])
    for rows in ("3", "60"):
        replayed(capsys, config, trace, "--batch", rows, "--page-tokens", "4", "--picture", str(tmp_path / "p.png"))
    tight, roomy = ([text.get_text() for text in figure.axes[0].get_legend().get_texts()] for figure in drawn)
    assert not any("above this panel" in text for text in tight)
    assert any("above this panel" in text for text in roomy)
    assert drawn[1].axes[0].get_ylim()[1] < 60 * 64 / 5
    assert "rings are taken whole at admission" in drawn[0].axes[1].get_title(loc="left")
    assert drawn[0].axes[1].xaxis.get_major_formatter()(12000, None) == "12,000"


def test_replay_table_says_what_windows_save(capsys: pytest.CaptureFixture[str], config: str, trace: str) -> None:
    args = ("replay", config, trace, "--batch", "3", "--page-tokens", "8", "--target", "cpu")
    _, out, _ = run(capsys, *args)
    assert "Keeping all" in out
    assert "audits ┃" not in out
    assert "audits ┃" in run(capsys, *args, "--audit-every", "5")[1]
    assert "At audits" in run(capsys, *args, "--audit-every", "5")[1]
    full, window = replayed(capsys, config, trace, "--batch", "3", "--page-tokens", "8")["groups"]
    assert window["every_token_nbytes"] % window["page_nbytes"] == 0
    # Without a window the layer would have held what the full one did, but for pages ahead.
    assert window["every_token_nbytes"] // window["page_nbytes"] <= full["peak_pages"]
    assert window["every_token_nbytes"] > window["page_nbytes"] * window["peak_pages"]


def test_windows_that_cover_the_capacity_are_noted(capsys: pytest.CaptureFixture[str], config: str, trace: str) -> None:
    note = "1 layers of sliding 24 are full attention here: the window covers the capacity of 24 tokens"
    for args in (["plan"], ["inspect", "--tokens", "5", "--target", "cpu"], ["replay", trace, "--skip-too-long"]):
        _, out, err = run(capsys, args[0], config, *args[1:], "--capacity", "24")
        assert note in out, err
    assert "are full attention here" not in run(capsys, "plan", config)[1]


def test_tables_take_the_width_that_columns_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    widths = {}
    for columns in ("", "60", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        widths[columns] = max(map(len, run(capsys, "plan", config)[1].splitlines()))
    assert widths["60"] <= 60 < widths[""] <= 110
    assert widths["200"] >= widths[""]


def test_inspect_shows_windows_larger_than_the_prompts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "wide.json"
    path.write_text(json.dumps({**TINY, "sliding_window": 4096, "max_position_embeddings": 32768}))
    code, out, err = run(capsys, "inspect", str(path), "--tokens", "40,100", "--target", "cpu", "--json", "-")
    assert code == 0, err
    assert [group["window"] for group in json.loads(out)["groups"]] == ["full", "sliding 4096"]
    assert "ahead of their length (lookahead)" in err
    assert "logical pages [0, 7) of 272" in err  # the bars end where the longest row does


def test_inspect(capsys: pytest.CaptureFixture[str], config: str) -> None:
    args = ["inspect", config, "--tokens", "5,100", "--steps", "2", "--page-tokens", "8", "--target", "cpu", "--json", "-"]
    code, out, err = run(capsys, *args)
    assert code == 0, err
    assert "sliding 24" in err
    full, window = json.loads(out)["groups"]
    assert [row["length"] for row in full["rows"]] == [7, 102]
    # The last step appended token 101 at length 101: lowest key 78, so pages [9, 13) are mapped, each at its place in the ring.
    assert [page["logical"] for page in window["rows"][1]["pages"]] == [9, 10, 11, 12]
    assert [page["ring_position"] for page in window["rows"][1]["pages"]] == [1, 2, 3, 0]
    ids = [page["page_id"] for row in window["rows"] for page in row["pages"]]
    assert len(ids) == len(set(ids))
    assert [page["logical"] for page in full["rows"][1]["pages"]][:13] == list(range(13))


def test_bench_step_is_one_line_a_point(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    point = {"rows": 1024, "context": 4096, "groups": 2, "page_tokens": 16, "target": "cpu", "step_host_us": 10.25}
    found = {"points": [point, {**point, "rows": 1, "step_host_us": 0.5}], "torch_copy_tb_per_s": 3.5}
    monkeypatch.setitem(bench.MEASURES, "step", lambda options: found)  # type: ignore[arg-type]
    code, out, err = run(capsys, "bench", "step")
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert ["│", "1,024", "│", "4,096", "│", "2", "│", "16", "│", "10.2", "│"] in lines
    assert ["│", "1", "│", "4,096", "│", "2", "│", "16", "│", "0.500", "│"] in lines
    assert "torch_copy_tb_per_s" in out
    assert "captured" not in out  # no column without a figure
    assert "step: batch.step(1), on the host" in out


@pytest.mark.parametrize(("ours", "expected"), [(9.0, (0.0, True)), (12.0, (2.0, False))])
def test_bench_import_never_reports_a_negative_time(
    monkeypatch: pytest.MonkeyPatch, ours: float, expected: tuple[float, bool]
) -> None:
    monkeypatch.setattr(bench, "_milliseconds", lambda code: 10.0 if code == "pass" else ours)
    monkeypatch.setattr(bench, "run_python", lambda code: "")
    found = bench.measure_import(bench.BenchOptions())
    assert (found["import_ms"], found["is_within_noise"], found["spread_ms"]) == (*expected, 0.0)


def test_demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the demo draws a picture")
    code, out, err = run(capsys, "demo", "--out", str(tmp_path / "deep" / "demo"), "--target", "cpu")
    assert code == 0, err
    assert "gemma3_270m" in out
    assert (tmp_path / "deep" / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "deep" / "demo" / "demo.json").read_text())
    assert found["audit"] == "ok"
    assert found["sequences"] == 200
    assert [g["ring_pages"] for g in found["groups"]] == [0, 33]
    window = found["groups"][1]
    assert window["every_token_nbytes"] > 3 * window["peak_pages"] * window["page_nbytes"]


def test_demo_into_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the demo draws a picture")
    (tmp_path / "taken").write_text("")
    assert "--out" in refused(capsys, "demo", "--out", str(tmp_path / "taken"))


def test_plan_counts_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_file({"a": np.ones((4096, 1024), np.float16)}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        found = json.loads(run(capsys, "plan", "gemma3_270m", "--weights", str(path), "--json", "-")[1])
        assert found["parts"]["external_weights"] == 8 << 20
        assert found["nbytes"] == sum(found["parts"].values())
    assert "external weights" in run(capsys, "plan", "gemma3_270m", "--weights", str(tmp_path))[1]
    code, _, err = run(capsys, "plan", "gemma3_270m", "--weights", "")
    assert (code, "--weights: the path is empty" in err) == (2, True)
    code, _, err = run(capsys, "plan", "gemma3_270m", "--weights", str(tmp_path / "absent"))
    assert code == 2
    assert "absent" in err
