"""The recipe as a person runs it: instant help, one sentence for each mistake, text as it comes, files that go on."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hybrid.data import completions as completions_module
from hybrid.data.completions import CompletionsFile
from hybrid.engine import HybridEngine
from hybrid.inference.params import SamplingParams
from recipes import generate
from tests.recipes.recipe_runs import TORCHRUN, read_lines, run
from tests.warm_python import ENVIRONMENT, ROOT

ROWS = [
    {"prompt": "Hi, you", "id": 1},
    {"prompt": [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "So soon?"}], "id": 2},
    {"prompt": "é", "id": None},
    {"prompt": "abc", "id": 4, "more": {"a": [1]}},
    {"prompt": "abcd", "id": 5},
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> Path:
    """A directory with inputs under short names; the recipe runs in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generate, "quieten", lambda: None)
    monkeypatch.setattr(generate, "plain_warnings", lambda: None)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "tiny").symlink_to(tiny_llama)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "texts.txt").write_text("Hi\n\nWho, me?\n")
    (tmp_path / "taken.jsonl").write_text('{"prompt": "a", "completions": 1}\n')
    (tmp_path / "nocolumn.jsonl").write_text('{"question": "a"}\n')
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "a" * 509}) + "\n")
    (tmp_path / "there.jsonl").write_text('{"prompt": "other", "completions": ["x"]}\n')
    return tmp_path


def generated(model: Path, prompts: list[Any], params: SamplingParams) -> list[list[str]]:
    """What the engine gives for prompts with the recipe's seeds, in one call and on one rank."""
    engine = HybridEngine.from_pretrained(model, trains=False, dtype="fp32")
    with engine.generate_mode():
        found = engine.generate(prompts, params, seeds=completions_module.seeds_of(0, len(prompts)))
    return [[each.text for each in found if each.prompt_index == index] for index in range(len(prompts))]


