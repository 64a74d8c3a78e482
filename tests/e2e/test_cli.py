"""The command line as a person or a script meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from safetensors import safe_open

from moonvit import __version__ as moonvit_version
from moonvit import cli, errors
from moonvit.cli import encoding
from moonvit.cli.plans import kv_tokens
from moonvit.engines import default_model
from tests.tiny import write_k25, write_vl

COMMANDS = ("encode", "ask", "plan", "check", "compare", "models", "bench", "serve")


def moonvit(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moonvit", *words],
        env={**os.environ, "COLUMNS": "100", **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cli") / "picture.png"
    Image.new("RGB", (120, 90), "navy").save(path)
    return str(path)


def test_help_names_every_command_and_loads_no_torch() -> None:
    done = moonvit("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert f" {command} " in done.stdout
    code = "import sys\nfrom moonvit.cli import app\nassert 'torch' not in sys.modules and 'PIL' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    done = moonvit(command, "--help")
    assert done.returncode == 0 and "Usage" in done.stdout and len(done.stdout.splitlines()) > 5
    assert ("--json" in done.stdout) == (command not in ("serve", "bench"))


def test_it_says_its_version() -> None:
    done = moonvit("--version")
    assert (done.returncode, done.stdout) == (0, f"moonvit {moonvit_version}\n")


def test_plan_needs_no_weights_and_no_torch(picture: str) -> None:
    done = moonvit("plan", "--model", "kimi-k3", "4000x3000", picture, "--json")
    document = json.loads(done.stdout)
    first = document["images"][0]
    assert (first["item"], first["grid"], first["patches"], first["tokens"]) == (
        "4000x3000",
        [1, 216, 286],
        61776,
        15444,
    )
    assert first["output_bytes"] == 15444 * 7168 * 2 and first["alone_peak_bytes"] <= document["peak_bytes"]
    assert document["machine"] == {"device": "cpu", "threads": 1, "bfloat16": True}
    assert sum(document["at_peak"].values()) == document["peak_bytes"]
    assert document["compare"] == [] and document["peak_kv_tokens"] is None
    assert document["tokens"] == 15444 + document["images"][1]["tokens"]
    assert document["peak_bytes"] > document["workspace_bytes"] > document["stages"]["kv"]
    table = moonvit("plan", "--model", "kimi-k3", "4000x3000", picture).stdout
    assert "15,444" in table and "workspace" in table and "TFLOP" in table and "█" in table
    assert "planned for 1 thread of a CPU with bfloat16 instructions" in table
    assert max(map(len, table.splitlines())) <= 100
    code = (
        "import sys\nfrom moonvit.cli import app\n"
        "app(['plan', '-m', 'kimi-k3', '4000x3000', '--compare'], standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


FIVE = ("4000x3000", "1920x1080", "640x480", "2000x1500", "1024x768")


def test_plan_of_sixteen_ranks_beside_stock_towers() -> None:
    words = ("plan", "-m", "kimi-k3", *FIVE, "--ranks", "16", "--device", "cuda", "--compare")
    document = json.loads(moonvit(*words, "--kv-bytes-per-token", "864", "--json").stdout)
    spread = document["deployment"]
    assert (spread["tp"], spread["dp"], spread["imbalance"]) == (1, 16, 1.0)
    assert [group["images"] for group in spread["groups"]] == [[0], [3], [1], [4], [2], *[[]] * 11]
    assert [image["group"] for image in document["images"]] == [0, 2, 4, 1, 3]
    assert [row["tower"] for row in document["compare"]] == ["vLLM 0.32", "SGLang 0.5.23"]
    for row in document["compare"]:
        assert row["basis"] == "computed" and row["mode"] == "data parallel over 16" and len(row["ranks"]) == 16
        assert row["difference_bytes"] == max(row["ranks"]) - spread["peak_bytes"] > 0
        tokens = row["difference_bytes"] // 864
        assert row["kv_tokens"] == {"bytes_per_token": 864, "rank": tokens, "all": 16 * tokens}
    table = moonvit(*words, "--kv-bytes-per-token", "864", env={"COLUMNS": "80"}).stdout
    assert "5-15" in table and "empty" in table and "computed" in table and "not measured" in table
    assert "planned for a CUDA device" in table and f"{tokens:,}" in table
    assert "receives" in table and "padded all-gather" in table and "10.53 x" in table
    assert max(map(len, table.splitlines())) <= 80


def test_plan_spreads_a_request_as_the_mode_says() -> None:
    words = ("plan", "-m", "kimi-k3", "1861x7041", "--json")
    spread = json.loads(moonvit(*words, "--ranks", "16", "--mode", "auto").stdout)["deployment"]
    assert (spread["tp"], spread["dp"], spread["over_mean"]) == (1, 16, 16.0)
    assert [group["patches"] for group in spread["groups"]] == [67_268, *[0] * 15]
    assert spread["padded_bytes"] == 16 * spread["groups"][1]["received_bytes"] == 16 * 241_088_512
    shared = json.loads(moonvit(*words, "--ranks", "4", "--mode", "tensor").stdout)["deployment"]
    assert (shared["tp"], shared["dp"]) == (4, 1) and shared["groups"][0]["reduced_bytes"] > 0
    for refused in (("--mode", "tensor", "--ranks", "16"), ("--mode", "data", "--tp", "2"), ("--mode", "x")):
        done = moonvit(*words, *refused)
        assert (
            done.returncode == errors.ConfigError.exit_code and not done.stdout and len(done.stderr.splitlines()) == 1
        )


def test_plan_says_how_many_kv_tokens_bytes_hold() -> None:
    # 1,016,293 tokens of K3 in FP8: 24 latent layers of 576 values, one sixteenth of them on each of 16 ranks.
    assert kv_tokens(878_077_152, 24 * 576 // 16, 16)["rank"] == 1_016_293
    assert kv_tokens(-1, 10, 2) == {"bytes_per_token": 10, "rank": -1, "all": -2}
    document = json.loads(moonvit("plan", "-m", "kimi-k3", "640x480", "--kv-bytes-per-token", "13824", "--json").stdout)
    assert document["peak_kv_tokens"]["rank"] == document["peak_bytes"] // 13824
    said = moonvit("plan", "-m", "kimi-k3", "640x480", "--kv-bytes-per-token", "13824").stdout
    assert f"the peak is worth {document['peak_kv_tokens']['rank']:,} KV tokens of 13,824 bytes" in said


def test_encode_writes_features(picture: str, tmp_path: Path) -> None:
    out = tmp_path / "features.safetensors"
    done = moonvit("encode", picture, picture, "-o", str(out), "--json")
    document = json.loads(done.stdout)
    assert len(document["images"]) == 2
    with safe_open(out, "pt") as file:
        tensors = [file.get_tensor(f"features.{number}") for number in range(2)]
        described = json.loads(file.metadata()["images"])
    assert list(tensors[0].shape) == document["images"][0]["shape"] == [20, 192]
    assert described[1]["source_size"] == [120, 90]
    assert tensors[0].equal(tensors[1]) and tensors[0].isfinite().all() and tensors[0].std() > 0


def test_encode_does_not_write_over_a_picture(picture: str) -> None:
    before = Path(picture).read_bytes()
    done = moonvit("encode", picture, "-o", picture)
    assert done.returncode == errors.InvalidInputError.exit_code, done.stderr
    assert "is one of the pictures and would be lost" in done.stderr
    assert Path(picture).read_bytes() == before


def test_ask_and_the_same_seed_give_the_same_text(picture: str) -> None:
    words = ("ask", "-i", picture, "What colour is it?", "--max-tokens", "8")
    first, second = (
        json.loads(moonvit(*words, "--temperature", "1", "--seed", "7", "--json").stdout) for _ in range(2)
    )
    assert first["content"] == second["content"]
    assert first["usage"]["image_tokens"] == 20
    assert moonvit(*words).stdout.strip()


def test_check_says_what_a_checkpoint_holds(tmp_path: Path) -> None:
    report = json.loads(moonvit("check", "--json").stdout)
    assert report["family"] == "kimi-k2.5" and report["shards"] == 1 and report["tensors"] > 70
    for file in default_model().iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    done = moonvit("check", str(tmp_path))
    assert done.returncode == errors.CheckpointError.exit_code
    assert done.stderr.startswith("moonvit: ") and done.stderr.count("\n") == 1


def test_compare_holds_every_layer(picture: str) -> None:
    document = json.loads(moonvit("compare", "-i", picture, "--json").stdout)
    assert document["first"] is None and document["dtype"] == "float32"
    assert [stage["name"] for stage in document["stages"]][:2] == ["embed", "block 0"]
    assert all(0 < stage["error"] <= stage["limit"] == 1e-5 for stage in document["stages"])
    shown = moonvit("compare", "--dtype", "bfloat16")
    assert shown.returncode == 0 and "projector" in shown.stdout


def test_compare_takes_a_checkpoint_of_any_family(tmp_path: Path) -> None:
    for family, write in (("kimi-k2.5", write_k25), ("kimi-vl", write_vl)):
        write(tmp_path / family)
        done = moonvit("compare", str(tmp_path / family), "--json")
        document = json.loads(done.stdout)
        assert done.returncode == 0 and document["family"] == family and document["first"] is None


def test_compare_says_which_layer_diverges_and_leaves_with_its_code() -> None:
    code = (
        "import sys\nfrom moonvit.cli import main\nfrom moonvit.encoder import VisionEncoder as Encoder\n"
        "load = Encoder.from_pretrained\n"
        "def broken(*words, **options):\n"
        "    encoder = load(*words, **options)\n"
        "    block = encoder.model.vision_tower.encoder.blocks[3]\n"
        "    block.wo.register_forward_hook(lambda part, inputs, output: output * 1.01)\n"
        "    return encoder\n"
        "Encoder.from_pretrained = broken\nsys.argv = ['moonvit', 'compare', '--json']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == errors.DivergenceError.exit_code == 9
    assert json.loads(done.stdout)["first"] == "block 3"
    assert done.stderr.startswith("moonvit: block 3 ") and "1.00e-05" in done.stderr and done.stderr.count("\n") == 1


def test_models_lists_families_and_the_demo() -> None:
    document = json.loads(moonvit("models", "--json").stdout)
    assert [row["model"] for row in document["families"]] == ["kimi-vl", "kimi-k2.5", "kimi-k3"]
    demo = document["demo"]
    assert demo["questions"] >= 1000 and 0.95 <= demo["accuracy"] <= 1
    assert all(0.9 <= share <= 1 for share in demo["kinds"].values()) and len(demo["kinds"]) == 7
    assert "kimi-k3" in moonvit("models").stdout


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (("plan", "-m", "kimi-k9", "10x10"), errors.ConfigError, "kimi-k9"),
        (("plan", "-m", "kimi-vl", "20000x1"), errors.ImageError, "20000 x 1"),
        (("plan", "nothing.png"), errors.InvalidInputError, "nothing.png"),
        (("plan", "[bold]x.png"), errors.InvalidInputError, "[bold]x.png"),
        (("plan", "n" * 300), errors.InvalidInputError, "neither a size"),
        (("plan", "9" * 5000 + "x9"), errors.InvalidInputError, "more than 10 digits"),
        (("check", "n" * 300), errors.CheckpointError, "nnn"),
        (("ask", " "), errors.InvalidInputError, "the question is empty"),
        (("encode", "nothing.png", "-o", "/dev/null"), errors.InvalidInputError, "/dev/null is no regular file"),
        (("encode", "nothing.png", "-o", "/no/such/x.safetensors"), errors.InvalidInputError, "no directory /no/such"),
        (("plan", "-m", "kimi-k3", "4000x3000", "--budget", "1MiB"), errors.BudgetError, "1048576"),
        (("plan", "99999x1"), errors.ImageError, "image 0 (99999x1): 99999 x 1 pixels, at most 65535"),
        (
            ("plan", "-m", "kimi-k3", "9x9", "--tp", "16"),
            errors.ConfigError,
            "12 heads and an MLP of 4096 divide over 1, 2",
        ),
        (("plan", "9x9", "--tp", "4", "--dp", "4", "--ranks", "8"), errors.ConfigError, "tp 4 x dp 4 is 16"),
        (("plan", "9x9", "--device", "tpu"), errors.ConfigError, "'tpu': plans are made for cpu and cuda"),
        (("plan", "9x9", "--threads", "0"), errors.ConfigError, "threads = 0, allowed are 1 to"),
        (("plan", "9x9", "--kv-bytes-per-token", "0"), errors.ConfigError, "kv-bytes-per-token = 0"),
        (("check", ""), errors.CheckpointError, "is empty"),
        (("plan", "-m", "kimi-k3", "4000x3000", "--budget", "lots"), errors.ConfigError, "lots"),
        (("encode", "nothing.png"), errors.ImageError, "nothing.png"),
        (("ask", "-m", "/nowhere", "hello"), errors.CheckpointError, "/nowhere"),
    ],
)
def test_errors_are_one_line_with_their_exit_code(
    words: tuple[str, ...], error: type[errors.MoonvitError], said: str
) -> None:
    done = moonvit(*words)
    assert done.returncode == error.exit_code, done.stderr
    assert said in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


def test_an_interruption_has_its_own_code(monkeypatch: pytest.MonkeyPatch, picture: str) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(encoding, "open_encoder", interrupted)
    monkeypatch.setattr(sys, "argv", ["moonvit", "encode", picture])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan",), "Missing argument"),
        (("nonsense",), "'nonsense'; see 'moonvit --help'"),
        (("ask", "--max-tokens", "0", "hello"), "'--max-tokens'"),
        (("plan", "--no-such-option", "3x4"), "--no-such-option"),
    ],
)
def test_wrong_usage_is_one_line_that_points_to_the_help(words: tuple[str, ...], said: str) -> None:
    done = moonvit(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("moonvit: ") and done.stderr.count("\n") == 1
    assert said in done.stderr and "--help" in done.stderr
