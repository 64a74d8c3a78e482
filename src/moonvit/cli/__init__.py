"""The command line. Every command imports what it needs when it runs, so ``--help`` stays quick.

Answers go to stdout, progress to stderr (a bar when it is a terminal). With ``--json`` stdout holds exactly one JSON
document. An error is one line on stderr and the exit code of its class in ``errors.py``.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated, Any

import typer

from moonvit.cli import bench
from moonvit.cli.encoding import encode
from moonvit.cli.options import (
    BUDGET_HELP,
    DEVICE_HELP,
    DTYPE_HELP,
    MODEL_HELP,
    BudgetText,
    Device,
    Dtype,
    Json,
    Model,
)
from moonvit.cli.plans import beside_stock, kv_tokens, show_beside, show_plan
from moonvit.cli.tables import table
from moonvit.cli.terminal import console, exists, model_path, naming, open_encoder, print_json, shown
from moonvit.errors import CheckpointError, ConfigError, InvalidInputError, MoonvitError

app = typer.Typer(
    name="moonvit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(encode)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"moonvit {version('moonvit')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """The Kimi vision stack: pictures in, language-model features and answers out, in memory known beforehand."""


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    images: Annotated[list[str] | None, typer.Option("-i", "--image", help="A picture; may be given again.")] = None,
    model: Model = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to generate at most.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0 is greedy; the model's own by default.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus to sample from.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--instant", help="Reason first, or answer at once.")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    budget: BudgetText = "auto",
    as_json: Json = False,
) -> None:
    """Ask about pictures and watch the answer appear."""
    import asyncio

    from moonvit.engines import GenerateRequest, Sampling, open_engine
    from moonvit.prompts.messages import ImagePart, Message, TextPart

    if not question.strip():
        raise InvalidInputError("the question is empty", param="question")
    parts = tuple(ImagePart(image, f"image {n}") for n, image in enumerate(images or ()))
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    request = GenerateRequest((Message("user", (*parts, TextPart(question))),), sampling, thinking=thinking)
    with console().status("loading the model"):
        engine = open_engine("embedded", model_path(model), device=device, dtype=dtype, budget=budget)

    async def run() -> dict[str, Any]:
        answer: dict[str, Any] = {"content": "", "reasoning": "", "finish_reason": None, "usage": None}
        try:
            async for delta in engine.generate(request):
                answer["content"] += delta.content
                answer["reasoning"] += delta.reasoning
                answer["finish_reason"] = delta.finish_reason or answer["finish_reason"]
                if delta.usage is not None:
                    from dataclasses import asdict

                    answer["usage"] = asdict(delta.usage)
                if not as_json:
                    sys.stderr.write(delta.reasoning)
                    sys.stdout.write(delta.content)
                    sys.stdout.flush()
        finally:
            await engine.close()
        return answer

    with naming(images or []):
        answer = asyncio.run(run())
    if as_json:
        print_json({"model": engine.info.model, **answer})
    else:
        sys.stdout.write("\n")


@app.command()
def plan(
    items: Annotated[list[str], typer.Argument(help="Sizes such as 4000x3000, or picture files.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Family (kimi-vl, kimi-vl-2506, kimi-k2.5, kimi-k3, demo), checkpoint directory or hub id; the demo "
            "model in the package by default.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="The machine planned for: cpu (with bfloat16 instructions) or cuda.")] = (
        "cpu"
    ),
    threads: Annotated[int, typer.Option(help="Its CPU threads.")] = 1,
    budget: BudgetText = "auto",
    tp: Annotated[int | None, typer.Option(help="Ranks that share heads and MLP.")] = None,
    dp: Annotated[int | None, typer.Option(help="Groups that whole images are assigned to.")] = None,
    ranks: Annotated[int | None, typer.Option(help="All ranks, tp x dp; alone, that many groups.")] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="data gives whole pictures to ranks, tensor divides heads and MLP over them; auto is data unless --tp "
            "says otherwise."
        ),
    ] = "auto",
    beside: Annotated[
        bool, typer.Option("--compare", help="Show beside it what the stock towers of vLLM and SGLang take, computed.")
    ] = False,
    kv_bytes: Annotated[
        int | None,
        typer.Option(
            "--kv-bytes-per-token",
            help="Bytes of a KV-cache token on one rank: say how many tokens the difference returns, or with no "
            "--compare how many the peak is worth.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Count the tokens and bytes of a request, without weights.

    Bytes are those of one thread of a CPU with bfloat16 instructions unless --device and --threads say otherwise.
    """
    from moonvit.deploy import deploy, layout, split_tensors
    from moonvit.plan import Budget, Machine, image_flops, make_plan
    from moonvit.preprocess import resize_plan
    from moonvit.stock import ENGINES, stock

    config, packed = _config(model)
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device = {shown(device)!r}: plans are made for cpu and cuda", param="device")
    for name, value, most in (("threads", threads, 4096), ("kv-bytes-per-token", kv_bytes, 2**40)):
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"{name} = {value}, allowed are 1 to {most}", param=name)
    groups = layout(tp, dp, ranks, mode)
    options: dict[str, Any] = {"dtype": dtype, "budget": Budget(budget), "machine": Machine(device, threads)}
    options["packed"] = packed
    with naming(items):
        grids = [resize_plan(config.rule, *_size(item, index)).grid for index, item in enumerate(items)]
        spread = deploy(config, grids, tp=groups[0], dp=groups[1], **options)
    made = spread.whole
    # With the request's budget an image is planned as it goes in the request; alone it could have larger chunks.
    part = split_tensors(config, groups[0])
    alone = {grid: make_plan(part, [grid], **options) for grid in set(grids)}
    images = [
        {
            "item": shown(item),
            **image,
            "group": next(n for n, share in enumerate(spread.shares) if index in share.images),
            "output_bytes": alone[grid].output_bytes,
            "flops": image_flops(config, grid),
            "alone_peak_bytes": alone[grid].peak_bytes,
        }
        for index, (item, image, grid) in enumerate(zip(items, made.to_dict()["images"], grids, strict=True))
    ]
    towers = ENGINES if beside else ()
    rows = [
        beside_stock(stock(engine, config, grids, dtype=dtype, tp=spread.tp, dp=spread.dp), spread, kv_bytes)
        for engine in towers
    ]
    peak = max(spread.rank_peaks)
    worth = None if kv_bytes is None else kv_tokens(peak, kv_bytes, len(spread.rank_peaks))
    if not as_json:
        machine = "a CUDA device"
        if device == "cpu":
            machine = f"{threads} thread{'s' * (threads > 1)} of a CPU with bfloat16 instructions"
        family = config.family if model is not None else f"demo model, {config.family}"
        show_plan(f"{family}, {dtype}, planned for {machine}", spread, images)
        if rows:
            show_beside(rows, spread, kv_bytes)
        elif worth:
            several = f" on each rank, {worth['all']:,} in all" * (len(spread.rank_peaks) > 1)
            typer.echo(f"\nthe peak is worth {worth['rank']:,} KV tokens of {kv_bytes:,} bytes{several}")
        return
    print_json(
        {
            "family": config.family,
            "items": items,
            "machine": {"device": device, "threads": threads, "bfloat16": True},
            **made.to_dict(),
            "images": images,
            "deployment": spread.to_dict(),
            "compare": rows,
            "peak_kv_tokens": worth,
        }
    )


