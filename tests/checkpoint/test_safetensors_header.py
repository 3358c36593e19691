"""Headers made here are those that the safetensors library reads."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from megatron_omni.checkpoint.safetensors_folder import SafetensorsFolder, SafetensorsWriter, WeightFiles
from megatron_omni.checkpoint.safetensors_header import DTYPES, NAMES, Header

TENSORS = st.dictionaries(
    st.text("abc.é", min_size=1, max_size=6),
    st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 5), max_size=3)),
    min_size=1,
    max_size=6,
)


def values(tensors: dict) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape).to(DTYPES[dtype]) for name, (dtype, shape) in tensors.items()}


@given(tensors=TENSORS, metadata=st.sampled_from([{}, {"format": "pt"}]))
def test_the_library_reads_what_is_written_under_a_new_header(tensors, metadata):
    header = Header.of(((name, dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()), metadata)
    stored = values(tensors)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        writer = SafetensorsWriter(WeightFiles({path.name: header}, None), Path(folder))
        for name in reversed(stored):
            writer.write(name, stored[name])
        writer.close()
        assert path.stat().st_size == header.file_bytes
        assert Header.read(path) == header
        with safe_open(path, framework="pt") as file:
            assert (file.metadata() or {}) == metadata
            assert set(file.keys()) == set(stored)
            for name, tensor in stored.items():
                read = file.get_tensor(name)
                assert read.dtype == tensor.dtype and torch.equal(read, tensor)
        ours = SafetensorsFolder(Path(folder))
        for name, tensor in stored.items():
            assert torch.equal(ours.read(name, (slice(None),) * tensor.dim()), tensor)


@given(tensors=TENSORS, dtype=st.sampled_from(list(NAMES)))
def test_another_dtype_keeps_names_shapes_order_and_metadata(tensors, dtype):
    data = save(values(tensors), {"format": "pt"})
    before = Header(data[: 8 + int.from_bytes(data[:8], "little")])
    after = before.with_dtype(dtype)
    assert after.metadata == before.metadata
    assert {name: t.shape for name, t in after.tensors.items()} == {
        name: t.shape for name, t in before.tensors.items()
    }
    assert {t.dtype for t in after.tensors.values()} == {NAMES[dtype]}

    def order(header: Header) -> list[str]:
        filled = [name for name, tensor in header.tensors.items() if tensor.nbytes]
        return sorted(filled, key=lambda name: header.tensors[name].start)

    assert order(after) == order(before)


@given(tensors=TENSORS, limit=st.sampled_from(["0.2KB", "1KB", "5GB"]))
def test_shards_hold_every_tensor_once_and_keep_to_the_size(tensors, limit):
    header = Header.of(((name, dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()), {})
    files = WeightFiles({"model.safetensors": header}, None).resharded(limit)
    assert sum(len(each.tensors) for each in files.headers.values()) == len(tensors)
    bytes_of = {name: tensor.nbytes for name, tensor in header.tensors.items()}
    most = {"0.2KB": 200, "1KB": 1000, "5GB": 5 * 10**9}[limit]
    for each in files.headers.values():
        assert len(each.tensors) == 1 or sum(bytes_of[name] for name in each.tensors) <= most
    if files.index:
        name, text = files.index
        assert name == "model.safetensors.index.json"
        assert json.loads(text) == {
            "metadata": {"total_size": sum(bytes_of.values())},
            "weight_map": files.file_of,
        }
    else:
        assert list(files.headers) == ["model.safetensors"]
