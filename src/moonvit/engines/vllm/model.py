"""Kimi models of vLLM with our tower and projector in them; scheduling, memory, text and networking stay vLLM's.

While a stock model builds itself, the classes of its tower and projector are replaced by functions that hand out the
parts of a ``VisionModel``: so no stock weight is ever allocated, and what vLLM does to these modules, such as moving
them or leaving out what a limit of 0 never needs, goes on as before. Names of weights are the official ones.

Under tensor parallelism heads and MLP are divided where they can be, with vLLM's own sums; otherwise, and where vLLM is
told so, whole images go to ranks and features move at their exact size. All ranks run the same steps of the engine, so
nothing has to be agreed.

Shape suffixes: those of ``moonvit.model``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, ClassVar

import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_reduce,
)
from vllm.logger import init_logger
from vllm.model_executor.models import kimi_k25, kimi_vl
from vllm.model_executor.models.utils import StageMissingLayer
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from moonvit.attention import this_machine
from moonvit.cache import WeightCache
from moonvit.checkpoint import is_vision, load_tensors
from moonvit.checkpoint.parts import SUMMED, Part
from moonvit.deploy import assign_images, split_tensors
from moonvit.engines.vllm import BUDGET
from moonvit.errors import ConfigError
from moonvit.families import VisionConfig, config_from_dict
from moonvit.grids import Grid
from moonvit.model import Positions, VisionModel
from moonvit.parallel import Ranks
from moonvit.plan import POSITION_CACHE, Budget, Kept, Plan, make_plan
from moonvit.preprocess import resize_plan
from moonvit.stock import stock

log = init_logger("vllm.moonvit")
LARGE = ((489, 7083), (1861, 7041), (6732, 153), (3000, 3000))
"""Pixels of pictures that take the most patches, each under the limits of some family."""


class Tower:
    """Our tower and projector in one rank of an engine.

    Args:
        config: The whole model.
        divided: This rank has its heads and its part of the MLP alone.
    """

    def __init__(self, config: VisionConfig, divided: bool) -> None:
        self.config, self.divided = config, divided
        self.rank, self.ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.budget = Budget(os.environ.get(BUDGET, "auto"))
        self.model = VisionModel(split_tensors(config, self.ranks) if divided else config)
        self._positions: Positions = WeightCache(POSITION_CACHE)
        self._group = Ranks()

    def ready(self, dtype: torch.dtype) -> None:
        """Take the dtype of the engine, join its group, and refuse a budget that some picture would not fit.

        Args:
            dtype: float32, bfloat16 or float16.

        Raises:
            BudgetError: The largest legal picture needs more than the budget.
        """
        self.model.to(dtype=dtype).eval()
        if self.divided:
            for block in self.model.vision_tower.encoder.blocks:
                for name in SUMMED:
                    block.get_submodule(name).register_forward_hook(
                        lambda _layer, _given, out_RD: tensor_model_parallel_all_reduce(out_RD)
                    )
        elif self.ranks > 1:
            self._group = Ranks(get_tp_group().device_group)
        largest = max((resize_plan(self.config.rule, *size).grid for size in LARGE), key=lambda grid: grid.patches)
        plan = self.plan([largest])
        mode = "one rank" if self.ranks == 1 else "heads and MLP divided" if self.divided else "images to ranks"
        theirs = stock("vllm", self.config, [largest], dtype=plan.dtype)
        log.info(
            "moonvit: bounded %s tower, %s, budget %s: %s bytes for the largest picture (%s patches); vLLM's own: %s",
            self.config.family,
            mode,
            self.budget.bytes if self.budget.bytes is not None else "auto",
            f"{plan.peak_bytes:,}",
            f"{largest.patches:,}",
            f"{theirs.heaviest.peak_bytes:,}",
        )

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take weights under official names.

        Args:
            tensors: Names and whole values.

        Returns:
            The parameters that were filled: all of them.
        """
        if self.divided:
            part = Part(self.config, self.rank, self.ranks)
            tensors = ((name, part.take(name, tuple(tensor.shape), tensor)) for name, tensor in tensors)
        return load_tensors(self.model, tensors)

    def plan(self, grids: Sequence[Grid]) -> Plan:
        """What images take on this rank.

        Args:
            grids: The images.

        Returns:
            The plan that ``encode`` follows for them.
        """
        return make_plan(
            self.model.config,
            grids,
            dtype=str(self.model.dtype).removeprefix("torch."),
            budget=self.budget,
            machine=this_machine(self.model.device.type),
            kept=Kept(self._positions.max_bytes, tuple(self._positions.keys())),
            packed=self.model.packed,
        )

    @torch.inference_mode()
    def encode(self, patches: torch.Tensor, grids: Iterable[Sequence[int]]) -> list[torch.Tensor]:
        """Encode the images of a step of the engine.

        Args:
            patches: (L, 588) or (L, 3, 14, 14) of all images, uint8 or normalised, on every rank.
            grids: (t, h, w) or (h, w) of each, host integers.

        Returns:
            features_ME of each image, in order, each with storage of its own: one that is cached pins no other.

        Raises:
            EmptyInputError: There are no images.
        """
        pack = [Grid(*grid) if len(grid) == 3 else Grid(1, *grid) for grid in grids]
        starts = [0, *accumulate(grid.patches for grid in pack)]
        shares = assign_images(self.config, pack, self._group.size)
        own = shares[self._group.rank]
        found: dict[int, torch.Tensor] = {}
        if own:
            made = self.plan([pack[index] for index in own])
            for batch in made.batches:
                chosen = [own[place] for place in batch.indices]
                parts = [patches[starts[index] : starts[index + 1]] for index in chosen]
                meta = self.model.prepare([pack[n] for n in chosen], made.rows, made.groups, self._positions)
                rows_LC = (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)
                found.update(zip(chosen, self.model(rows_LC, meta), strict=True))
        if self._group.size > 1:
            for index, grid in enumerate(pack):
                if index not in found:
                    width, dtype = self.config.text_hidden_size, self.model.projector.dtype
                    found[index] = torch.empty(grid.tokens, width, dtype=dtype, device=self.model.device)
            owners = {index: rank for rank, share in enumerate(shares) for index in share}
            self._group.exchange(found, {index: owners[index] for index in range(len(pack))})
        return [found[index] for index in range(len(pack))]


