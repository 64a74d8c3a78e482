"""The demo model's training: the differentiable form equals what is served, and the pictures say what they show."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from moonvit.checkpoint import load_vision
from moonvit.engines.embedded.decoder import Decoder
from moonvit.families import config_from_dict
from moonvit.preprocess import patches_from
from train.batches import CELL, LABEL_CLASSES, Pages, Renderer, Stream, dense_labels, patchify
from train.config import demo_config
from train.draw import COLOURS, HELD_OUT_WORDS, KINDS, MIX, TRAIN_WORDS, Mark, Scene, make_sample
from train.export import SHARD, kimi_vl, preprocessor_config, write_checkpoint
from train.model import DemoModel
from train.run import spread_layers
from train.vocabulary import IM_END, MEDIA_PAD, PAD


@pytest.fixture(scope="module")
def model() -> DemoModel:
    torch.manual_seed(1)
    model = DemoModel(demo_config()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def checkpoint(model: DemoModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    write_checkpoint(dict(model.state_dict()), demo_config(), preprocessor_config(), folder)
    return folder


@pytest.mark.parametrize("grid", [(4, 6), (2, 2), (64, 64), (10, 34)])
def test_the_trained_form_equals_the_served_one(model: DemoModel, checkpoint: Path, grid: tuple[int, int]) -> None:
    h, w = grid
    served = load_vision(config_from_dict(demo_config()), checkpoint)
    pixels = torch.randint(0, 256, (1, h * w, 588), dtype=torch.uint8, generator=torch.Generator().manual_seed(h))
    with torch.no_grad():
        expected = model.features((pixels.float() / 255 - 0.5) * 2, h, w)[0]
    [features] = served(pixels[0], served.prepare([(h, w)]))
    assert (features - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("apart", [0.0, 1.0])
def test_the_trained_decoder_equals_the_served_one(
    model: DemoModel, checkpoint: Path, apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation of questions, and the last of many that each see their pictures alone."""
    monkeypatch.setattr("train.batches.APART", apart)
    config = json.loads((checkpoint / "config.json").read_text())
    served = Decoder.from_directory(checkpoint, config, device="cpu", dtype=torch.float32)
    batch = Stream("test", 3, 200, 0.0).batch(random.Random(4), Renderer())
    groups = [model.features(p.float() / 127.5 - 1, h, w) for (h, w), p in zip(batch.grids, batch.patches, strict=True)]
    features_ME = torch.cat([groups[group][index] for group, index in batch.order])
    with torch.no_grad():
        expected = model.language_model.lm_head(
            model.hidden(batch.ids_ST, features_ME, batch.turns_ST, batch.positions_ST)
        )
    taken = 0
    assert (batch.turns_ST.max() > 1) == bool(apart)
    for row_T, turns_T, logits_TV in zip(batch.ids_ST[:5], batch.turns_ST, expected, strict=False):
        length = int((row_T != PAD).sum())
        turns_T = turns_T[:length]
        ids_T = row_T[:length][(turns_T == 0) | (turns_T == turns_T[-1])]
        embeddings_TE = served.embed(ids_T.tolist()).clone()
        shown = (ids_T == MEDIA_PAD).nonzero().flatten()
        embeddings_TE[shown] = features_ME[taken : taken + len(shown)].detach()
        taken += len(shown)
        found_V = served.next_logits(embeddings_TE, served.new_cache())
        expected_V = logits_TV[length - 1]
        assert (found_V.flatten() - expected_V).abs().max() <= 1e-5 * expected_V.abs().max()


def test_gradients_reach_every_weight(model: DemoModel) -> None:
    batch = Stream("test", 3, 300, 0.0).batch(random.Random(2), Renderer())
    groups = [model.features(p.float() / 127.5 - 1, h, w) for (h, w), p in zip(batch.grids, batch.patches, strict=True)]
    features = torch.cat([groups[group][index] for group, index in batch.order])
    logits = model.language_model.lm_head(model.hidden(batch.ids_ST, features, batch.turns_ST, batch.positions_ST))
    logits.float().logsumexp(-1).mean().backward()
    lacking = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    model.zero_grad(set_to_none=True)
    assert lacking == []


def test_renaming_gives_kimi_vl(model: DemoModel, tmp_path: Path) -> None:
    tensors, config = kimi_vl(dict(model.state_dict()), demo_config())
    preprocessor = {"patch_size": 14, "merge_kernel_size": [2, 2], "pad_input": True, "in_token_limit": 4096}
    write_checkpoint(tensors, config, preprocessor, tmp_path)
    served = load_vision(config_from_dict(config), tmp_path)
    assert served.config.family == "kimi-vl"
    pixels = torch.randint(0, 256, (24, 588), dtype=torch.uint8)
    [features] = served(pixels, served.prepare([(4, 6)]))
    with torch.no_grad():
        expected = model.features((pixels[None].float() / 255 - 0.5) * 2, 4, 6)[0]
    assert (features - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert set(load_file(tmp_path / SHARD)) == set(tensors)


def test_patches_are_those_of_the_official_rule() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (75, 101, 3), dtype=np.uint8))
    made = patches_from(image, config_from_dict(demo_config(), preprocessor_config()).rule)
    assert made.grid == (1, 6, 8)
    assert np.array_equal(patchify(image, 6, 8), made.patches_LC)


