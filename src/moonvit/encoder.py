"""``VisionEncoder``: pictures in, features out, under a budget. It owns the model, its device and its dtype.

A request is planned from picture headers before anything is decoded: grids, micro-batches, bytes. What is wrong with it
is said then. Pictures are then decoded, encoded and dropped one micro-batch at a time, so that memory follows the
largest picture and not their number. Every result has storage of its own.

With several ranks (``parallel.py``) each of them is given the whole request and looks at its headers. It decodes and
encodes its share, or works on its part of each layer; then all of them have all features, or the one that wants them.

Shape suffixes: L packed patches, C = 588 values of a patch, M merged tokens, E language width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from moonvit.attention import has_bfloat16, this_machine
from moonvit.cache import WeightCache
from moonvit.checkpoint import divide, load_vision, read_config, resolve
from moonvit.deploy import assign_images, resolve_mode
from moonvit.errors import ConfigError, EmptyInputError, GridError, ImageError, InvalidInputError, NonFiniteError
from moonvit.families import PATCH_VALUES, VisionConfig, family_config
from moonvit.graphs import CudaRecorder, GraphCache, Mode
from moonvit.grids import Grid, as_grid, as_grids
from moonvit.images import (
    DEFAULT_LIMITS,
    FetchPolicy,
    Limits,
    Picture,
    check_size,
    fetch_bytes,
    open_picture,
    picture_size,
)
from moonvit.model import FLOAT_DTYPES, Positions, VisionModel, as_patches, check_frames
from moonvit.parallel import Parallel, Ranks, sum_up
from moonvit.plan import POSITION_CACHE, Batch, Budget, Kept, Plan, make_plan, read_bytes
from moonvit.preprocess import DECODED_BYTES, patches_from, resize_plan
from moonvit.sources import is_address

T = TypeVar("T")
Loader: TypeAlias = Callable[[tuple[int, int] | None], VisionModel]
"""Makes a model, or the part that a rank of so many has."""
SMALLEST = Grid(1, 2, 2)
"""The smallest picture there is, in patches."""
_ARRAYS = ("uint8", "float16", "float32", "float64")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOAT_DTYPES}


@dataclass(frozen=True, eq=False)
class Features:
    """What the language model gets for one picture.

    Attributes:
        tensor: (M, E) in the encoder's dtype, on its device, with storage of its own.
        grid: Patches of the picture.
        source_size: Width and height of the picture as it was given, upright, in pixels.
    """

    tensor: torch.Tensor
    grid: Grid
    source_size: tuple[int, int]

    @property
    def tokens(self) -> int:
        """Rows of ``tensor`` (M)."""
        return self.grid.tokens


@dataclass
class _Pictured:
    """A picture of a request, and its size: what its header says, then what it decoded to."""

    item: Any
    size: tuple[int, int] = (0, 0)


class _Pack(NamedTuple):
    """Pictures of a pass that are to be encoded, with what to keep their features under, and features of the others."""

    patches_LC: torch.Tensor
    keys: dict[int, Any]
    kept: dict[int, torch.Tensor]


class VisionEncoder:
    """Tower and projector of one model, ready for pictures.

    Args:
        model: In evaluation mode, on the device and in the dtype to work in.
        budget: Bytes a request may take beyond weights, inputs, outputs and caches; a number, ``"256MiB"``, ``"auto"``.
        limits: What untrusted pictures may be.
        fetch: Who may be asked for http(s) pictures; None refuses them all.
        position_cache: Bytes of resampled position tables that are kept for the next request, least recently used
            first to go. Features are the same bits with and without.
        feature_cache: Bytes of features that are kept for pictures that come again; 0 keeps none.
        parallel: The ranks to work with, each of which makes the same calls; None is this process alone.
        graph_cache: Bytes of CUDA graphs of the blocks, for requests of many small pictures; 0 records none.

    A weight that changes, in place or by another tensor, empties the caches; what is written through ``.data`` is not
    seen, so call ``clear_caches`` then. ``close``, or leaving a ``with`` block, gives all memory back.

    Raises:
        BudgetError: Not even the smallest picture fits the budget.
        ConfigError: A number of bytes cannot be read, or the ranks do not divide heads and MLP.
        InvalidInputError: The ranks were given different models or settings.
        EngineError: A rank is gone; so may everything raise that encodes with several.
    """

    def __init__(
        self,
        model: VisionModel,
        *,
        budget: Budget | int | str = "auto",
        limits: Limits | None = None,
        fetch: FetchPolicy | None = None,
        position_cache: int | str = POSITION_CACHE,
        feature_cache: int | str = 0,
        parallel: Parallel | None = None,
        graph_cache: int | str = 0,
    ) -> None:
        def read() -> tuple[VisionConfig, Loader]:
            return model.config, lambda part: model if part is None else divide(model, part)

        self._open(read, parallel, budget, limits, fetch, position_cache, feature_cache, graph_cache)

    def _open(
        self,
        read: Callable[[], tuple[VisionConfig, Loader]],
        parallel: Parallel | None,
        budget: Budget | int | str,
        limits: Limits | None,
        fetch: FetchPolicy | None,
        position_cache: int | str,
        feature_cache: int | str,
        graph_cache: int | str,
    ) -> None:
        self._ranks = Ranks.of(parallel)
        self._parallel = parallel or Parallel()

        def build() -> VisionModel:
            self._config, load = read()
            receiver = self._parallel.receiver
            if receiver is not None and receiver >= self._ranks.size:
                raise ConfigError(
                    f"receiver = {receiver}, but the ranks of the group are 0 to {self._ranks.size - 1}",
                    param="receiver",
                )
            mode = resolve_mode(self._config, self._ranks.size, self._parallel.mode)
            self._divided = mode == "tensor" and self._ranks.size > 1
            model = load((self._ranks.rank, self._ranks.size) if self._divided else None)
            self._model: VisionModel | None = model
            self.budget = budget if isinstance(budget, Budget) else Budget(budget)
            self.limits = limits or DEFAULT_LIMITS
            self.fetch = fetch
            self._positions: Positions = WeightCache(read_bytes(position_cache, "position_cache"))
            self._features: WeightCache[Any, torch.Tensor] = WeightCache(read_bytes(feature_cache, "feature_cache"))
            self._graphs = self._graph_cache(model, read_bytes(graph_cache, "graph_cache"))
            self._plan([SMALLEST])  # a budget that no picture fits is refused now
            return model

        model = self._ranks.together(build, self._settings)
        if self._divided:
            sum_up(model, self._ranks)

    def _graph_cache(self, model: VisionModel, nbytes: int) -> GraphCache | None:
        if not nbytes:
            return None
        if model.device.type != "cuda":
            raise ConfigError(f"graph_cache = {nbytes}: {model.device} has no CUDA graphs", param="graph_cache")
        mode: Mode = "tensor" if self._divided else "data" if self._ranks.size > 1 else "single"
        return GraphCache(model, nbytes, CudaRecorder(mode, self._parallel.capture))

    def _settings(self, model: VisionModel) -> Mapping[str, Any]:
        """What an encoder must have the same on all ranks."""
        # The last norm is whole on every rank, and another in another checkpoint.
        norm = model.get_parameter("vision_tower.encoder.final_layernorm.weight").detach()
        how: dict[str, Any] = {"weights": hashlib.sha256(norm.float().cpu().numpy().tobytes()).hexdigest()[:16]}
        how |= {"mode": self._parallel.mode, "receiver": self._parallel.receiver, "dtype": str(model.dtype)}
        graphs = self._graphs.max_bytes if self._graphs is not None else 0
        caches = {"feature_cache": bool(self._features.max_bytes), "graph_cache": graphs}
        return {**asdict(self._config), **how, **caches}

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = "auto",
        budget: Budget | int | str = "auto",
        limits: Limits | None = None,
        fetch: FetchPolicy | None = None,
        position_cache: int | str = POSITION_CACHE,
        feature_cache: int | str = 0,
        parallel: Parallel | None = None,
        graph_cache: int | str = 0,
    ) -> VisionEncoder:
        """Load a checkpoint; only the files that hold vision are read, or brought from the hub.

        Args:
            path_or_id: Checkpoint directory, or ``owner/name`` on the Hugging Face hub.
            device: Where the model works.
            dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``, whatever the file holds; ``"auto"`` is bfloat16 where
                the device has instructions for it, and float32 elsewhere.
            budget: As in the constructor.
            limits: As in the constructor.
            fetch: As in the constructor.
            position_cache: As in the constructor.
            feature_cache: As in the constructor.
            parallel: As in the constructor. With heads and MLP divided, no rank reads more than its part of them.
            graph_cache: As in the constructor.

        Returns:
            The encoder.

        Raises:
            CheckpointError: Files are missing or broken, or the tensors are not exactly those of the model.
            ConfigError: ``config.json`` is not of a known model, the dtype is another, or the device is not there.
            MissingDependencyError: A hub id without ``huggingface_hub`` installed.
        """

        def read() -> tuple[VisionConfig, Loader]:
            place = _device(device)
            wanted = _dtype(dtype, place)
            local = resolve(path_or_id)
            config, _ = read_config(local)
            return config, lambda part: load_vision(config, local, wanted, place, part)

        encoder = cls.__new__(cls)
        encoder._open(read, parallel, budget, limits, fetch, position_cache, feature_cache, graph_cache)
        return encoder

    @classmethod
    def from_config(
        cls,
        name: str,
        *,
        seed: int = 0,
        dtype: torch.dtype | str = "float32",
        device: torch.device | str = "cpu",
        budget: Budget | int | str = "auto",
        limits: Limits | None = None,
        fetch: FetchPolicy | None = None,
        position_cache: int | str = POSITION_CACHE,
        feature_cache: int | str = 0,
        parallel: Parallel | None = None,
        graph_cache: int | str = 0,
        **overrides: Any,
    ) -> VisionEncoder:
        """A model with random weights, for tests, sizing and benchmarks.

        Args:
            name: Family, as ``family_config`` reads it.
            seed: The same seed gives the same weights.
            dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"auto"``.
            device: Where the model works.
            budget: As in the constructor.
            limits: As in the constructor.
            fetch: As in the constructor.
            position_cache: As in the constructor.
            feature_cache: As in the constructor.
            parallel: As in the constructor.
            graph_cache: As in the constructor.
            **overrides: Fields of ``VisionConfig``, such as ``num_layers=2``.

        Returns:
            The encoder.

        Raises:
            ConfigError: The family, a field or the dtype is unknown, or the device is not there.
        """

        def read() -> tuple[VisionConfig, Loader]:
            config, place = family_config(name, **overrides), _device(device)
            wanted = _dtype(dtype, place)

            def load(part: tuple[int, int] | None) -> VisionModel:
                if part is None:
                    return VisionModel.empty(config, wanted, place).init_weights_(seed)
                outline = VisionModel.empty(config, wanted, "meta")
                return divide(outline, part, outline.random_weights(seed), place)

            return config, load

        encoder = cls.__new__(cls)
        encoder._open(read, parallel, budget, limits, fetch, position_cache, feature_cache, graph_cache)
        return encoder

    def __enter__(self) -> VisionEncoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the model and empty the caches. Results that were given out stay good; a second call is nothing."""
        self._model = None
        self.clear_caches()
        self._graphs = None

    def clear_caches(self) -> None:
        """Forget kept positions, features and graphs."""
        self._positions.clear()
        self._features.clear()
        if self._graphs is not None:
            self._graphs.clear()

    @property
    def model(self) -> VisionModel:
        """Tower and projector; with heads and MLP divided over ranks, this rank's part.

        Raises:
            InvalidInputError: The encoder is closed.
        """
        if self._model is None:
            raise InvalidInputError("this encoder is closed")
        return self._model

    @property
    def config(self) -> VisionConfig:
        """What the model is, all of it, with or without ranks.

        Raises:
            InvalidInputError: The encoder is closed.
        """
        _ = self.model
        return self._config

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the features, and of the weights that are not packed."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where the model works, and where features lie."""
        return self.model.device

    def plan(self, items: Any) -> Plan:
        """What a request would take, without decoding or running it.

        With several ranks it is what one of them takes that is given all of it; ``moonvit.deploy`` plans their shares.

        Args:
            items: One item or a list: (width, height) in pixels, a ``Grid`` or (t, h, w) in patches, or a picture as
                ``encode`` takes it, of which only the header is read.

        Returns:
            Tokens, patches, micro-batches, bytes and FLOPs.

        Raises:
            EmptyInputError: There are no items.
            GridError: A grid is not legal.
            ImageError: A header cannot be read, or the picture is over a limit.
            BudgetError: An item needs more than the budget.
        """
        listed = [items] if _is_one(items) else list(items)
        return self._plan_sized([self._grid(item, index) for index, item in enumerate(listed)])

    def encode(self, items: Any) -> list[Features]:
        """Encode pictures.

        Args:
            items: One picture or a list: path, ``data:`` URL, http(s) URL where ``fetch`` allows it, bytes, PIL image,
                uint8 array (H, W, 3), or an opened ``Picture``.

        Returns:
            Features in the order of the items; none on a rank that does not receive them.

        Raises:
            EmptyInputError: There are no items.
            ImageError: A picture cannot be read, or is over a limit.
            BudgetError: A picture needs more than the budget.
            NonFiniteError: The model gave NaN or infinity.
        """
        listed = list(items) if isinstance(items, (list, tuple)) else [items]
        with self._ranks.request():
            pictures, plan = self._ranks.together(lambda: self._look(listed), lambda made: self._facts(made[1]))
            return self._encode(pictures, plan, plan.batches)

    def _look(self, items: Sequence[Any]) -> tuple[list[_Pictured], Plan]:
        """Read all headers, and plan."""
        items = [self._fetched(item, index) for index, item in enumerate(items)]
        sized = [self._picture_grid(item, index) for index, item in enumerate(items)]
        return [_Pictured(item, size) for item, (_, size) in zip(items, sized, strict=True)], self._plan_sized(sized)

    def _look_again(self, items: Sequence[Any], batch: Batch) -> list[_Pictured]:
        """Pictures whose headers were read for a plan; of those that other ranks decode the size is read again."""
        pictures = [_Pictured(item) for item in items]
        if self._ranks.size > 1:
            for index in batch.indices:
                pictures[index].size = self._picture_grid(items[index], index)[1]
        return pictures

    def encode_batch(self, items: Sequence[Any], plan: Plan, batch: Batch) -> list[Features]:
        """Encode the pictures of one pass of a request, for callers that do something between passes.

        Args:
            items: All pictures of the request, as ``plan`` was given them, addresses apart.
            plan: What ``plan`` made of them.
            batch: One of ``plan.batches``.

        Returns:
            Features of the pictures ``batch.indices``.

        Raises:
            ImageError: A picture cannot be read, or its header promised another size.
            NonFiniteError: The model gave NaN or infinity.
        """
        with self._ranks.request():
            facts = {**self._facts(plan), "batch": list(batch.indices)}
            pictures = self._ranks.together(lambda: self._look_again(items, batch), lambda _: facts)
            return self._encode(pictures, plan, (batch,))

    def _encode(self, pictures: list[_Pictured], plan: Plan, batches: Sequence[Batch]) -> list[Features]:
        indices = [index for batch in batches for index in batch.indices]
        tensors = self._work(plan, batches, lambda own, made: self._encode_pass(pictures, plan, own, made))
        if not tensors:
            return []
        pairs = zip(indices, tensors, strict=True)
        return [Features(tensor, plan.grids[index], pictures[index].size) for index, tensor in pairs]

    def _work(
        self, plan: Plan, batches: Sequence[Batch], one_pass: Callable[[Sequence[int], Plan], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Do this rank's share of some passes of a plan, then share what all have made.

        Args:
            plan: Of the request.
            batches: Some of its passes.
            one_pass: Gives features of some images, in rows and groups of a plan.

        Returns:
            Features of all images of the passes, in order; none where this rank does not receive them.
        """
        ranks, receiver = self._ranks, self._parallel.receiver
        indices = [index for batch in batches for index in batch.indices]
        wanted = receiver in (None, ranks.rank)
        if ranks.size == 1 or self._divided:
            tensors = self._passes(plan, [batch.indices for batch in batches], one_pass)
            return [tensors[index] for index in indices] if wanted else []

        shares = assign_images(self._config, [plan.grids[index] for index in indices], ranks.size)
        owners = {indices[place]: rank for rank, share in enumerate(shares) for place in share}
        own = [indices[place] for place in shares[ranks.rank]]

        def share() -> dict[int, torch.Tensor]:
            found: dict[int, torch.Tensor] = {}
            if own:
                made = self._plan([plan.grids[index] for index in own])
                passes = [[own[place] for place in batch.indices] for batch in made.batches]
                found = self._passes(made, passes, one_pass)
            # Room for what others give is made here, where a lack of it can still be told to them.
            return found | {index: self._room(plan.grids[index]) for index in indices if wanted and index not in found}

        tensors = ranks.together(share)
        ranks.exchange(tensors, {index: owners[index] for index in indices}, receiver)
        return [tensors[index] for index in indices] if wanted else []

    def _passes(
        self,
        made: Plan,
        passes: Sequence[Sequence[int]],
        one_pass: Callable[[Sequence[int], Plan], list[torch.Tensor]],
    ) -> dict[int, torch.Tensor]:
        """Features of images of this rank, by their index in the request."""
        found: dict[int, torch.Tensor] = {}
        for chosen in passes:
            self._ranks.check()
            found.update(zip(chosen, one_pass(chosen, made), strict=True))
        if self._divided:
            self._ranks.settle()  # to read a result is to wait for all ranks, of which one may be gone
        self._step(lambda: self._refuse_non_finite(found))
        return found

    def _room(self, grid: Grid) -> torch.Tensor:
        return torch.empty(grid.tokens, self._config.text_hidden_size, dtype=self.dtype, device=self.device)

    def _encode_pass(
        self, pictures: list[_Pictured], plan: Plan, indices: Sequence[int], made: Plan
    ) -> list[torch.Tensor]:
        if self._features.max_bytes:
            self._features.watch(self.model.parameters(), self.model.moves)
        pack = self._step(lambda: self._pack(pictures, plan, indices))
        tensors = dict(pack.kept)
        if self._divided and self._features.max_bytes:
            pack, tensors = self._known_to_all(pack, plan)
        grids = [plan.grids[index] for index in pack.keys]
        if grids:
            tensors.update(zip(pack.keys, self._run(pack.patches_LC, grids, made), strict=True))
        self._step(lambda: self._keep(pack, tensors))
        return [tensors[index] for index in indices]

    def _keep(self, pack: _Pack, tensors: Mapping[int, torch.Tensor]) -> None:
        for index, key in pack.keys.items():
            if key and self._features.make_room(tensors[index].nbytes):
                self._features.put(key, tensors[index].clone(), tensors[index].nbytes)

    def _pack(self, pictures: list[_Pictured], plan: Plan, indices: Sequence[int]) -> _Pack:
        # Pictures are decoded one at a time, each into its rows of the pack, and dropped. One whose features are kept
        # leaves its rows to the next; where ranks go through each layer together, only if all of them have kept it.
        pack_LC = torch.empty(sum(plan.grids[index].patches for index in indices), PATCH_VALUES, dtype=torch.uint8)
        keys: dict[int, Any] = {}
        found: dict[int, torch.Tensor] = {}
        row = 0
        for index in indices:
            grid = plan.grids[index]
            picture = self._opened(pictures[index].item, index, grid)
            pictures[index].size = picture.size
            key = self._key(picture) if self._features.max_bytes else None
            kept = self._features.get(key) if key else None
            if kept is not None:
                found[index] = kept.clone()
                if not self._divided:
                    continue
            patches_from(picture, self.config.rule, pack_LC[row : row + grid.patches].numpy())
            row += grid.patches
            keys[index] = key
            del picture
        return _Pack(pack_LC[:row], keys, found)

    def _known_to_all(self, pack: _Pack, plan: Plan) -> tuple[_Pack, dict[int, torch.Tensor]]:
        """What all ranks have kept, and a pack of the other images."""
        known = dict(zip(pack.keys, self._ranks.common([index in pack.kept for index in pack.keys]), strict=True))
        kept = {index: pack.kept[index] for index in pack.keys if known[index]}
        rows = torch.split(pack.patches_LC, [plan.grids[index].patches for index in pack.keys])
        rest = [part for part, index in zip(rows, pack.keys, strict=True) if not known[index]]
        keys = {index: key for index, key in pack.keys.items() if not known[index]}
        return _Pack(torch.cat(rest) if kept and rest else pack.patches_LC, keys, kept), kept

    def _step(self, work: Callable[[], T]) -> T:
        """Work between two layers that ranks go through together: an error of one must not leave the others there."""
        return self._ranks.together(work) if self._divided else work()

    def _key(self, picture: Picture) -> tuple[Any, ...]:
        """What the features of a picture depend on, the weights apart."""
        return picture.digest, picture.size, picture.image.mode, self.config.rule, self.dtype

    def encode_patches(self, patches: torch.Tensor | np.ndarray, grids: Iterable[Any]) -> list[torch.Tensor]:
        """Encode patches that were made elsewhere.

        Args:
            patches: (L, 588) or (L, 3, 14, 14), images one behind the other; uint8 pixels, or floats normalised to
                -1 .. 1. On any device.
            grids: A ``Grid``, (t, h, w) or (h, w), alone or for each image, or an integer tensor (N, 2) or (N, 3).

        Returns:
            features (M, E) of each image, in order, each with storage of its own; none on a rank that does not receive
            them.

        Raises:
            EmptyInputError: There are no grids.
            GridError: A grid is not legal, or the patches are not those of the grids.
            BudgetError: An image needs more than the budget.
            NonFiniteError: The model gave NaN or infinity.
        """
        with self._ranks.request():
            pack_LC, plan = self._ranks.together(lambda: self._match(patches, grids), lambda made: self._facts(made[1]))
            starts = [0, *accumulate(grid.patches for grid in plan.grids)]

            def one_pass(indices: Sequence[int], made: Plan) -> list[torch.Tensor]:
                found: list[torch.Tensor] = []
                for run in _runs(indices) if pack_LC.is_floating_point() else [list(indices)]:
                    # Floats that do not lie together go through one after the other: a copy would outweigh the plan.
                    parts = [pack_LC[starts[part[0]] : starts[part[-1] + 1]] for part in _runs(run)]
                    rows_LC = parts[0] if len(parts) == 1 else torch.cat(parts)
                    found += self._run(rows_LC, [plan.grids[index] for index in run], made)
                return found

            return self._work(plan, plan.batches, one_pass)

    def _match(self, patches: Any, grids: Any) -> tuple[torch.Tensor, Plan]:
        """Patches (L, 588) that are those of the grids, and a plan."""
        if not isinstance(grids, Iterable):
            raise GridError(f"grids are {type(grids).__name__}: expected a grid or a list of grids", param="grids")
        checked = as_grids([grids] if isinstance(grids, Grid) or _is_sides(grids) else grids)
        pack = _as_tensor(patches)
        _match_rows(pack, checked)
        return as_patches(pack, sum(grid.patches for grid in checked)), self._plan(checked)

    def _facts(self, plan: Plan) -> Mapping[str, Any]:
        """What of a request must be the same on all ranks."""
        facts: dict[str, Any] = {"grids": [tuple(grid) for grid in plan.grids]}
        if self._divided:
            facts["passes"] = [plan.rows, plan.groups, *(len(batch.indices) for batch in plan.batches)]
        return facts

    def _plan_sized(self, sized: Sequence[tuple[Grid, tuple[int, int]]]) -> Plan:
        pixels = (size[0] * size[1] for _, size in sized)
        return self._plan([grid for grid, _ in sized], max(pixels, default=0))

    def _plan(self, grids: Sequence[Grid], pixels: int = 0) -> Plan:
        if not grids:
            raise EmptyInputError("nothing to encode: a request needs at least one picture")
        check_frames(self.config, grids)
        name = str(self.dtype).removeprefix("torch.")
        positions, features = self._positions, self._features
        graphs = self._graphs.max_bytes if self._graphs is not None else 0
        kept = Kept(positions.max_bytes, tuple(positions.keys()), features.max_bytes, features.bytes, graphs)
        return make_plan(
            self.model.config,
            grids,
            dtype=name,
            budget=self.budget,
            machine=this_machine(self.device.type),
            kept=kept,
            packed=self.model.packed,
            decoded=pixels * DECODED_BYTES,
        )

    def _grid(self, item: Any, index: int) -> tuple[Grid, tuple[int, int]]:
        """Patches of an item, and the size of the picture behind it."""
        if not isinstance(item, (list, tuple)):
            return self._picture_grid(item, index)
        if len(item) != 2:
            return as_grid(item, index), (0, 0)
        return self._sized_grid((item[0], item[1]), index), (item[0], item[1])

    def _picture_grid(self, item: Any, index: int) -> tuple[Grid, tuple[int, int]]:
        known = isinstance(item, Picture)
        size = item.size if known else picture_size(item, self.limits, index, fetch=self.fetch)
        return self._sized_grid(size, index), size

    def _sized_grid(self, size: tuple[int, int], index: int) -> Grid:
        if not _is_sides(size):
            raise ImageError(f"image {index}: {size} is not a width and a height in whole pixels", param=_param(index))
        check_size((int(size[0]), int(size[1])), self.limits, index)
        try:
            return resize_plan(self.config.rule, *size).grid
        except ImageError as error:
            raise ImageError(f"image {index}: {error.message}", param=_param(index)) from None

    def _fetched(self, item: Any, index: int) -> Any:
        """An address is asked once, though a picture is looked at twice."""
        if isinstance(item, str) and is_address(item):
            return fetch_bytes(item, self.fetch, self.limits, index)
        return item

    def _opened(self, item: Any, index: int, planned: Grid) -> Picture:
        picture = item if isinstance(item, Picture) else open_picture(item, self.limits, self.fetch, index)
        found = self._sized_grid(picture.size, index)
        if found != planned:
            raise ImageError(
                f"image {index}: its header promises {tuple(planned)} patches, it decodes to {tuple(found)}",
                param=_param(index),
            )
        return picture

    def _run(self, pack_LC: torch.Tensor, grids: Sequence[Grid], made: Plan) -> list[torch.Tensor]:
        with self._ranks.linked() if self._divided else nullcontext():
            meta = self.model.prepare(grids, made.rows, made.groups, positions=self._positions)
            results: list[torch.Tensor] = self.model(pack_LC.to(self.device), meta, self.dtype, blocks=self._graphs)
            return results

    def _refuse_non_finite(self, results: Mapping[int, torch.Tensor]) -> None:
        # The extremes of a tensor are NaN or infinite where any value is; unlike isfinite they need no memory. All
        # images are asked in one read, so a GPU is waited for once.
        extremes = torch.stack([torch.stack(torch.aminmax(features)).float() for features in results.values()])
        finite = extremes.isfinite().all(dim=1).tolist()
        if not all(finite):
            index = list(results)[finite.index(False)]
            self._features.clear()  # what was just kept may be among them
            raise NonFiniteError(
                f"image {index}: the encoder gave NaN or infinity in {self.dtype}; "
                "check the weights, or use a dtype with more range",
                param=_param(index),
            )


def _dtype(value: torch.dtype | str, device: torch.device) -> torch.dtype:
    if value == "auto":
        # Without instructions for it, a CPU takes fifty times as long in bfloat16 as in float32.
        fast = has_bfloat16() if device.type == "cpu" else _bfloat16_runs(device)
        return torch.bfloat16 if fast else torch.float32
    dtype = _DTYPES.get(value) if isinstance(value, str) else value
    if dtype not in FLOAT_DTYPES:
        raise ConfigError(f"dtype = {value!r}: known are {', '.join(_DTYPES)}, auto", param="dtype")
    return dtype


def _bfloat16_runs(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _device(value: torch.device | str) -> torch.device:
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch says "not compiled with" by an assertion
        why = str(error).splitlines()[0][:100]
        raise ConfigError(f"device = {str(value)[:40]!r} cannot be used: {why}", param="device") from None
    return device


def _is_one(items: Any) -> bool:
    """Whether ``plan`` was given one item; a pair or triple of numbers is a size or a grid."""
    return not isinstance(items, (list, tuple)) or _is_sides(items)


def _is_sides(item: Any) -> bool:
    """Whether this is a size or a grid: whole numbers, those of numpy included."""
    return isinstance(item, (list, tuple)) and bool(item) and all(hasattr(side, "__index__") for side in item)


def _runs(indices: Sequence[int]) -> list[list[int]]:
    """Ascending numbers, those that follow each other together."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _param(index: int) -> str:
    return f"images[{index}]"


def _as_tensor(patches: Any) -> torch.Tensor:
    if isinstance(patches, torch.Tensor):
        if patches.layout != torch.strided or patches.is_meta:
            raise InvalidInputError("patches are a sparse or meta tensor: expected values in rows", param="patches")
        return patches
    if not isinstance(patches, np.ndarray) or patches.dtype.name not in _ARRAYS:
        what = f"an array of {patches.dtype}" if isinstance(patches, np.ndarray) else type(patches).__name__
        raise InvalidInputError(f"patches are {what}: expected a tensor, or an array of {_ARRAYS}", param="patches")
    # torch takes arrays that may be written to and that run forwards.
    plain = patches.flags.writeable and all(stride >= 0 for stride in patches.strides)
    return torch.from_numpy(patches if plain else patches.copy())


def _match_rows(patches: torch.Tensor, grids: Sequence[Grid]) -> None:
    """Name the first image that the patches do not cover."""
    rows, end = patches.shape[0] if patches.ndim else 0, 0
    for index, grid in enumerate(grids):
        end += grid.patches
        if end > rows:
            raise GridError(
                f"grid {index}: {tuple(grid)} needs {grid.patches} patches, rows {end - grid.patches} to {end}, "
                f"but there are only {rows} rows",
                param=f"grids[{index}]",
            )
    if end < rows:
        raise GridError(
            f"{rows} rows of patches, but the grids end at {end}: {rows - end} rows belong to none of them",
            param="patches",
        )