def _size(item: str, index: int) -> tuple[int, int]:
    from moonvit.images import check_size, picture_size

    match = re.fullmatch(r"([0-9]+)[xX×]([0-9]+)", item)
    if match:
        if max(map(len, match.groups())) > 10:
            raise InvalidInputError(f"{shown(item)!r}: a side of more than 10 digits")
        size = int(match[1]), int(match[2])
        check_size(size, index=index)
        return size

    if not item.lower().startswith("data:") and not exists(item):
        raise InvalidInputError(f"{shown(item)!r} is neither a size such as 4000x3000 nor a file that exists")
    return picture_size(item, index=index)


def _config(model: str | None) -> tuple[Any, frozenset[str]]:
    """Configuration of a family name, or of a checkpoint, and which of its layers are packed."""
    from moonvit.families import ALIASES, FAMILIES, VARIANTS, family_config

    if model is not None and not exists(model):
        known = model.lower()
        if known in FAMILIES or known in ALIASES or known in VARIANTS or "/" not in model:
            return family_config(model), frozenset()
    from moonvit.checkpoint import packed_layers, read_config, resolve

    local = resolve(model_path(model))
    config = read_config(local)[0]
    try:
        return config, packed_layers(config, local)
    except CheckpointError as error:  # a plan needs no weights
        typer.echo(f"moonvit: planned as if no weight were packed: {error.message}", err=True)
        return config, frozenset()


