"""Train the demo model. Resumes from its folder; a run may be stopped and taken up again at any time.

python -m train.run --folder runs/demo
python -m train.run --folder runs/more --start src/moonvit/demo --dense 0 --rate 3e-4   (go on from an exported model)
"""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import _muon
from torch.utils.data import DataLoader

from train.batches import LABEL_CLASSES, MIDDLE, Batch, Page, Pages, Stream
from train.config import demo_config
from train.draw import KINDS
from train.export import SHARD
from train.model import DemoModel

PAGES = 120_000
"""Pictures from which the tower alone learns what stands where, before the first question."""
STAGES = (
    (0, 6, 1.0),
    (60_000, 6, 0.3),
    (PAGES, 6, 0.3),
    (PAGES + 60_000, 9, 0.1),
    (PAGES + 150_000, 16, 0.0),
    (PAGES + 280_000, 33, -1.0),
)
"""From so many pictures on: the largest side in merged tokens, and how easy letters are (see ``make_sample``)."""

KIND_WEIGHTS = torch.tensor(
    [{"read": 2.0, "colour": 0.5, "shape": 0.5, "count": 2.5, "multi": 2.5}.get(kind, 1.2) for kind in KINDS]
)
"""How much an answer of each kind counts."""
DTYPE = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
"""What the arithmetic is in: bfloat16 takes fifty times as long on a CPU without instructions for it."""
LABEL_WEIGHTS = (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 3.0, 3.0, 0.3, 0.3, 0.3)
"""How much each dense label counts: places come slowly, and a tower without a sink to attend to counts badly."""


