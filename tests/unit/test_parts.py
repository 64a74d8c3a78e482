"""A rank's part of a checkpoint: parts make up the whole, whatever its spelling and packing, and no more is read."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moonvit import reference
from moonvit.bench.measure import peak
from moonvit.checkpoint import divide, load_vision, packable, save_vision
from moonvit.checkpoint.parts import PLAN, SUMMED
from moonvit.deploy import split_tensors
from moonvit.errors import CheckpointError, ConfigError
from moonvit.families import FAMILIES, VisionConfig
from moonvit.model import VisionModel
from moonvit.quantised import Unpacked
from tests.packing import WAYS, in_words, model_of, pack, state_of
from tests.parity.cases import GATE, random_model, random_patches, tiny

FAMILY_NAMES = list(FAMILIES)
GRIDS = [(1, 4, 6), (1, 10, 8)]


def divisible(family: str, **changes: Any) -> VisionConfig:
    """Four heads and an MLP that 2 and 4 ranks divide, in blocks of 128 too where 2 do."""
    widths = {"hidden_size": 256, "num_heads": 4, "intermediate_size": 512, "text_hidden_size": 48, "num_layers": 2}
    return tiny(family, **{**widths, **({"qkv_size": 512} if family == "kimi-k3" else {}), **changes})


def encode(parts: list[VisionModel], patches: torch.Tensor) -> list[torch.Tensor]:
    """What parts give that add up their layers: each runs in a thread, as a rank would in a process."""
    barrier = threading.Barrier(len(parts), timeout=60)
    given: dict[int, torch.Tensor] = {}
    found: dict[int, list[torch.Tensor]] = {}

    def add_up(rank: int, _layer: Any, _given: Any, out: torch.Tensor) -> torch.Tensor:
        given[rank] = out
        barrier.wait()
        total = torch.stack([given[other] for other in range(len(parts))]).sum(0)
        barrier.wait()
        return total

    def run(rank: int) -> None:
        model = parts[rank]
        for block in model.vision_tower.encoder.blocks:
            for name in SUMMED:
                block.get_submodule(name).register_forward_hook(partial(add_up, rank))
        found[rank] = model(patches, model.prepare(GRIDS, 16))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(1, len(parts)):
        assert all(torch.equal(a, b) for a, b in zip(found[0], found[rank], strict=True))
    return found[0]


def assert_whole(parts: list[VisionModel], whole: VisionModel) -> None:
    patches = random_patches(GRIDS)
    exact = reference.features(Unpacked(whole.state_dict()), whole.config, patches, GRIDS)
    assert reference.max_relative_error(encode(parts, patches), exact) <= GATE


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("spelling", ["official", "transformers", "runtime"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_a_file_make_up_the_model(family: str, spelling: Any, ranks: int, tmp_path: Path) -> None:
    whole = random_model(divisible(family))
    save_vision(whole, tmp_path, spelling)
    parts = [load_vision(whole.config, tmp_path, part=(rank, ranks)) for rank in range(ranks)]
    assert all(part.config == split_tensors(whole.config, ranks) for part in parts)
    assert_whole(parts, whole)


@pytest.mark.parametrize("way", [*WAYS, "mixed"])
@pytest.mark.parametrize("spelling", ["official", "transformers", "runtime"])
@pytest.mark.parametrize("words", [False, True])
def test_parts_of_packed_weights(way: str, spelling: Any, words: bool, tmp_path: Path) -> None:
    config = divisible("kimi-k3")
    state = pack(state_of(random_model(config)), packable(config), way)
    whole = model_of(config, state)
    save_vision(whole, tmp_path, spelling)
    if words:
        file = tmp_path / "model.safetensors"
        save_file(in_words(load_file(file)), file)
    parts = [load_vision(config, tmp_path, part=(rank, 2)) for rank in range(2)]
    assert parts[1].packed == whole.packed
    assert_whole(parts, whole)


def test_parts_of_a_model_in_memory() -> None:
    for state in (None, "fp8_channel"):
        whole = random_model(divisible("kimi-k2.5"))
        if state:
            whole = model_of(whole.config, pack(state_of(whole), packable(whole.config), state))
        assert_whole([divide(whole, (rank, 4)) for rank in range(4)], whole)


def test_scales_that_would_have_to_be_cut_are_refused(tmp_path: Path) -> None:
    config = divisible("kimi-k2.5")
    save_vision(model_of(config, pack(state_of(random_model(config)), packable(config), "fp8_block")), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"wo\.weight_scale is packed 128 columns together, and 4 ranks have 64 each"
    ):
        load_vision(config, tmp_path, part=(0, 4))
    with pytest.raises(ConfigError, match=r"tp = 3: 4 heads and an MLP of 512 divide over 1, 2, 4 ranks"):
        load_vision(config, tmp_path, part=(0, 3))


def test_a_matrix_that_says_it_is_another_is_refused(tmp_path: Path) -> None:
    config = divisible("kimi-k2.5")
    state = in_words(pack(state_of(random_model(config)), packable(config), "int8_channel"))
    name = "vision_tower.encoder.blocks.1.mlp.fc0.weight_shape"
    save_file({**state, name: torch.tensor([1, 2])}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"blocks\.1\.mlp\.fc0\.weight_shape says \[1, 2\], expected \[512, 256\]"
    ):
        load_vision(config, tmp_path, part=(1, 2))


def test_a_bias_of_what_is_summed_is_held_once() -> None:
    whole = random_model(divisible("kimi-k2.5"))
    parts = [divide(whole, (rank, 2)) for rank in range(2)]
    for name in SUMMED:
        biases = [part.vision_tower.encoder.blocks[0].get_submodule(name).bias for part in parts]
        assert torch.equal(biases[0], whole.vision_tower.encoder.blocks[0].get_submodule(name).bias)
        assert not biases[1].any() and biases[0].any()


@pytest.mark.filterwarnings("ignore")
def test_no_rank_has_the_whole_of_a_divided_tensor(tmp_path: Path) -> None:
    """It allocates its part of the model, and of one tensor at a time once more."""
    whole = random_model(divisible("kimi-k2.5", intermediate_size=16384, num_layers=1))
    save_vision(whole, tmp_path)
    largest = max(parameter.nbytes for parameter in whole.parameters())
    found = peak(lambda: load_vision(whole.config, tmp_path, part=(3, 4)))
    own = sum(parameter.nbytes for parameter in divide(whole, (3, 4)).parameters())
    assert largest == 16384 * 256 * 4
    assert own <= found.kept <= own + 4096
    mapped = (tmp_path / "model.safetensors").stat().st_size  # counted, but a place in the file and no memory
    assert found.peak - mapped <= own + largest // 4 + 65536 < own + largest


def test_the_plan_covers_every_linear_of_a_block() -> None:
    model = random_model(divisible("kimi-k2.5"))
    layers = {name.split(".", 4)[4] for name in packable(model.config) if ".blocks." in name}
    assert {f"{name}.weight" for name in PLAN} == layers