class Bounded:
    """What our classes add to vLLM's."""

    _module: ClassVar[Any]
    _stock: ClassVar[tuple[str, str]]
    _tower: Tower | None

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        model_config = vllm_config.model_config
        if vllm_config.compilation_config.cudagraph_mm_encoder:
            raise ConfigError(
                "moonvit's tower has no vLLM encoder graphs: set cudagraph_mm_encoder to false, or MOONVIT_VLLM=off"
            )
        config = _read(model_config)
        ranks = get_tensor_model_parallel_world_size()
        fits = config.num_heads % ranks == 0 and config.intermediate_size % ranks == 0
        mode = model_config.get_multimodal_config().mm_encoder_tp_mode
        tower = Tower(config, divided=ranks > 1 and fits and mode != "data")
        with _instead(self._module, self._stock, tower.model):
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        left_out = isinstance(self.vision_tower, StageMissingLayer)  # type: ignore[attr-defined]
        self.__dict__["_tower"] = None if left_out else tower  # no module: its weights are this model's already
        if not left_out:
            tower.ready(model_config.dtype)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """VLLM's loading, with vision put aside and given to our tower."""
        vision: list[tuple[str, torch.Tensor]] = []

        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if self._tower is None or not is_vision(name):
                    yield name, tensor
                else:
                    vision.append((name, tensor))

        loaded: set[str] = super().load_weights(others())  # type: ignore[misc]
        return loaded | self._tower.load(vision) if self._tower is not None and vision else loaded

    def _encode(self, patches: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
        assert self._tower is not None
        return self._tower.encode(patches, grids.tolist())


class BoundedKimiVL(Bounded, kimi_vl.KimiVLForConditionalGeneration):  # type: ignore[misc]
    """Kimi-VL."""

    _module = kimi_vl
    _stock = ("MoonVitPretrainedModel", "KimiVLMultiModalProjector")

    def _process_image_input(self, image_input: Any) -> list[torch.Tensor]:
        return self._encode(image_input["pixel_values"], image_input["image_grid_hws"])


class BoundedKimiK25(Bounded, kimi_k25.KimiK25ForConditionalGeneration):  # type: ignore[misc]
    """K2.5, K2.6 and K2.7."""

    _module = kimi_k25
    _stock = ("MoonViT3dPretrainedModel", "KimiK25MultiModalProjector")

    def _process_media_input(self, media_input: Any) -> list[torch.Tensor]:
        return self._encode(media_input["pixel_values"], media_input["grid_thws"])


def _read(model_config: Any) -> VisionConfig:
    """The vision configuration out of the files: vLLM's objects fill in defaults of other models."""
    files = (
        get_hf_file_to_dict(name, model_config.model, model_config.revision)
        for name in ("config.json", "preprocessor_config.json")
    )
    config, preprocessor = files
    return config_from_dict(config, preprocessor)


@contextmanager
def _instead(module: Any, names: tuple[str, str], model: VisionModel) -> Iterator[None]:
    """Let a stock model get our tower and projector where it asks for its own."""
    made = (model.vision_tower, model.projector)
    before = [getattr(module, name) for name in names]
    for name, part in zip(names, made, strict=True):
        setattr(module, name, lambda *_args, _part=part, **_options: _part)
    try:
        yield
    finally:
        for name, part in zip(names, before, strict=True):
            setattr(module, name, part)