class Trainer:
    """Weights of ``DTYPE`` for the arithmetic, float32 masters for the optimiser.

    Args:
        folder: Where ``state.pt`` and ``log.jsonl`` live.
        rate: Peak learning rate.
        start: An exported checkpoint to go on from, where the folder has no state yet.
        seed: Of the first weights.
    """

    def __init__(self, folder: Path, rate: float, start: Path | None = None, seed: int = 0) -> None:
        self.folder, self.rate = folder, rate
        torch.manual_seed(seed)
        self.model = DemoModel(demo_config())
        self.head = nn.Linear(demo_config()["text_config"]["hidden_size"], 4 * sum(LABEL_CLASSES))
        names, self.masters = [], []
        for prefix, module in (("", self.model), ("head.", self.head)):
            for name, parameter in module.named_parameters():
                names.append(prefix + name)
                self.masters.append(parameter.detach().clone())
        self.names = names
        self.model.to(DTYPE)
        self.head.to(DTYPE)
        for name, buffer in self.model.named_buffers():
            if "e_score" in name:
                buffer.data = buffer.data.float()
        self.working = [*self.model.parameters(), *self.head.parameters()]
        apart = ("proj.0.weight", "embed_tokens", "lm_head", "pos_emb", "patch_embed", "head.", "gate.weight")
        matrix = [m.dim() == 2 and not any(a in n for a in apart) for n, m in zip(names, self.masters, strict=True)]
        self.muon = torch.optim.Muon(
            [m for m, is_matrix in zip(self.masters, matrix, strict=True) if is_matrix],
            lr=rate,
            weight_decay=0.02,
            adjust_lr_fn="match_rms_adamw",
        )
        self.adam = torch.optim.AdamW(
            [m for m, is_matrix in zip(self.masters, matrix, strict=True) if not is_matrix],
            lr=rate,
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )
        self.pictures = self.steps = 0
        self.spent = 0.0
        state = folder / "state.pt"
        if state.exists():
            saved = torch.load(state, weights_only=True)
            for master, value in zip(self.masters, saved["masters"], strict=True):
                master.copy_(value)
            for (_, buffer), value in zip(self._buffers(), saved["buffers"], strict=True):
                buffer.copy_(value)
            self.muon.load_state_dict(saved["muon"])
            self.adam.load_state_dict(saved["adam"])
            self.pictures, self.steps, self.spent = saved["pictures"], saved["steps"], saved["spent"]
        elif start is not None:
            weights = spread_layers(load_file(start / SHARD), len(self.model.language_model.model.layers))
            for name, value in [*zip(names, self.masters, strict=True), *self._buffers()]:
                if name in weights:
                    value.copy_(weights[name])
                elif name.endswith(("o_proj.weight", "down_proj.weight")):
                    value.zero_()
            self.pictures = STAGES[-1][0]
        self._publish()
        # Fused on the CPU a step takes two thirds of the time; the first one takes a minute and a half.
        for block in (*self.model.vision_tower.encoder.blocks, *self.model.language_model.model.layers):
            block.compile(dynamic=True)

    def _buffers(self) -> list[tuple[str, Tensor]]:
        return [(name, buffer) for name, buffer in self.model.named_buffers() if "e_score" in name]

    def _publish(self) -> None:
        with torch.no_grad():
            for working, master in zip(self.working, self.masters, strict=True):
                working.copy_(master)

    def save(self) -> None:
        """Write ``state.pt``, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / "state.part"
        torch.save(
            {
                "names": self.names,
                "masters": self.masters,
                "buffers": [buffer for _, buffer in self._buffers()],
                "muon": self.muon.state_dict(),
                "adam": self.adam.state_dict(),
                "pictures": self.pictures,
                "steps": self.steps,
                "spent": self.spent,
            },
            part,
        )
        part.replace(self.folder / "state.pt")

    def average(self, steps: int, pictures: int, stop: bool) -> bool:
        """Meet the other processes: weights become the mean of all, weighted by the steps each has made.

        Args:
            steps: Steps since the last meeting.
            pictures: Pictures since the last meeting.
            stop: This process wants to end.

        Returns:
            Whether any process wants to end.
        """
        shared = [*self.masters, *(buffer for _, buffer in self._buffers())]
        flat = torch.cat([value.detach().flatten() for value in shared]) * steps
        news = torch.tensor([steps, pictures, float(stop)], dtype=torch.float64)
        dist.all_reduce(flat)
        dist.all_reduce(news)
        flat /= news[0].item()
        with torch.no_grad():
            for value, mean in zip(shared, flat.split([value.numel() for value in shared]), strict=True):
                value.copy_(mean.view_as(value))
        self.pictures += int(news[1].item()) - pictures
        self._publish()
        return bool(news[2].item())

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Answer loss, dense-label loss, and which answers are exact.

        Args:
            batch: One batch.

        Returns:
            Two scalars and a bool vector (answers).
        """
        groups = []
        dense = torch.zeros(())
        for (h, w), patches, labels in zip(batch.grids, batch.patches, batch.labels, strict=True):
            features = self.model.features(normalised(patches), h, w)
            groups.append(features)
            dense = dense + dense_loss(self.head(features).float(), labels) / len(batch.grids)
        features_ME = torch.cat([groups[group][index] for group, index in batch.order])
        hidden = self.model.hidden(batch.ids_ST, features_ME, batch.turns_ST, batch.positions_ST)[:, :-1]
        flags = batch.flags_ST[:, 1:]
        learned = flags > 0
        logits = self.model.language_model.lm_head(hidden[learned]).float()
        target = batch.ids_ST[:, 1:][learned]
        each = F.cross_entropy(logits, target, reduction="none")
        answers = flags[learned] - 1
        count = len(batch.kinds)
        length = torch.zeros(count).index_add(0, answers, torch.ones(len(answers)))
        weights = KIND_WEIGHTS[batch.kinds] / length.sqrt()
        loss = (each * weights[answers]).sum() / (length * weights).sum()
        wrong = torch.zeros(count).index_add(0, answers, (logits.argmax(-1) != target).float())
        return loss, dense, wrong == 0

    def page_step(self, page: Page, rate: float) -> tuple[float, float]:
        """One update of tower and projector from dense labels alone.

        Args:
            page: Rows and columns of patches, patches, labels.
            rate: Learning rate.

        Returns:
            Dense loss, and the share of half patches with a glyph whose glyph is named right.
        """
        h, w, patches, labels = page
        logits = self.head(self.model.features(normalised(patches), h, w)).float()
        dense = dense_loss(logits, labels)
        dense.backward()
        self._update(rate)
        self.pictures += len(patches)
        glyphs = labels[..., :2]
        halves = logits.unflatten(-1, (4, -1))[..., : 2 * LABEL_CLASSES[0]].unflatten(-1, (2, -1))
        named = halves.argmax(-1)
        return dense.item(), (named == glyphs)[glyphs > 0].float().mean().item()

    def step(self, batch: Batch, rate: float, dense_weight: float) -> tuple[float, float, Tensor]:
        """One update.

        Args:
            batch: One batch.
            rate: Learning rate.
            dense_weight: Weight of the dense labels.

        Returns:
            Answer loss, dense loss, exact answers.
        """
        loss, dense, exact = self.losses(batch)
        (loss + dense_weight * dense if dense_weight else loss).backward()
        self._update(rate)
        self.pictures += sum(len(p) for p in batch.patches)
        return loss.item(), dense.item(), exact

    def _update(self, rate: float) -> None:
        for working, master in zip(self.working, self.masters, strict=True):
            master.grad = None if working.grad is None else working.grad.float()
            working.grad = None
        nn.utils.clip_grad_norm_([master for master in self.masters if master.grad is not None], 1.0)
        for optimiser in (self.muon, self.adam):
            for group in optimiser.param_groups:
                group["lr"] = rate * (1.5 if optimiser is self.muon else 1)
            optimiser.step()
        self._publish()
        self.steps += 1


