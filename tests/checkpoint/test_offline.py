"""One process writes for many ranks; any part of it is read back."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader

from megatron_omni.checkpoint.offline import OfflineReader, one_ahead, write_offline
from megatron_omni.checkpoint.shards import Box, Shards


def cut(tensor: torch.Tensor, dim: int, ranks: int) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Offsets and values of equal shares."""
    share = tensor.shape[dim] // ranks
    offsets = [[rank * share if d == dim else 0 for d in range(tensor.dim())] for rank in range(ranks)]
    return [(tuple(offset), tensor.narrow(dim, offset[dim], share)) for offset in offsets]


def write(folder: Path, tensors: dict[str, torch.Tensor], dim: int, ranks: int) -> None:
    parts = {name: cut(tensor, dim, ranks) for name, tensor in tensors.items()}
    plan = [
        {
            name: Shards(tuple(tensors[name].shape), (Box(offset, value.to("meta")),))
            for name, each in parts.items()
            for offset, value in [each[rank]]
        }
        for rank in range(ranks)
    ]
    # Copies: the writer takes the memory back.
    write_offline(plan, lambda rank, name: parts[name][rank][1].clone(), folder)


@settings(max_examples=25)
@given(
    shape=st.tuples(st.sampled_from([4, 8]), st.sampled_from([4, 12])),
    dim=st.sampled_from([0, 1]),
    ranks=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    data=st.data(),
)
def test_any_part_is_read_back_from_any_cut(shape, dim, ranks, dtype, data):
    tensors = {"a": torch.randn(shape).to(dtype), "b.c": torch.randn(shape).to(dtype)}
    part = tuple(
        slice(start, data.draw(st.integers(start, size)))
        for size in shape
        for start in [data.draw(st.integers(0, size))]
    )
    with TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, tensors, dim, ranks)
        assert {path.name for path in folder.glob("*.distcp")} == {f"__{r}_0.distcp" for r in range(ranks)}
        reader = OfflineReader(folder)
        assert reader.shapes == {name: tuple(shape) for name in tensors}
        for name, tensor in tensors.items():
            assert reader.dtype(name) == dtype
            assert torch.equal(reader.read(name, part), tensor[part])


def test_few_tensors_are_held_at_a_time(tmp_path):
    size, count, alive = 2**16, 40, []
    plan = [{str(i): Shards((size,), (Box((0,), torch.empty(size, device="meta")),)) for i in range(count)}]

    def resolve(rank: int, name: str) -> torch.Tensor:
        assert sum(tensor.untyped_storage().nbytes() > 0 for tensor in alive) <= 2
        alive.append(torch.full((size,), float(name)))
        return alive[-1]

    write_offline(plan, resolve, tmp_path)
    reader = OfflineReader(tmp_path)
    for i in range(count):
        assert reader.read(str(i), (slice(None),)).unique().tolist() == [i]


def test_an_error_while_reading_ahead_is_raised():
    def reciprocal(number: int) -> float:
        return 1 / number

    assert list(one_ahead(reciprocal, [])) == []
    assert list(one_ahead(reciprocal, [1, 2, 4])) == [1, 0.5, 0.25]
    results = one_ahead(reciprocal, [1, 0, 2])
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_metadata_is_pytorchs(tmp_path):
    write(tmp_path, {"a": torch.randn(4, 4)}, 0, 2)
    stored = FileSystemReader(tmp_path).read_metadata().state_dict_metadata["a"]
    assert [tuple(chunk.offsets) for chunk in stored.chunks] == [(0, 0), (2, 0)]