def test_help_and_mistyped_flags_are_answered_at_once() -> None:
    for words, code in ((("--help",), 0), (("--tempreature", "1"), 2), (("--n", "0"), 2)):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            result = run("generate.py", *words, python=sys.executable)
            times.append(time.perf_counter() - start)
        assert result.returncode == code
        assert min(times) < 1.0
    help = run("generate.py", "--help").stdout
    for flag in ("--model", "--prompt", "--prompts", "--top_p", "--stop", "--tp_size", "--kv_blocks", "--resume"):
        assert flag in help


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--modle tiny", "unknown flag --modle; did you mean --model?"),
        ("Why?", "'Why?' follows no flag; write it after one, as in --model smollm2-135m"),
        ("--temperature -1", "temperature=-1.0 is not allowed; set it to finite and 0 (greedy) or more"),
        ("--max_tokens none", "--max_tokens=none is not a whole number"),
        ("--dtype fp16", "--dtype=fp16 is not one of auto, bf16, fp32"),
        ("--tp_size 2", "tp_size=2 does not divide the world of 1 rank"),
        ("--prompt a --prompts rows.jsonl", "prompts='rows.jsonl' is a file and prompt=('a',) is given too"),
        (
            "--output out.jsonl",
            "output='out.jsonl' is for prompts that are known; set --prompts to a file, or --prompt",
        ),
        ("--prompt a --resume", "resume goes on with output; set --output too"),
        ("--prompt a --system b --no_apply_chat_template", "system is a message of the chat template"),
        ("--model ./nowhere --prompt a", "model './nowhere': there is no such directory"),
        ("--model ./tiny --prompts none.jsonl", "prompts 'none.jsonl': there is no such file"),
        ("--model ./tiny --prompts nocolumn.jsonl", "it has question; name one with --prompt_column"),
        ("--model ./tiny --prompts taken.jsonl --output o.jsonl", "the input has a column 'completions', which output"),
        (
            "--model ./tiny --prompts rows.jsonl --output there.jsonl",
            "output 'there.jsonl' exists already; set --resume",
        ),
        (
            "--model ./tiny --prompts rows.jsonl --output there.jsonl --resume",
            "line 1 of output 'there.jsonl' does not",
        ),
        ("--model ./tiny --prompts rows.jsonl --output rows.jsonl/o", "cannot be written"),
        (
            "--model ./tiny --prompts long.jsonl --max_tokens 4 --no_apply_chat_template",
            "prompt 1 has 509 tokens, which with max_tokens=4 is more than the model's 512 positions; shorten the "
            "prompt or set max_tokens=3 at most",
        ),
        ("--model ./tiny --prompts rows.jsonl --stop_token_ids 300 --max_tokens 4", "vocabulary has 263"),
        ("--model ./tiny --prompt a --kv_blocks 1 --max_tokens 40", "prompt 0 needs"),
    ],
)
def test_each_mistake_is_one_sentence(files: Path, capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    before = sorted(files.iterdir())
    with pytest.raises(SystemExit) as caught:
        generate.main(line.split())
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error
    assert sorted(path for path in files.iterdir() if path.stat().st_size) == before


def test_prompts_are_taken_as_they_are_commas_and_all(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model ./tiny --dtype fp32 --temperature 0 --max_tokens 5 --no_apply_chat_template"
    generate.main([*words.split(), "--prompt", "One, two", "--prompt", "a,b", "c", "--stop", ",", "--stop=x"])
    params = SamplingParams(temperature=0, max_tokens=5, stop=[",", "x"])
    (one,), (two,), (three,) = generated(files / "tiny", ["One, two", "a,b", "c"], params)
    assert capsys.readouterr().out == f"> One, two\n\n{one}\n\n> a,b\n\n{two}\n\n> c\n\n{three}\n\n"


def test_one_prompts_text_comes_as_it_is_sampled(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--model ./tiny --dtype fp32 --max_tokens 30 --ignore_eos --system Be"
    printed = io.StringIO()
    flushed: list[str] = []
    monkeypatch.setattr(printed, "flush", lambda: flushed.append(printed.getvalue()))
    monkeypatch.setattr(sys, "stdout", printed)
    generate.main([*words.split(), "--prompt", "Hi, you"])
    messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi, you"}]
    ((text,),) = generated(files / "tiny", [messages], SamplingParams(max_tokens=30, ignore_eos=True))
    assert printed.getvalue() == text + "\n"
    assert len({len(piece) for piece in flushed}) > 5


def test_lines_of_standard_input_are_answered_one_by_one(files: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\n" + "a" * 600 + "\nBye\n"))
    generate.main(["--model", "./tiny", "--dtype", "fp32", "--max_tokens", "6", "--no_apply_chat_template"])
    out, err = capsys.readouterr()
    texts = generated(files / "tiny", ["Hi", "a", "Bye"], SamplingParams(max_tokens=6))
    assert out == f"{texts[0][0]}\n{texts[2][0]}\n"
    assert err.startswith("error: prompt 0 has 600 tokens")


def test_a_file_of_rows_on_one_rank_and_as_replicas_and_as_tensor_ranks(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = f"--model {tiny_llama} --dtype fp32 --prompts {tmp_path}/rows.jsonl --max_tokens 8 --stop q --logprobs 2"
    words += " --num_generations 2"  # torchrun takes --n for one of its own
    outputs = []
    for name, launcher, more in (
        ("one", (), ""),
        ("replicas", (), "--prompts_per_step 3 --replicas 2"),
        ("tensor", TORCHRUN, "--tp_size 2"),
    ):
        out = tmp_path / f"{name}.jsonl"
        result = run("generate.py", *words.split(), *more.split(), "--output", out, launcher=launcher)
        assert result.returncode == 0, result.stderr
        assert result.stderr.count("5 rows in") == 1 and "5 of them new" in result.stderr
        outputs.append(read_lines(out))
    prompts = [[{"role": "user", "content": text}] for text in ("Hi, you", "Bye", "é", "abc", "abcd")]
    texts = generated(tiny_llama, prompts, SamplingParams(n=2, max_tokens=8, stop="q"))
    for lines in outputs:
        assert [{key: line[key] for key in row} for line, row in zip(lines, ROWS, strict=True)] == ROWS
        assert [line["completions"] for line in lines] == texts
    for line in outputs[0]:
        assert set(line["finish_reasons"]) <= {"stop", "length"}
        for ids, count, logprobs, tops in zip(
            line["token_ids"], line["num_tokens"], line["logprobs"], line["top_logprobs"], strict=True
        ):
            assert len(ids) == count == len(logprobs) == len(tops)
            assert [top[str(token)] for top, token in zip(tops, ids, strict=True)] == logprobs


def test_tables_and_plain_lines_are_read(files: Path) -> None:
    with (files / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["question", "id"], ["Hi", 1], ["Who, me?", 2]])
    words = "--model ./tiny --max_tokens 4 --prompts"
    generate.main([*words.split(), "rows.csv", "--prompt_column", "question", "--output", "csv.jsonl"])
    generate.main([*words.split(), "texts.txt", "--output", "new/txt.jsonl"])
    from_csv, from_txt = read_lines(files / "csv.jsonl"), read_lines(files / "new" / "txt.jsonl")
    assert [line["question"] for line in from_csv] == [line["prompt"] for line in from_txt] == ["Hi", "Who, me?"]
    assert [line["completions"] for line in from_csv] == [line["completions"] for line in from_txt]
    assert "logprobs" not in from_csv[0]


def test_an_interrupt_between_writing_and_counting_is_counted(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    append = CompletionsFile.append

    def interrupted(self: CompletionsFile, answers: Any) -> None:
        append(self, answers)
        self.num_done = 0
        raise KeyboardInterrupt

    monkeypatch.setattr(CompletionsFile, "append", interrupted)
    words = ["--model", "./tiny", "--prompts", "rows.jsonl", "--max_tokens", "6", "--prompts_per_step", "2", "--output"]
    with pytest.raises(SystemExit):
        generate.main([*words, "part.jsonl"])
    assert "stopped; --resume goes on behind row 2 of 5" in capsys.readouterr().err


@pytest.mark.parametrize("torn", [b"", b'{"prompt": "\xc3'])
def test_an_interrupted_file_goes_on_and_equals_an_uninterrupted_one(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], torn: bytes
) -> None:
    words = ["--model", "./tiny", "--prompts", "rows.jsonl", "--max_tokens", "6", "--prompts_per_step", "2", "--output"]
    generate.main([*words, "whole.jsonl"])
    append = CompletionsFile.append

    def interrupted(self: CompletionsFile, answers: Any) -> None:
        if self.num_done == 2:
            raise KeyboardInterrupt
        append(self, answers)

    with monkeypatch.context() as patch:
        patch.setattr(CompletionsFile, "append", interrupted)
        with pytest.raises(SystemExit) as caught:
            generate.main([*words, "part.jsonl"])
    assert caught.value.code == 130
    assert "stopped; --resume goes on behind row 2 of 5" in capsys.readouterr().err
    assert len(read_lines(files / "part.jsonl")) == 2
    with (files / "part.jsonl").open("ab") as file:
        file.write(torn)  # as if the machine had died while it wrote
    for new in (3, 0):
        generate.main([*words, "part.jsonl", "--resume"])
        assert f"5 rows in part.jsonl, {new} of them new" in capsys.readouterr().err
        assert (files / "part.jsonl").read_bytes() == (files / "whole.jsonl").read_bytes()


def test_a_run_that_is_killed_keeps_what_it_wrote(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("abc\n" * 4000)
    words = [
        sys.executable,
        ROOT / "recipes" / "generate.py",
        "--model",
        tiny_llama,
        "--prompts",
        tmp_path / "rows.txt",
        "--max_tokens",
        "200",
    ]
    out = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [*map(str, words), "--ignore_eos", "--prompts_per_step", "4", "--output", str(out)],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        # Where these tests run in the background, interrupts are ignored, and children would ignore them too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (out.exists() and out.stat().st_size):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert f"goes on behind row {len(read_lines(out))} of 4000" in error