def _orthogonal(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Muon's Newton-Schulz steps in float32; torch's own are always in bfloat16."""
    a, b, c = coefficients
    tall = grad.shape[0] > grad.shape[1]
    x = grad.T if tall else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


if DTYPE is torch.float32:
    _muon._zeropower_via_newtonschulz = _orthogonal


def spread_layers(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Number the decoder layers of a checkpoint anew, so that further ones find room between and behind them.

    Args:
        weights: Tensors under official names.
        layers: How many layers there will be.

    Returns:
        The same tensors; the first layer stays the first.
    """
    layer = re.compile(r"(language_model\.model\.layers\.)(\d+)\.")
    old = 1 + max(int(found[2]) for found in map(layer.match, weights) if found)
    return {layer.sub(lambda m: f"{m[1]}{int(m[2]) * layers // old}.", name): value for name, value in weights.items()}


def normalised(patches: Tensor) -> Tensor:
    """uint8 pixels as ``DTYPE`` from -1 to 1."""
    return ((patches.float() / 255.0 - 0.5) * 2.0).to(DTYPE)


def dense_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the labels of each patch; filled patches weigh as much as empty ones, but not for the middles.

    A middle too many is a shape too many, so there every patch weighs the same.

    Args:
        logits: (B, M, 4 * sum of classes).
        labels: (B, M, 4, 11).

    Returns:
        A scalar.
    """
    total = torch.zeros(())
    for number, part in enumerate(logits.unflatten(-1, (4, -1)).flatten(0, 2).split(list(LABEL_CLASSES), dim=-1)):
        target = labels[..., number].flatten()
        each = F.cross_entropy(part, target, reduction="none")
        if number == MIDDLE:
            total = total + LABEL_WEIGHTS[number] * each.mean()
            continue
        filled = target > 0
        empty = each[~filled].sum() / (~filled).sum().clamp(min=1) * 0.5
        total = total + LABEL_WEIGHTS[number] * (empty + each[filled].sum() / filled.sum().clamp(min=1))
    return total / sum(LABEL_WEIGHTS)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"))
    parser.add_argument("--start", type=Path, help="an exported checkpoint to go on from; its pictures are not counted")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of every picture")
    parser.add_argument("--pictures", type=int, default=1_000_000, help="how many pictures are seen in all")
    parser.add_argument("--decay", type=int, default=150_000, help="the last pictures, over which the rate falls to 0")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--warm", type=int, default=100, help="steps in which the rate rises")
    parser.add_argument("--dense", type=float, default=1.4, help="weight of the labels of each patch; 0 is without")
    parser.add_argument("--patches", type=int, default=5000, help="patches of a batch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peers", type=int, default=1, help="processes that train together, one core each")
    parser.add_argument("--rank", type=int, default=0, help="number of this one; 0 writes the log and the state")
    parser.add_argument("--meet", type=float, default=45, help="seconds between two meetings of the peers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peers > 1:
        options.folder.mkdir(parents=True, exist_ok=True)
        place = f"file://{(options.folder / 'peers').resolve()}"
        dist.init_process_group("gloo", init_method=place, rank=options.rank, world_size=options.peers)
    trainer = Trainer(options.folder, options.rate, options.start, options.seed)
    stop = False

    def ask_stop(*_: object) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, ask_stop)
    signal.signal(signal.SIGINT, ask_stop)
    begin = last = saved = time.monotonic()
    already = trainer.spent
    exact: dict[str, list[int]] = {kind: [0, 0] for kind in KINDS}
    sums, read, begun = [0.0, 0.0, 0], [0.0, 0], trainer.steps
    stage = -1
    met, met_steps, met_pictures = begin, trainer.steps, trainer.pictures
    while True:
        now = time.monotonic()
        stop = stop or trainer.pictures >= options.pictures
        if options.peers > 1 and (stop or now - met > options.meet):
            stop = trainer.average(trainer.steps - met_steps, trainer.pictures - met_pictures, stop)
            met, met_steps, met_pictures = time.monotonic(), trainer.steps, trainer.pictures
        if stop:
            break
        current = max(i for i, (start, _, _) in enumerate(STAGES) if trainer.pictures >= start)
        if current != stage:
            stage = current
            _, cells, easy = STAGES[stage]
            seed = f"{options.seed}.{trainer.steps}.{options.rank}"
            asking, page = trainer.pictures >= PAGES, options.patches * 3 // 4
            source = Stream(seed, cells, options.patches, easy) if asking else Pages(seed, cells, page, easy)
            loader = iter(DataLoader(source, batch_size=None, num_workers=1, prefetch_factor=6))
            pages = iter(DataLoader(Pages(f"{seed}.again", cells, page, easy), batch_size=None, num_workers=1))
        left = (options.pictures - trainer.pictures) / max(1, options.decay)
        rate = options.rate * min(1.0, (trainer.steps - begun + 1) / options.warm, left)
        # Every third step goes on reading pages: a letter costs least there.
        batch = next(pages if options.dense and trainer.steps % 3 == 2 else loader)
        if isinstance(batch, Batch):
            loss, dense, right = trainer.step(batch, rate, options.dense)
            sums = [sums[0] + loss, sums[1] + dense, sums[2] + 1]
            for kind, ok in zip(batch.kinds.tolist(), right.tolist(), strict=True):
                exact[KINDS[kind]][0] += ok
                exact[KINDS[kind]][1] += 1
        else:
            dense, named = trainer.page_step(batch, rate)
            read = [read[0] + named, read[1] + 1]
        if not math.isfinite(dense + sums[0]):
            raise SystemExit(f"dense loss {dense}, answer losses {sums[0]} at step {trainer.steps}")
        if options.rank == 0 and now - last > 60:
            trainer.spent = already + now - begin
            row = {
                "minutes": round(trainer.spent / 60, 1),
                "steps": trainer.steps,
                "pictures": trainer.pictures,
                "loss": round(sums[0] / max(1, sums[2]), 4),
                "dense": round(sums[1] / max(1, sums[2]), 4),
                "glyphs": round(read[0] / max(1, read[1]), 4),
                "rate": round(rate, 6),
                "cells": STAGES[stage][1],
                "exact": {kind: round(a / b, 3) for kind, (a, b) in exact.items() if b},
            }
            options.folder.mkdir(parents=True, exist_ok=True)
            with (options.folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
            exact = {kind: [0, 0] for kind in KINDS}
            sums, read = [0.0, 0.0, 0], [0.0, 0]
            last = now
        if options.rank == 0 and now - saved > 180:
            trainer.save()
            saved = now
    if options.rank == 0:
        trainer.spent = already + time.monotonic() - begin
        trainer.save()


if __name__ == "__main__":
    main()
