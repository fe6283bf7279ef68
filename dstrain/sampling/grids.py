"""The grids that training shows: of samples, and the system's own pictures of data, the same ones every time."""

from collections.abc import Iterator

from torch import Tensor

from dstrain.data.batches import iterate_held_out
from dstrain.data.source import Source
from dstrain.distributed import group
from dstrain.recipe import Run, Samples
from dstrain.sampling.draw import (
    count_classes_as_grid_columns,
    draw_samples_for_first_rank,
    make_pictures_for_first_rank,
)
from dstrain.sampling.requests import make_sampling_request_and_captions, require_condition_per_sample
from dstrain.systems.base import Batch, Nets, Request, System


def make_grid_request_and_captions(samples: Samples, system: System, data: Batch) -> tuple[Request, list[str] | None]:
    """Returns the request for the samples of a grid, and the samples' captions, or None if there are no texts.

    data  {}, or a batch from which samples begin. Then one sample is drawn for each row of the batch: from the row's
          image or embedding, with the row's conditions, such as its label.

    Raises ConfigError if the system returns conditions for another number of samples.
    """
    request, captions = make_sampling_request_and_captions(
        samples, system, len(data["key"]) if data else samples.num, samples.seed
    )
    if data:
        own = {name: data[name] for name in request.conditions}
        begin = data["image_embed" if system.takes_embeddings else "image"]
        request.conditions.update(system.conditions_from(begin) | own)
        require_condition_per_sample(system, request.conditions, len(request.seeds))
    return request, captions


def draw_grids(
    run: Run, system: System, nets: Nets, source: Source, micro: int
) -> Iterator[tuple[Tensor | None, str, int | None, list[str] | None]]:
    """Draws the grids of pictures that training shows. All ranks call it together.

    source  the data from which some systems begin to draw, such as super-resolution.
    micro   the most samples that a rank draws in a call.

    Yields (images, name, columns, captions) of each grid:

    images    uint8 (N, ...) on the CPU of rank 0; None on the other ranks.
    columns   the grid's number of columns if each class has one; else None.
    captions  one for each image; None without texts.
    """
    samples = run.samples
    chunk = min(micro, -(-samples.num // group.world()))
    data: dict[str, Tensor] = {}
    columns = None  # the same for all grids, so that they align
    if system.starts_from_data:  # the same samples on every rank
        data = next(iterate_held_out(source, min(samples.num, len(source)), seed=run.seed))
    if system.generates:
        request, captions = make_grid_request_and_captions(samples, system, data)
        images = draw_samples_for_first_rank(system, nets, request, chunk)
        columns = count_classes_as_grid_columns(request)
        yield images, "samples", columns, captions
    if data:
        for name, images in make_pictures_for_first_rank(system, nets, data, chunk).items():
            yield images, name, columns, None