@app.command()
def check(
    checkpoint: Annotated[
        str | None, typer.Argument(help="Checkpoint directory or hub id; the demo by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that a checkpoint's vision part is whole.

    Names, shapes and dtypes are held against what the model needs, and every value must be finite.
    """
    from moonvit.checkpoint import check_vision

    with console().status("reading"):
        report = check_vision(model_path(checkpoint))
    if as_json:
        print_json(report)
        return
    table(
        f"{report['path']}: complete",
        ["", "value"],
        [
            [name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value)]
            for name, value in report.items()
        ],
    )


@app.command()
def compare(
    checkpoint: Annotated[
        str | None, typer.Argument(help="Checkpoint directory or hub id; the demo by default.")
    ] = None,
    images: Annotated[
        list[str] | None, typer.Option("-i", "--image", help="A picture to compare on; may be given again.")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Hold every layer against a plain float64 reference.

    Says which layer diverges first on this device and in this dtype. Without pictures, small random ones are used.
    """
    from moonvit.compare import compare as hold
    from moonvit.compare import cut

    encoder = open_encoder(checkpoint, device, dtype, "auto")
    with console().status("comparing"):
        if images:
            found = hold(encoder.model, *cut(encoder.config, images))
        else:
            found = hold(encoder.model)
    if as_json:
        print_json({"family": encoder.config.family, **found.to_dict()})
    else:
        rows = [
            [stage.name, f"{stage.error:.2e}", f"{stage.limit:.2e}", "diverges" if stage.diverges else ""]
            for stage in found.stages
        ]
        table(f"{encoder.config.family}, {found.dtype} on {found.device}", ["stage", "error", "allowed", ""], rows)
    found.check()


@app.command()
def models(as_json: Json = False) -> None:
    """List the model families and the demo model."""
    from moonvit.families import FAMILIES
    from moonvit.preprocess import tokens_for

    rows: list[dict[str, Any]] = []
    for name, config in FAMILIES.items():
        rows.append(
            {
                "model": name,
                "layers": config.num_layers,
                "width": config.hidden_size,
                "heads": config.num_heads,
                "language_width": config.text_hidden_size,
                "patch_limit": config.rule.patch_limit,
                "tokens_1024x768": tokens_for(config, 1024, 768),
            }
        )
    from moonvit.engines import default_model

    demo = default_model()
    facts = json.loads((demo / "demo.json").read_text()) if (demo / "demo.json").exists() else {}
    if as_json:
        print_json({"families": rows, "demo": {"path": str(demo), **facts}})
        return
    table(
        "families",
        ["model", "layers", "width", "heads", "language width", "patch limit", "tokens of 1024x768"],
        [[row["model"], *(f"{value:,}" for value in list(row.values())[1:])] for row in rows],
    )
    typer.echo(f"\ndemo model: {demo}")
    if facts:
        typer.echo(facts["summary"])


app.add_typer(bench.app, name="bench")


@app.command()
def serve(
    model: Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP, envvar="MOONVIT_MODEL")] = None,
    flags: Annotated[
        list[str] | None, typer.Argument(help="After --, flags for the engine itself.", show_default=False)
    ] = None,
    engine: Annotated[
        str, typer.Option(help="What runs the model: embedded or vllm.", envvar="MOONVIT_ENGINE")
    ] = "embedded",
    device: Annotated[str | None, typer.Option(help=DEVICE_HELP + " [cpu]", envvar="MOONVIT_DEVICE")] = None,
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP, envvar="MOONVIT_DTYPE")] = "auto",
    budget: Annotated[str, typer.Option(help=BUDGET_HELP, envvar="MOONVIT_BUDGET")] = "auto",
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one [8000].")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key that requests must carry as a bearer token.")] = None,
    cors_origins: Annotated[str | None, typer.Option(help="Origins whose pages may call, separated by commas.")] = None,
    max_body: Annotated[str | None, typer.Option(help="Bytes of one request body [64MiB].")] = None,
    max_pending: Annotated[str | None, typer.Option(help="Bytes of all request bodies held at once [256MiB].")] = None,
    max_images: Annotated[int | None, typer.Option(help="Pictures in one request [32].")] = None,
    max_running: Annotated[int | None, typer.Option(help="Requests worked on at once [4].")] = None,
    max_waiting: Annotated[int | None, typer.Option(help="Requests that may wait; the next gets 429 [32].")] = None,
    media_hosts: Annotated[
        str | None, typer.Option(help="Hosts that pictures may be fetched from, separated by commas; none by default.")
    ] = None,
    media_private: Annotated[bool | None, typer.Option(help="Let those hosts have private addresses.")] = None,
    media_workers: Annotated[int | None, typer.Option(help="Pictures fetched at once [8].")] = None,
    media_timeout: Annotated[float | None, typer.Option(help="Seconds for one picture address [10].")] = None,
    body_timeout: Annotated[float | None, typer.Option(help="Seconds in which a body must arrive [60].")] = None,
    write_timeout: Annotated[float | None, typer.Option(help="Seconds a client may stop reading [60].")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error [info].")] = None,
) -> None:
    """Serve the OpenAI API, and a page at /.

    Every setting is also an environment variable: MOONVIT_PORT and so on. With --engine vllm the server is vLLM's own,
    with the bounded tower in it: moonvit serve --engine vllm -m MODEL -- --tensor-parallel-size 2
    """
    given = dict(locals())
    del given["flags"]
    if engine == "vllm":
        from moonvit.cli import vllm

        vllm.check_plugin()
    from moonvit.engines import open_engine
    from moonvit.server import run
    from moonvit.server.settings import LOADING, load_settings

    settings = load_settings(**{name: value for name, value in given.items() if name not in LOADING})
    if engine == "vllm":
        vllm.serve(settings, model, flags or [], device=device, dtype=dtype, budget=budget)
        return
    if flags:
        raise ConfigError(f"engine {shown(engine)!r} takes no flags of its own, but got {shown(' '.join(flags))}")
    with console().status("loading the model"):
        opened = open_engine(
            engine,
            model_path(model),
            device=device or "cpu",
            dtype=dtype,
            budget=budget,
            max_active=settings.max_running,
            max_waiting=max(1, settings.max_waiting),
        )
    run(opened, settings)


def main() -> None:
    """Run the command line and leave with the exit code of what went wrong, if anything did."""
    try:
        code = app(
            prog_name="moonvit", standalone_mode=False
        )  # typer gives the code of an interruption back instead of raising it
        if code:
            raise SystemExit(code)
    except MoonvitError as error:
        typer.echo(f"moonvit: {error.message}", err=True)
        raise SystemExit(error.exit_code) from None
    except typer.Abort:
        raise SystemExit(130) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        said = getattr(error, "format_message", None)  # typer's own errors have no public base class
        if said is None:
            raise
        reason = said().rstrip(".")
        if "\n" not in reason:  # the help that stands in for a missing command has many lines
            command = getattr(getattr(error, "ctx", None), "command_path", "moonvit")
            reason = f"moonvit: {reason}; see '{command} --help'"
        typer.echo(reason, err=True)
        raise SystemExit(getattr(error, "exit_code", 2)) from None