def test_dense_labels_name_what_covers_a_patch() -> None:
    marks = [
        Mark((28, 14, 42, 42), glyph="c", index=2, colour="red", place=5),
        Mark((42, 14, 48, 28), glyph="i", index=3, colour="red", place=5),
        Mark((0, 0, 14, 14), shape="star", colour="red", centre="shape", counts=(3, 1, 2)),
    ]
    labels = dense_labels(marks, 2, 2)
    assert labels.shape == (4, 4, len(LABEL_CLASSES))
    red = list(COLOURS).index("red") + 1
    nothing = [0] * len(LABEL_CLASSES)
    # The patch on the right has a letter in its left half alone.
    assert labels[1].tolist() == [
        nothing,
        nothing,
        [3, 3, 3, 3, 0, red, 6, *[0] * 4],
        [9, 0, 4, 0, 0, red, 6, *[0] * 4],
    ]
    assert labels[3, 0].tolist() == [3, 3, 3, 3, 0, red, 6, 0, 0, 0, 0]
    assert labels[0, 0].tolist() == [0, 0, 0, 0, 4, red, 1, 1, 3, 1, 2]
    assert (labels.reshape(-1, len(LABEL_CLASSES)).max(0) < np.array(LABEL_CLASSES)).all()


def test_every_thing_has_one_middle_and_a_place() -> None:
    scene = Scene(300, 200, random.Random(3), TRAIN_WORDS)
    scene.shape("star", "red", 40.0, (0, 2))
    scene.shape("circle", "red", 40.0, (2, 0))
    scene.finish()
    labels = dense_labels(scene.marks, 8, 11)
    assert (labels[..., 7] == 1).sum() == 2
    assert set(np.unique(labels[..., 6])) == {0, 3, 7}
    assert labels[..., 8:].reshape(-1, 3).max(0).tolist() == [2, 1, 2]


@pytest.mark.parametrize("sort", list(MIX))
def test_samples_follow_from_the_seed_and_have_answers(sort: str) -> None:
    kinds = set()
    for seed in range(12):
        first, second = (make_sample(random.Random(seed), lambda _: (160, 120), sort=sort) for _ in range(2))
        assert [image.tobytes() for image in first.images] == [image.tobytes() for image in second.images]
        assert first.turns == second.turns
        assert all(turn.answer and turn.question.endswith(("?", ".")) for turn in first.turns)
        kinds |= {turn.kind for turn in first.turns}
    assert kinds <= set(KINDS)


def test_held_out_words_are_never_in_training() -> None:
    assert not set(TRAIN_WORDS) & set(HELD_OUT_WORDS)
    assert len(HELD_OUT_WORDS) > 100
    rng = random.Random(0)
    for _ in range(200):
        for turn in make_sample(rng, lambda _: (200, 150), sort="read").turns:
            assert turn.kind != "read" or turn.answer not in HELD_OUT_WORDS


def test_invented_strings_are_in_training_alone() -> None:
    texts = {"read": set[str](), "made up": set[str]()}
    for name, invented in (("read", 0.0), ("made up", 1.0)):
        scene = Scene(400, 100, random.Random(1), TRAIN_WORDS, invented=invented)
        texts[name] = {scene.string(8) for _ in range(200)}
    assert all(text in TRAIN_WORDS or text.isdigit() for text in texts["read"])
    assert sum(text in TRAIN_WORDS for text in texts["made up"]) < 20


def test_batches_hold_one_feature_for_each_placeholder() -> None:
    stream = Stream("test", 4, 800, 0.0)
    rng, renderer = random.Random(1), Renderer()
    for _ in range(4):
        batch = stream.batch(rng, renderer)
        rows = sum(h * w // 4 * len(p) for (h, w), p in zip(batch.grids, batch.patches, strict=True))
        assert (batch.ids_ST == MEDIA_PAD).sum() == rows
        learned = batch.ids_ST[batch.flags_ST > 0]
        assert (learned == IM_END).sum() == len(batch.kinds) == batch.flags_ST.max()
        assert not (learned == PAD).any()


def test_pages_are_full() -> None:
    h, w, patches, labels = next(iter(Pages("test", 6, 400, 0.0)))
    assert patches.shape[1:] == (h * w, 588) and labels.shape[1:] == (h * w // 4, 4, len(LABEL_CLASSES))
    assert (labels[..., 0] > 0).float().mean() > 0.03
    assert 14 * max(h, w) <= CELL * 6


def test_decoder_layers_are_numbered_anew_with_room_between_them() -> None:
    names = [f"language_model.model.layers.{n}.mlp.weight" for n in range(4)] + ["mm_projector.proj.0.weight"]
    weights = {name: torch.tensor(float(place)) for place, name in enumerate(names)}
    spread = spread_layers(weights, 6)
    numbers = [name.split(".")[3] for name in spread if "layers" in name]
    assert numbers == ["0", "1", "3", "4"]
    assert [float(value) for value in spread.values()] == [0, 1, 2, 3, 4]
    assert spread_layers(weights, 4) == weights
