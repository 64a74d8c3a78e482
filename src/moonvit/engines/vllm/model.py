"""Kimi models of vLLM with our tower and projector in them; everything else is vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, get_tp_group, tensor_model_parallel_all_reduce
from vllm.logger import init_logger
from vllm.model_executor.models import kimi_k25, kimi_vl
from vllm.model_executor.models.utils import StageMissingLayer
from moonvit.attention import this_machine
from moonvit.cache import WeightCache
from moonvit.checkpoint import is_vision, load_tensors
from moonvit.checkpoint.parts import SUMMED, Part
from moonvit.deploy import assign_images, split_tensors
from moonvit.families import VisionConfig, config_from_dict
from moonvit.grids import Grid
from moonvit.model import VisionModel
from moonvit.parallel import Ranks
from moonvit.plan import POSITION_CACHE, Budget, Kept, make_plan

log = init_logger("vllm.moonvit")


class Bounded:
    def __init__(self, vllm_config, whole, model, divided):
        self.whole, self.model, self.divided = whole, model, divided
        self.budget = Budget("auto")
        self.positions = WeightCache(POSITION_CACHE)
        self.ranks = Ranks(get_tp_group().device_group) if get_tensor_model_parallel_world_size() > 1 and not divided else Ranks()

    def plan(self, grids):
        kept = Kept(self.positions.max_bytes, tuple(self.positions.keys()), 0, 0)
        return make_plan(self.model.config, grids, dtype=str(self.model.dtype).removeprefix("torch."), budget=self.budget,
                         machine=this_machine(self.model.device.type), kept=kept, packed=self.model.packed)

    def encode(self, patches, grids):
        grids = [Grid(*grid) if len(grid) == 3 else Grid(1, *grid) for grid in grids]
        shares = assign_images(self.whole, grids, self.ranks.size)
        own = shares[self.ranks.rank]
        starts = [0]
        for grid in grids:
            starts.append(starts[-1] + grid.patches)
        found = {}
        if own:
            plan = self.plan([grids[i] for i in own])
            for batch in plan.batches:
                chosen = [own[n] for n in batch.indices]
                rows = patches[starts[chosen[0]]:starts[chosen[-1] + 1]] if chosen[-1] - chosen[0] == len(chosen) - 1 else torch.cat([patches[starts[i]:starts[i + 1]] for i in chosen])
                meta = self.model.prepare([grids[i] for i in chosen], plan.rows, plan.groups, positions=self.positions)
                found.update(zip(chosen, self.model(rows.flatten(1), meta)))
        owners = [next(r for r, share in enumerate(shares) if n in share) for n in range(len(grids))]
        return self.ranks.exchange(found, owners, lambda n: torch.empty(grids[n].tokens, self.whole.text_hidden_size, dtype=self.model.projector.dtype, device=self.model.device))


class _Ours:
    """Stands for vLLM's tower and projector classes while a model is built."""

    def __init__(self, whole, own):
        self.model = VisionModel(own)

    def tower(self, *args, **kwargs):
        return self.model.vision_tower

    def projector(self, *args, **kwargs):
        return self.model.projector


@contextmanager
def _instead(module, names):
    before = {name: getattr(module, name) for name in names}
    for name, made in names.items():
        setattr(module, name, made)
    try:
        yield
    finally:
        for name, made in before.items():
            setattr(module, name, made)


def _read(model_config: Any) -> VisionConfig:
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    raw = get_hf_file_to_dict("config.json", model_config.model, model_config.revision)
    return config_from_dict(raw)


class _Bounded:
    _module: Any
    _names: tuple[str, str]

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        whole = _read(vllm_config.model_config)
        tp = get_tensor_model_parallel_world_size()
        mode = vllm_config.model_config.get_multimodal_config().mm_encoder_tp_mode
        divided = tp > 1 and mode != "data" and whole.num_heads % tp == 0 and whole.intermediate_size % tp == 0
        ours = _Ours(whole, split_tensors(whole, tp) if divided else whole)
        with _instead(self._module, dict(zip(self._names, (ours.tower, ours.projector)))):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        dtype = vllm_config.model_config.dtype
        ours.model.to(dtype=dtype).eval()
        self.__dict__["_bounded"] = None if isinstance(self.vision_tower, StageMissingLayer) else Bounded(vllm_config, whole, ours.model, divided)
        if divided:
            for block in ours.model.vision_tower.encoder.blocks:
                for name in SUMMED:
                    block.get_submodule(name).register_forward_hook(lambda _l, _g, out: tensor_model_parallel_all_reduce(out))
        log.info("moonvit: bounded %s tower, %s", whole.family, "divided" if divided else "whole")

    def load_weights(self, weights):
        vision = []

        def others():
            for name, tensor in weights:
                if is_vision(name) and self._bounded is not None:
                    vision.append((name, tensor))
                else:
                    yield name, tensor

        loaded = super().load_weights(others())
        if vision:
            bounded = self._bounded
            pairs = vision
            if bounded.divided:
                part = Part(bounded.whole, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
                pairs = ((name, part.take(name, tuple(t.shape), t)) for name, t in vision)
            loaded |= load_tensors(bounded.model, pairs)
        return loaded


class BoundedKimiVL(_Bounded, kimi_vl.KimiVLForConditionalGeneration):
    _module, _names = kimi_vl, ("MoonVitPretrainedModel", "KimiVLMultiModalProjector")

    def _process_image_input(self, image_input):
        return self._bounded.encode(image_input["pixel_values"], image_input["image_grid_hws"].tolist())


class BoundedKimiK25(_Bounded, kimi_k25.KimiK25ForConditionalGeneration):
    _module, _names = kimi_k25, ("MoonViT3dPretrainedModel", "KimiK25MultiModalProjector")

    def _process_media_input(self, media_input):
        return self._bounded.encode(media_input["pixel_values"], media_input["grid_thws"].tolist())
